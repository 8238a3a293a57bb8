"""Jobs on Slurm: a script that a person can read, submit by hand and submit again."""

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from fullframe.errors import LaunchError
from fullframe.launching.job import Job, read_launch, require_one_line
from fullframe.processes.exit_reasons import AGAIN, STOPPED

SCRIPT = "job.sh"
_SECONDS = 120.0  # that Slurm's programs may take: a busy controller answers late
_SAFE = re.compile(r"[A-Za-z0-9_.,:@%+=/\[\]&|*()-]+")
_PLAIN_ID = re.compile(r"\d+(_\d+)?")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
_IN_VAIN = 3  # starts in a row without a step gained, after which a job is not queued again
_LAST_STEP = (
    """step() { tail -c 65536 "$run/metrics.jsonl" 2>/dev/null | grep -o '"step": [0-9]*' | tail -n 1; }""",
    "before=$(step)",
)
_KILLED_WHILE_STARTING = (128 + 10, 128 + 15)  # by USR1 or TERM, before Python could take them as a request


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What Slurm is told beside the machines."""

    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    after: tuple[str, ...] = ()  # ids of jobs
    parallel: int | None = None  # runs of a sweep at a time
    signal_seconds: int = 120
    requeues: int = 100
    extra: tuple[str, ...] = ()  # "mem=64G"


def script_of(job: Job, options: SlurmOptions) -> str:
    """The batch script; raises LaunchError for an option that is none.

    What a user names stands in it quoted for bash, or is refused where Slurm reads it, so that none of it is code.
    """
    lines = ["#!/bin/bash", f"# Written by fullframe launch; to submit it by hand: sbatch {SCRIPT}, in this folder."]
    lines += [f"#SBATCH {directive}" for directive in _directives(job, options)]
    lines += ["", f"cd -- {quote(str(job.directory))} || exit 1", f"folder={quote(str(job.folder))}"]
    lines += ["", *_choice(job)]
    lines += ["", "# Slurm's signals are for the ranks, which write a checkpoint; this script waits for them."]
    lines += ["trap : TERM USR1", *_LAST_STEP, *_command(job), "code=$?", "", *_requeue(options), "exit $code"]
    return "\n".join(lines) + "\n"


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    found: dict[str, object] = {
        "job-name": job.name,
        "output": "slurm-%A_%a.log" if job.is_sweep else "slurm-%j.log",
        "open-mode": "append",
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_node,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "signal": f"USR1@{options.signal_seconds}",
        "dependency": "afterok:" + ":".join(options.after) if options.after else None,
        "array": f"0-{len(job.runs) - 1}{f'%{options.parallel}' if options.parallel else ''}" if job.is_sweep else None,
    }
    for name, value in found.items():
        if value is not None and not _SAFE.fullmatch(str(value)):
            raise LaunchError(f"--{name} {value!r} has characters that Slurm's options cannot have")
    if options.time is not None and 0 < (_seconds(options.time) or 0) <= options.signal_seconds:
        raise LaunchError(
            f"--time {options.time} is over when a run is asked to stop, --signal-seconds {options.signal_seconds} "
            "before its end; give a longer limit, or fewer seconds"
        )
    lines = [f"--{name}={value}" for name, value in found.items() if value is not None]
    for word in options.extra:
        if not re.fullmatch(r"[a-z][a-z-]*(=.+)?", word) or not _SAFE.fullmatch(word):
            raise LaunchError(f"--sbatch {word!r} is no option of sbatch; write it as in mem=64G, with no space")
    return [*lines, "--requeue", *(f"--{word}" for word in options.extra)]


def _seconds(limit: str) -> int | None:
    """Slurm's minutes, minutes:seconds, hours:minutes:seconds or days-hours:minutes:seconds; None for anything else."""
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, days or "0"]) or len(parts) > 3:
        return None
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))


def _choice(job: Job) -> list[str]:
    """Bash that sets `run`, the run's directory, and `values`, what its recipe is given."""
    if not job.is_sweep:
        return ["run=$folder", "values=()"]
    lines = ["# The runs of this array: what the recipe is called with, and where each writes.", "values=(--set)"]
    lines.append("case $SLURM_ARRAY_TASK_ID in")
    for number, run in enumerate(job.runs):
        values = " ".join(quote(value) for value in run.values)
        lines.append(f"    {number}) run=$folder/{quote(run.place)} values+=({values}) ;;")
    return [*lines, '    *) echo "there is no run $SLURM_ARRAY_TASK_ID" >&2; exit 1 ;;', "esac"]


def _command(job: Job) -> list[str]:
    require_one_line(job.options)
    cpus = "" if job.cpus_per_node is None else f" --cpus-per-task={job.cpus_per_node}"
    words = [f"srun --kill-on-bad-exit=0{cpus} {quote(job.python)} -m fullframe.cli train", *_grouped(job.options)]
    nodes = f"--nodes {job.nodes} " if job.nodes > 1 else ""
    words.append(f'{nodes}--run-dir "$run" --auto-resume --stopped-code {STOPPED} "${{values[@]}}"')
    return [" \\\n    ".join(words)]


