"""What is to be started: one run, or a sweep of many, of one recipe; and the launch.json that remembers it."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullframe.errors import LaunchError
from fullframe.observation.json_files import read_object
from fullframe.processes.whole_files import replace_text

NAME = "launch.json"
_SLUG_LENGTH = 80


@dataclass(frozen=True, kw_only=True)
class RunOfJob:
    """One run: where it writes, below the job's folder ("." for the folder itself), and what its recipe is given."""

    place: str
    values: tuple[str, ...]  # "lr=1e-3"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Runs of one recipe that are started together, each on its own machines.

    folder:  where script and launch.json lie, and the runs' directories
    directory: where the commands run: the recipe's path, if relative, is relative to it
    options: of `fullframe train`, the recipe first; without --run-dir and what differs from run to run
    """

    name: str
    folder: Path
    directory: Path
    options: tuple[str, ...]
    runs: tuple[RunOfJob, ...]
    nodes: int
    gpus_per_node: int | None
    cpus_per_node: int | None
    python: str

    @property
    def is_sweep(self) -> bool:
        """Whether each run has a directory of its own below the folder."""
        return self.runs[0].place != "."


def runs_of(sweep: Sequence[str]) -> tuple[RunOfJob, ...]:
    """One run for each combination of `name=value,value` words, the last one's values changing fastest.

    Raises LaunchError for a word that is none, a name given twice, and a value given twice.
    """
    if not sweep:
        return (RunOfJob(place=".", values=()),)
    axes = [_axis(word) for word in sweep]
    names = [name for name, _ in axes]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise LaunchError(f"--sweep names {', '.join(sorted(twice))} twice; write its values once, name=a,b,c")
    combinations = enumerate(itertools.product(*([f"{name}={value}" for value in found] for name, found in axes)))
    return tuple(RunOfJob(place=f"{n:04d}-{slug(','.join(values))}", values=values) for n, values in combinations)


def _axis(word: str) -> tuple[str, list[str]]:
    name, equals, text = word.partition("=")
    if not equals or not name.isidentifier():
        raise LaunchError(f"--sweep {word!r} is no sweep; write name=value,value as in lr=1e-3,3e-4")
    values = _split(text)
    if not all(values):
        raise LaunchError(f"--sweep {word!r} has an empty value; write '' in quotes for an empty text")
    if len(set(values)) < len(values):
        raise LaunchError(f"--sweep {word!r} has a value twice, which would be the same run twice")
    return name, values


def _split(text: str) -> list[str]:
    """The values between commas that stand in no bracket and no quotes: `(1,2),(3,4)` are two."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if character == "," and depth <= 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    return values


def slug(text: str) -> str:
    """`text` as a part of a file's name, and of a job's: letters, digits and `_.,=+-`, not too long."""
    return re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", text)[:_SLUG_LENGTH] or "_"


def write_launch(job: Job, facts: Mapping[str, Any]) -> None:
    """Write launch.json, what `fullframe jobs` finds a job by before its runs have begun; replaces it atomically."""
    runs = [{"place": run.place, "values": list(run.values)} for run in job.runs]
    known = {"name": job.name, "options": list(job.options), "directory": str(job.directory), "nodes": job.nodes}
    replace_text(job.folder / NAME, json.dumps({**known, **facts, "runs": runs}, indent=1) + "\n")


def read_launch(folder: Path) -> dict[str, Any]:
    """What launch.json in `folder` says; {} where there is none that can be read, or another program's."""
    found = read_object(folder / NAME) or {}
    runs = found.get("runs", [])
    return found if isinstance(runs, list) and all(map(_is_run, runs)) else {}


def _is_run(known: Any) -> bool:
    fields = known if isinstance(known, dict) else {}
    return isinstance(fields.get("place"), str) and isinstance(fields.get("values"), list)


def make_folders(job: Job) -> None:
    """Make the job's folder and its runs' directories; raises LaunchError where that fails."""
    try:
        for run in job.runs:
            (job.folder / run.place).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot make {job.folder}: {error.strerror}; name another --run-dir") from error


def require_one_line(words: Iterable[str]) -> None:
    """Raises LaunchError for a word that no command line can carry."""
    for word in words:
        if "\0" in word:
            raise LaunchError(f"{word!r} has a zero byte, which no command line can carry")
