"""After a step ran out of memory: which strategies would fit, as commands; ten lines in the terminal, and a page.

The plan is made in processes of its own, when the ranks have ended: what is short of memory gets no neighbour.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from fullframe.cli.comparison import environment_beside, last_line
from fullframe.cli.plan import Plan
from fullframe.cli.simulate import Simulate
from fullframe.cli.strategy_file import strategy_of
from fullframe.cli.words import TechniqueOptions, words
from fullframe.errors import FullframeError
from fullframe.observation.out_of_memory.account import (
    EVALUATION,
    NOTES,
    PAGE,
    SUMMARY,
    Live,
    OutOfMemory,
    Way,
    read_out_of_memory,
)
from fullframe.observation.out_of_memory.words import ten_lines
from fullframe.processes.whole_files import replace_text
from fullframe.strategy import TECHNIQUES, Strategy, describe
from fullframe.wording import GIB

_SEARCH_SECONDS = 40.0
_ALL_SECONDS = 75.0  # for the search, what the recipe's own functions take, and three simulations at most
_POLL_SECONDS = 0.1
_WAYS = 3
KEPT_FREE = 0.06  # as the plan keeps, which loads torch
_EVALUATION_HELP = (
    "An evaluation takes one sample at a time and keeps nothing for backward, so microbatches and recompute change "
    "nothing; smaller frames in recipe.evaluation_data, measures that need no whole map (.full()), a frame split over "
    "more ranks (--height, --width, --depth) or 16 bits (--precision) do"
)


def explain_out_of_memory(command: Any, run_dir: Path, is_asked_to_stop: Callable[[], bool] = lambda: False) -> None:
    """Say why a step, or an evaluation, ran out of memory and what would fit; nothing where that was said already.

    `command` is the `Train` that started the run. What goes wrong here does not undo the run.
    """
    stream = sys.stderr if command.json else sys.stdout
    try:
        found = read_out_of_memory(run_dir)
        if found is None or not _claimed(run_dir, found):
            return
        if found.phase == EVALUATION:
            found = replace(found, problem=_EVALUATION_HELP)
        else:
            print("out of memory: looking for what would fit, for at most a minute", file=stream, flush=True)
            found = _with_ways(command, found, run_dir, is_asked_to_stop)
        for line in _written(found, run_dir):
            print(line, file=stream, flush=True)
    except Exception as error:
        print(f"warning: the page on memory was not written: {type(error).__name__}: {error}", file=stream, flush=True)


def _claimed(run_dir: Path, found: OutOfMemory) -> bool:
    """Whether this process is the one that tells of it: over several machines each launcher might."""
    try:
        (run_dir / NOTES / f"told-{found.attempt}-{found.step}").touch(exist_ok=False)
        return True
    except FileExistsError:
        return False


def _written(found: OutOfMemory, run_dir: Path) -> list[str]:
    """oom.json, oom.html and log.txt; the lines for the terminal."""
    from fullframe.observation.report.page import write_out_of_memory
    from fullframe.observation.run_files import read_run
    from fullframe.training.run_directory import RunDirectory

    replace_text(run_dir / SUMMARY, json.dumps(asdict(found), indent=1) + "\n")
    run = read_run(run_dir)
    page = write_out_of_memory(run, run_dir / PAGE)
    lines = ten_lines(found, str(page), run.goes_on)
    directory = RunDirectory(run_dir, writes=True)
    for line in lines:
        directory.log(line)
    return lines


def _with_ways(command: Any, found: OutOfMemory, run_dir: Path, is_asked_to_stop: Callable[[], bool]) -> OutOfMemory:
    try:
        failed = Strategy.from_json(json.dumps(found.strategy))
    except FullframeError as error:
        return replace(found, problem=f"the run's strategy cannot be read: {error}")
    asking = _Asking(command, found, time.monotonic() + _ALL_SECONDS, is_asked_to_stop)
    predicted = asking.prediction(failed)
    if not found.live.bytes and predicted:
        found = replace(found, live=_simulated(predicted))
    limit = plan_limit_bytes(found, predicted) if found.limit_bytes else None
    plans, problem = asking.plans(failed, limit)
    ways = list(_ways(command, failed, run_dir, plans, asking))
    if not ways:
        problem = problem or "none that was simulated needs that much less"
        problem += (
            f"; fullframe plan {command.recipe} --gpus {found.devices} looks for longer, and says what would help"
        )
    return replace(found, ways=tuple(ways), problem="" if ways else problem)


def _simulated(predicted: Mapping[str, Any]) -> Live:
    modules = dict(list(predicted["modules"].items())[:20])
    when = "the peak of a simulated step"
    return Live(when=when, peak_bytes=predicted["peak_bytes"], bytes=predicted["bytes"], modules=modules)


def plan_limit_bytes(found: OutOfMemory, predicted: Mapping[str, Any]) -> int:
    """What a plan may use of a device, so that what it finds fits; `predicted`: of the step that ran out, or {}.

    That step needed more than the device has, and more than it held with what it asked for. Where less was predicted,
    predictions of this run's tensors are too low, by this factor at least.
    """
    assert found.limit_bytes is not None
    sharing = int(found.devices.split("x")[-2]) if found.devices.endswith("cpu") else 1
    limit = (found.limit_bytes - (found.others_bytes or 0)) / sharing
    if not predicted.get("reserved_bytes"):
        return int(limit)
    tensors = float(predicted["reserved_bytes"])
    beside = float(predicted["step_bytes"]) - tensors
    needed = limit - beside
    if found.allocated_bytes is not None:
        needed = max(needed, float(found.allocated_bytes + (found.asked_bytes or 0)))
    factor = max(1.0, needed / tensors)
    room = max((1 - KEPT_FREE) * limit - beside, 0.0) / factor
    return int((beside + room) / (1 - KEPT_FREE))


def _ways(command: Any, failed: Strategy, run_dir: Path, plans: list[Any], asking: "_Asking") -> Iterator[Way]:
    """The fastest that fit; what the plan does not choose among (clipping, a moving average) stays as it was."""
    count, carried = 0, _carried(failed)
    for plan in plans:
        planned = strategy_of(plan)
        if planned.optimizer != failed.optimizer or not plan["fits"] or not asking.can_start(planned):
            continue
        try:
            strategy = replace(planned, **carried)
        except FullframeError:
            continue
        predicted = asking.prediction(strategy) if carried else plan["prediction"]
        if strategy != failed and predicted and predicted["device_bytes"] <= plan["memory_bytes"]:
            count += 1
            yield Way(
                words=describe(strategy),
                command=command_for(command, strategy, run_dir),
                device_bytes=predicted["device_bytes"],
                step_seconds=predicted["step_seconds"],
            )
        if count == _WAYS:
            return


def _carried(failed: Strategy) -> dict[str, Any]:
    """What the planner leaves to the user, where it is used."""
    return {row.name: getattr(failed, row.name) for row in TECHNIQUES if row.is_left_to_user and row.used(failed)}


def command_for(command: Any, strategy: Strategy, run_dir: Path) -> str:
    """The run's command with this strategy, going on from where it stands."""
    options = {field.name: getattr(strategy, field.name) for field in fields(TechniqueOptions)}
    mesh = {name: getattr(strategy, name) for name in ("data", "depth", "height", "width")}
    batch_size = command.batch_size
    if command.plan is not None:
        from fullframe.cli.strategy_file import first_plan

        batch_size = batch_size or first_plan(command.plan).get("batch_size")
    changed = replace(
        command,
        **{name: size if size > 1 else None for name, size in mesh.items()},
        processes=command.processes if command.over.nodes is not None else None if strategy.ranks > 1 else 1,
        plan=None,
        batch_size=batch_size,
        run_dir=run_dir,
        resume=True,
        auto_resume=False,
        techniques=TechniqueOptions(**options),
    )
    return shlex.join(["fullframe", "train", *words(changed)])


