"""All who look on at a run of `fullframe train`."""

from collections.abc import Sequence

from fullframe.observation.leaks.observer import LeakObserver
from fullframe.observation.loggers import Loggers, Name
from fullframe.observation.memory.export import write_of_run
from fullframe.observation.memory.timeline import Timeline
from fullframe.observation.out_of_memory.note import OutOfMemoryNotes
from fullframe.training.observers import Observer


def observers_of_run(trace_step: int | None, loggers: Sequence[Name]) -> tuple[Timeline, list[Observer]]:
    """The timeline, and all of them, it among them; of several ranks each has its own."""
    timeline = Timeline(trace_step, write_of_run)
    return timeline, [timeline, OutOfMemoryNotes(lambda: timeline.live), LeakObserver(), Loggers(loggers)]
