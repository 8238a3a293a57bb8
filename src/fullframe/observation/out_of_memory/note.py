"""The rank that runs out of memory notes what it knows, while what the step computed is still there."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import torch

from fullframe.observation.leaks.origin import Line
from fullframe.observation.leaks.walk import is_users
from fullframe.observation.out_of_memory.account import EVALUATION, NOTES, SUMMARY
from fullframe.observation.out_of_memory.said import sizes_said
from fullframe.processes.exit_reasons import restart_reason
from fullframe.processes.place import restarts
from fullframe.processes.whole_files import replace_text
from fullframe.ranks import device
from fullframe.simulation.devices.table import cluster_here
from fullframe.spatial.module_path import module_path
from fullframe.training.observers import Observed, Observer

_ERROR = 2000  # characters


class OutOfMemoryNotes(Observer):
    """Writes oom/rank<k>.json in the run's directory.

    `live` gives what the rank held in the step that was followed last: a record as `account.Live`; {} for nothing.
    `counted` gives the sizes that torch and the device count now. A launch begins without notes of earlier ones.
    """

    def __init__(
        self, live: Callable[[], Mapping[str, Any]] = lambda: {}, counted: Callable[[], Mapping[str, int]] | None = None
    ):
        self._live, self._counted = live, counted_now if counted is None else counted
        self._made = time.time()

    def begin(self, run: Observed) -> None:
        self._run = run
        if run.rank == 0 and not restart_reason():
            for path in (*run.run_dir.glob(f"{NOTES}/*"), run.run_dir / SUMMARY):
                with suppress(OSError):
                    if path.stat().st_mtime < self._made:  # else another rank has run out by now
                        path.unlink()

    def out_of_memory(self, number: int, error: BaseException) -> None:
        """Whatever goes wrong here is left out: the error itself is what has to be met."""
        with suppress(Exception):
            phases = self._run.session.step.phases
            self._write(number, error, phases.now if phases is not None else "", self._live())

    def evaluation_out_of_memory(self, number: int, error: BaseException) -> None:
        """Likewise; what was live in a step is no part of it."""
        with suppress(Exception):
            self._write(number, error, EVALUATION, {})

    def _write(self, number: int, error: BaseException, phase: str, live: Mapping[str, Any]) -> None:
        run, said = self._run, sizes_said(str(error))
        sizes = {**self._counted(), **said}
        if "unused_bytes" in said and "allocated_bytes" in said:
            sizes["reserved_bytes"] = said["allocated_bytes"] + said["unused_bytes"]
        note = {
            "step": number,
            "attempt": restarts(),
            "rank": run.rank,
            "time": time.time(),
            "error": (str(error) or type(error).__name__)[:_ERROR],
            "devices": cluster_here(run.strategy.ranks),
            "batch_size": run.recipe.batch_size,
            "strategy": _strategy_now(run),
            "phase": phase,
            **_place(error.__traceback__),
            **sizes,
            "live": live,
        }
        path = run.run_dir / NOTES / f"rank{run.rank}.json"
        path.parent.mkdir(exist_ok=True)
        replace_text(path, json.dumps(note))


def counted_now() -> dict[str, int]:
    """What torch's allocator holds and the device has; of the CPU, where it counts nothing, what the process holds."""
    if device.is_in_use():
        free, total = torch.accelerator.get_memory_info()
        allocated, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
        return {"allocated_bytes": allocated, "reserved_bytes": reserved, "free_bytes": free, "limit_bytes": total}
    memory = psutil.virtual_memory()
    held = psutil.Process().memory_info().rss
    return {"host_bytes": held, "free_bytes": memory.available, "limit_bytes": memory.total}


def _strategy_now(run: Observed) -> dict[str, Any]:
    """A process alone may have gone on with finer microbatches, and wrote that; ranks start anew with them."""
    text = run.strategy.to_json()
    if run.strategy.ranks == 1:
        text = (run.run_dir / "strategy.json").read_text()
    return dict(json.loads(text))


def _place(trace: TracebackType | None) -> dict[str, str]:
    """The innermost line of the user's that was run, what stands there, and the module whose forward it was in."""
    line, frame = None, None
    for frame, number in walk_tb(trace):
        file = frame.f_code.co_filename
        if is_users(file) and not file.startswith("<"):
            line = Line(str(Path(file)), number)
    found = {"module": module_path(frame) if frame is not None else ""}
    return found | ({} if line is None else {"line": str(line), "source": line.text})
