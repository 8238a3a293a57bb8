"""The timeline of a run on one rank: how long the parts of each step took, what it held; every step a cheap line, now
and then a step of which all tensors are followed.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import torch

from fullframe.observation.gpu_meter import GpuMeter, meter_of_rank
from fullframe.observation.memory.timeline_file import TimelineFile
from fullframe.observation.memory.traced_step import TracedStep
from fullframe.processes.cores import backward_threads, seconds_without_core
from fullframe.ranks import device
from fullframe.simulation.memory.account import Account
from fullframe.simulation.memory.trace import Trace
from fullframe.training.observers import Observed, Observer

_FIRST = 2  # step of this process that is followed: the first one that has the optimizer's state
_EVERY = 1000  # steps between two that are followed, which take up to twice as long
_MODULES = 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Timeline(Observer):
    """Writes observed/rank<k>.jsonl.

    `trace_step` is one more step that is followed; `on_trace` gets what it held, event by event.
    `peak_bytes` is the tracked peak of the step that was followed first, as `Prediction.peak_bytes` counts it;
    `counted` what a GPU's counters had then, allocated and reserved;
    `live` what was live at the peak of the one that was followed last, with "when", or {}.
    """

    def __init__(
        self,
        trace_step: int | None = None,
        on_trace: Callable[[Observed, Trace], None] | None = None,
        meter: Callable[[], GpuMeter | None] = meter_of_rank,
    ):
        self._trace_step, self._on_trace, self._meter_of_rank = trace_step, on_trace, meter
        self.peak_bytes: int | None = None
        self.counted: tuple[int, int] | None = None
        self.live: dict[str, Any] = {}
        self._taken = 0
        self._traced: TracedStep | None = None

    def begin(self, run: Observed) -> None:
        self._run = run
        self._file = TimelineFile(run.run_dir, run.rank, run.session.state.step)
        self._phases = run.session.step.phases
        if self._phases is not None:
            self._phases.active = True
        self._limit, self._meter = _limit_bytes(), self._meter_of_rank()
        self._seconds: dict[str, float] = {}
        self._waiting: dict[int, dict[str, Any]] = {}
        self._began = time.perf_counter()
        self._threads, self._stood = tuple[int, ...](), 0.0

    def before_step(self, number: int) -> None:
        """The batch is read from here on."""
        self._began = time.perf_counter()

    def batch_read(self, number: int, batch: Any) -> None:
        """The step begins."""
        self._seconds = {"data": time.perf_counter() - self._began}
        self._stood = seconds_without_core(*self._threads)
        if device.is_in_use():
            torch.accelerator.reset_peak_memory_stats()
        self._taken += 1
        due = self._taken == _FIRST or number % _EVERY == 0 or number == self._trace_step
        if due and not _is_compiled(self._run.session.state.model):
            traced = TracedStep(self._run)
            self._traced = traced if traced.start(batch) else None

    def out_of_memory(self, number: int, error: BaseException) -> None:
        """The step is taken again, and not followed."""
        if self._traced is not None:
            found, self._traced = self._traced.stop(), None
            if found is not None:
                self.live = {**_at_peak(found[1]), "when": f"step {number} until then, which was followed"}

    def step_taken(self, number: int) -> None:
        """The line of this step."""
        row: dict[str, Any] = {"step": number, "time": round(time.time(), 3), "seconds": self._seconds}
        row["without_core_seconds"] = round(seconds_without_core(*self._threads) - self._stood, 6)
        if self._taken == 1:  # backward has run
            self._threads = backward_threads()
        if self._taken == _FIRST and device.is_in_use():
            self.counted = device.peak_bytes()
        if self._traced is not None:
            self._end_trace(number, row)
        timed = {} if self._phases is None else self._phases.take(number)
        if self._file.wants(number) or "bytes" in row:
            row |= _held_now(self._limit) | (self._meter.look() if self._meter is not None else {})
            self._waiting[number] = row
        for step in sorted(timed):
            late = self._waiting.pop(step, None)
            if late is not None:
                late["seconds"] = {name: round(s, 6) for name, s in (late["seconds"] | timed[step]).items()}
                self._file.add(late)

    def _end_trace(self, number: int, row: dict[str, Any]) -> None:
        assert self._traced is not None
        found, self._traced = self._traced.stop(), None
        if found is None:
            return
        trace, held = found
        cached = _cached_bytes()
        row |= _at_peak(held)
        self.live = {**_at_peak(held), "when": f"the peak of step {number}, which was followed"}
        row["bytes"] = {**held.bytes, **({"cached": cached} if cached else {})}
        if self.peak_bytes is None:
            self.peak_bytes = held.peak_bytes
        if number == self._trace_step and self._on_trace is not None:
            self._on_trace(self._run, trace)

    def end(self) -> None:
        """What a device had not got through is written without its seconds."""
        if self._traced is not None:
            self._traced.stop()
            self._traced = None
        if self._phases is not None:
            self._phases.active = False
        for row in self._waiting.values():
            self._file.add(row)


def _at_peak(held: Account) -> dict[str, Any]:
    modules = dict(list(held.modules.items())[:_MODULES])
    return {"peak_bytes": held.peak_bytes, "bytes": dict(held.bytes), "modules": modules}


def _held_now(limit: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError, IndexError):
        found["host_bytes"] = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    if device.is_in_use():
        found["peak_bytes"], found["reserved_bytes"] = device.peak_bytes()
    if limit is not None:
        found["limit_bytes"] = limit
    return found


def _cached_bytes() -> int:
    """What torch's allocator holds and does not use."""
    if not device.is_in_use():
        return 0
    return torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()


def _limit_bytes() -> int | None:
    """What this rank may hold: its GPU's memory, or its share of the machine's."""
    if device.is_in_use():
        return device.properties()[1]
    return int(psutil.virtual_memory().total) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _is_compiled(model: torch.nn.Module) -> bool:
    """A compiled model is not followed: its ops are no more those of the program."""
    return any(module._compiled_call_impl is not None for module in model.modules())