def _grouped(options: Sequence[str]) -> list[str]:
    """The options quoted, each with its values on a line."""
    lines: list[str] = []
    for word in options:
        if not lines or word.startswith("--"):
            lines.append(quote(word))
        else:
            lines[-1] += f" {quote(word)}"
    return lines


def _requeue(options: SlurmOptions) -> list[str]:
    codes = " | ".join(map(str, (AGAIN, STOPPED, *_KILLED_WHILE_STARTING)))
    return [
        f"# {STOPPED}: stopped so that it can go on; {AGAIN}: the machine failed. Unless someone cancelled the job,",
        f"# it is queued again, {options.requeues} times at most, and not once {_IN_VAIN} in a row gained no step.",
        "vain=0",
        'if [ "$(step)" != "$before" ]; then',
        '    rm -f "$run/in_vain"',
        f"elif [ $code = {AGAIN} ]; then",
        '    vain=$(($(cat "$run/in_vain" 2>/dev/null || echo 0) + 1))',
        f'    {{ echo $((vain % {_IN_VAIN})) > "$run/in_vain"; }} 2>/dev/null',
        "fi",
        f"case $code in {codes})",
        f"    if [ $vain -ge {_IN_VAIN} ]; then",
        f'        echo "error: {_IN_VAIN} starts in a row have gained no step; the job is not queued again" >&2',
        f'    elif [ "${{SLURM_RESTART_COUNT:-0}}" -lt {options.requeues} ] &&',
        '        scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then',
        '        scontrol requeue "$SLURM_JOB_ID" && sleep 60',
        "    fi ;;",
        "esac",
    ]


def submit(job: Job) -> str:
    """Submit the script in the job's folder; the id that Slurm gave it.

    Where no answer comes, the job may be there all the same: it is looked for by its name before anything is said.
    Raises LaunchError when it was not submitted.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", SCRIPT], cwd=job.folder, capture_output=True, text=True, timeout=_SECONDS
        )
        if done.returncode == 0:
            return done.stdout.strip().partition(";")[0]
        problem = done.stderr.strip()
    except FileNotFoundError:
        raise LaunchError(
            "there is no sbatch here; run this on a machine that submits to Slurm, or use --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        problem = f"sbatch gave no answer for {_SECONDS:g} s"
    if re.search(r"contact|timed out|connect|no answer", problem, re.IGNORECASE):
        found = _submitted(job)
        if found:
            return found
    hint = "; sweep fewer values at a time" if "array specification" in problem else ""
    raise LaunchError(f"Slurm took no job: {problem}{hint}; the script is {job.folder / SCRIPT}")


def _submitted(job: Job) -> str:
    """The id of a job that is there although sbatch did not say so; "" where there is none.

    One that has ended may be an earlier one of this folder, which Slurm remembers for some minutes.
    """
    for _ in range(5):
        with contextlib.suppress(LaunchError):
            here = (found for found in queue() if found.folder == str(job.folder) and found.state not in ENDED)
            return next((found.array or found.job for found in here), "")
        time.sleep(2.0)
    return ""


class Queued(NamedTuple):
    """A job of this user that Slurm has not forgotten."""

    job: str  # "12"
    array: str  # "10" of "10_2"; "" for no array
    task: int  # 2 of "10_2"
    state: str  # "RUNNING"
    reason: str  # why it waits, as Slurm says it
    folder: str  # where it was submitted


def queue() -> list[Queued]:
    """This user's jobs; raises LaunchError when Slurm does not answer."""
    command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%A|%F|%K|%T|%r|%Z"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"squeue: {(error.stderr.strip().splitlines() or ['failed'])[-1]}") from error
    except subprocess.TimeoutExpired:
        raise LaunchError(f"squeue gave no answer for {_SECONDS:g} s") from None
    except OSError as error:
        raise LaunchError(f"squeue: {error.strerror}") from error
    found = []
    for line in done.stdout.splitlines():
        fields = line.split("|", 5)
        if len(fields) == 6:
            job, array, task, state, reason, folder = fields
            in_array = task.isdigit()
            found.append(Queued(job, array if in_array else "", int(task) if in_array else 0, state, reason, folder))
    return found


def ids_of(words: Sequence[str]) -> tuple[str, ...]:
    """The ids of jobs to wait for: ids as they are, and those of launched folders. Raises LaunchError for neither."""
    found = []
    for word in words:
        known: Mapping[str, object] = {} if _PLAIN_ID.fullmatch(word) else read_launch(Path(word))
        if not _PLAIN_ID.fullmatch(word) and not known.get("job_id"):
            raise LaunchError(f"--after {word!r} is neither the id of a job nor a folder that was launched")
        found.append(str(known.get("job_id", word)))
    return tuple(found)
