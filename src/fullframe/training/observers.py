"""Who looks on while a run goes: the loop tells observers what happens and knows nothing of what they do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fullframe.arguments import fits
from fullframe.errors import ArgumentError
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.training.session import Session
from fullframe.wording import described


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A run as this rank sees it.

    say:    a line for the terminal and log.txt (rank 0's is shown)
    append: a record for metrics.jsonl (rank 0's is written); one that is no step has no "step"
    """

    recipe: Recipe
    session: Session
    strategy: Strategy
    mesh: DeviceMesh
    run_dir: Path
    rank: int
    say: Callable[[str], None]
    append: Callable[[Mapping[str, Any]], None]


class Observer:
    """Told of a run on every rank alike; each method may be left as it is.

    They take no part in the job: they send no messages, draw no random numbers and change no tensor.
    """

    def begin(self, run: Observed) -> None:
        """Once, before the first step."""

    def before_step(self, number: int) -> None:
        """Before the batch of a step is read."""

    def batch_read(self, number: int, batch: Any) -> None:
        """Before the step itself, which may be taken in several attempts."""

    def step_taken(self, number: int) -> None:
        """Right after the update."""

    def after_step(self, number: int, record: Mapping[str, Any]) -> None:
        """After the update and an evaluation that was due; `record` is the line of metrics.jsonl."""

    def out_of_memory(self, number: int, error: BaseException) -> None:
        """A step did not fit; what it computed is still there."""

    def evaluation_out_of_memory(self, number: int, error: BaseException) -> None:
        """The evaluation after a step did not fit; what it computed is still there, and the run ends."""

    def end(self) -> None:
        """Once, however the run ended."""


class Observers(Observer):
    """Several as one."""

    def __init__(self, observers: Sequence[Observer]):
        if wrong := [observer for observer in observers if not fits(observer, Observer)]:
            raise ArgumentError(
                f"observers are objects of a class that derives from {Observer.__module__}.Observer, got "
                f"{described(wrong[0])}; a function of the records is on_record"
            )
        self._observers = tuple(observers)

    @contextmanager
    def looking_on(self, run: Observed) -> Iterator[None]:
        """Around the steps of a run."""
        with ExitStack() as ends:
            for observer in self._observers:
                observer.begin(run)
                ends.callback(observer.end)
            yield

    def before_step(self, number: int) -> None:
        for observer in self._observers:
            observer.before_step(number)

    def batch_read(self, number: int, batch: Any) -> None:
        for observer in self._observers:
            observer.batch_read(number, batch)

    def step_taken(self, number: int) -> None:
        for observer in self._observers:
            observer.step_taken(number)

    def after_step(self, number: int, record: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.after_step(number, record)

    def out_of_memory(self, number: int, error: BaseException) -> None:
        for observer in self._observers:
            observer.out_of_memory(number, error)

    def evaluation_out_of_memory(self, number: int, error: BaseException) -> None:
        for observer in self._observers:
            observer.evaluation_out_of_memory(number, error)