class _Asking:
    """Planner and simulator as processes beside this one, until `end` or somebody asks the run to stop."""

    def __init__(self, command: Any, found: OutOfMemory, end: float, is_asked_to_stop: Callable[[], bool]):
        self._command, self._found, self._end, self._is_asked_to_stop = command, found, end, is_asked_to_stop
        self._common = {"recipe": command.recipe, "set": command.set, "json": True, "gpus": found.devices}
        self._common["batch_size"] = found.batch_size

    def plans(self, failed: Strategy, limit_bytes: int | None) -> tuple[list[Any], str]:
        """What was planned for this run's devices, with its precision; or why nothing was."""
        command = Plan(
            **self._common,
            precision=(failed.precision,),
            allow_optimizer=failed.optimizer != "recipe",
            memory_limit_gib=None if limit_bytes is None else limit_bytes / GIB,
            seconds=_SEARCH_SECONDS,
        )
        out, problem = self._answer("plan", command)
        return (out, "") if isinstance(out, list) else ([], problem)

    def prediction(self, strategy: Strategy) -> dict[str, Any]:
        """What is predicted of a strategy; {} where nothing can be."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(strategy.to_json())
            file.flush()
            timed = self._found.devices.endswith("cpu")  # as the plan does
            command = Simulate(**self._common, strategy=Path(file.name), benchmark=timed)
            out, _ = self._answer("simulate", command)
        return out if isinstance(out, dict) else {}

    def can_start(self, strategy: Strategy) -> bool:
        """Whether the run's command can start the strategy: over several machines all of them have ranks."""
        nodes = self._command.over.nodes
        return nodes is None or strategy.ranks == nodes * (self._command.processes or 1)

    def _answer(self, name: str, command: Any) -> tuple[Any, str]:
        """What the command prints, read as JSON; else None and why."""
        words_of = [sys.executable, "-m", "fullframe.cli", name, *words(command)]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = subprocess.Popen(
                words_of, env=environment_beside(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
            try:
                while child.poll() is None:
                    if time.monotonic() > self._end or self._is_asked_to_stop():
                        return None, "there was no time to look for one"
                    time.sleep(_POLL_SECONDS)
            finally:
                child.kill()
                child.wait()
            out.seek(0)
            err.seek(0)
            try:
                return json.loads(out.read()), ""
            except ValueError:
                return None, f"fullframe {name}: {last_line(err.read(), child.returncode)}"
