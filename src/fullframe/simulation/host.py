"""Where a simulated step runs: there are no numbers to read, no seconds to wait and no host memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fullframe.simulation.clock.roofline import StepClock, Transfer
from fullframe.simulation.memory.trace import Tracer
from fullframe.strategy import Strategy
from fullframe.techniques.budget import Costs, measured
from fullframe.techniques.offload import LEAVING_BYTES, Offload
from fullframe.training.step import TrainStep

_MOST_STEPS = 8
GROWS = (
    f"what modules keep still grew in step {_MOST_STEPS}, the last that was simulated: memory will be more than this"
)


class Kept(NamedTuple):
    """What modules keep from step to step beside parameters."""

    tensors: int  # bytes
    numbers: list[Any]  # plain ones, counters of steps for instance


class SimulatedHost:
    """A `StepHost` for fake tensors, under `tracer`; time passes on `clock`. `kept` looks at what modules keep now."""

    def __init__(self, clock: StepClock, tracer: Tracer, strategy: Strategy, kept: Callable[[], Kept]):
        self._clock, self._tracer, self._strategy, self._kept = clock, tracer, strategy, kept
        self.notes: set[str] = set()  # what was taken for granted
        self._is_copied = not (strategy.recompute == "budget" or strategy.update_in_backward)
        self._saving = self.road() if strategy.offload else nullcontext

    def twice(self, step: TrainStep, batch: Any) -> None:
        """Two steps. The second does what the first did, so it is not run but copied, where nothing says otherwise.

        Only what the first makes and leaves is not made again: the optimizer's state, mostly. Where modules keep more
        after a step than before it, others are run until they do not; where a number on them has changed, by which
        they may do something else from then on, a second one is.
        """
        if step.scale is not None:
            step.scale.start(1.0)  # on which ranks agree in the first step alone
        step.begin()  # keeps buffers in memory that is there from then on
        started, before = len(self._tracer.trace.events), self._kept()
        self._once(step, batch)
        after = self._kept()
        if self._is_copied and after.tensors <= before.tensors and after.numbers == before.numbers:
            ended = len(self._tracer.trace.events)
            step.begin()
            self._tracer.repeat(started, ended)
            self._tracer.end_step()
            return
        for _ in range(_MOST_STEPS - 1):
            before = self._kept()
            self._once(step, batch)
            if self._kept().tensors <= before.tensors:
                return
        self.notes.add(GROWS)

    def _once(self, step: TrainStep, batch: Any) -> None:
        self._clock.reset()
        step(batch)
        self._tracer.end_step()

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Around what a stage does with one of M microbatches; of S stages it waits (S - 1) / M of its own time.

        As if all stages took as long: that is what they are cut for.
        """
        began = self._clock.step_seconds
        yield
        took = self._clock.step_seconds - began
        self._clock.wait_for_stages(took * (self._strategy.stages - 1) / self._strategy.microbatches)

    def read(self, scalars: Sequence[Tensor]) -> list[float]:
        """A loss of 1 over 1 element; nobody is broken or raises a hand. The host waits for them."""
        self._clock.synchronize()
        return [1.0 if number < 2 else 0.0 for number in range(len(scalars))]

    def agree_order(self, mine: Sequence[int], parameters: int) -> list[int]:
        """The other ranks have the same."""
        return list(mine)

    def saving(self) -> AbstractContextManager[None]:
        """Gone, with `offload` on a GPU."""
        return self._saving()

    def road(self) -> Callable[[], AbstractContextManager[None]]:
        """What to enter around a forward pass whose activations wait on the host; nothing where the device is it."""
        return Offload(ClockRoad(self._clock)).saving if self._clock.device.is_cuda else nullcontext

    def block_costs(self, model: nn.Module, names: Sequence[str], forward: Callable[[], object]) -> Costs:
        """By the simulated clock."""
        return measured(model, names, forward, lambda: self._clock.step_seconds)

    def numbered(self, slices: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """The first microbatch makes the gradients, the last one sends them; those between are all like the second."""
        first, *others = enumerate(slices, start=1)
        between, last = others[:-1], others[-1:]
        yield first
        for second in between[:1]:
            started, before = len(self._tracer.trace.events), self._clock.reading()
            yield second
            self._tracer.repeat(started, times=len(between) - 1)
            self._clock.repeat(before, times=len(between) - 1)
        yield from last

    def update(self, step: Callable[[], object]) -> None:
        """A step that stands for the second, too, takes the time of one that has its state: it is made beforehand."""
        if self._is_copied:
            with self._clock.stopped():
                step()
        step()

    def phase(self, name: str) -> None:
        """The simulated clock counts by kinds of ops."""

    def backward(self, loss: Tensor) -> None:
        """As it is."""
        loss.backward()


class ClockRoad:
    """The way of offloaded activations where they are fake: they are gone, and made again when backward asks."""

    at_once = True

    def __init__(self, clock: StepClock):
        self._clock = clock
        self._leaving: deque[tuple[Transfer, torch.UntypedStorage]] = deque()

    def takes(self, tensor: Tensor) -> bool:
        """Plain ones, as `DeviceRoad` does."""
        return type(tensor) is FakeTensor

    def send(self, storage: torch.UntypedStorage) -> int:
        """Its bytes. The storage is held until it has left by the clock."""
        self._let_go()
        self._leaving.append((self._clock.offload(storage.nbytes()), storage))
        return storage.nbytes()

    def fetch(self, sent: int) -> tuple[Tensor, Transfer]:
        """New memory, and when it is filled."""
        self._let_go()
        return torch.empty(sent, dtype=torch.uint8), self._clock.offload(sent)

    def wait(self, arrival: Transfer) -> None:
        """Time passes until then."""
        self._clock.finish(arrival)

    def begin(self) -> None:
        """Nothing is given up in a simulation."""
        self._let_go()

    def _let_go(self) -> None:
        while self._leaving:
            transfer, _ = self._leaving[0]
            waiting = sum(storage.nbytes() for _, storage in self._leaving)
            if transfer.done > self._clock.step_seconds and waiting <= LEAVING_BYTES:
                break
            self._clock.finish(transfer)
            self._leaving.popleft()
