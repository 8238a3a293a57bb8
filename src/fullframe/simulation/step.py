"""The training step where there are no numbers to read, no seconds to wait and no host memory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.memory.trace import Tracer
from fullframe.simulation.offload import SimulatedOffload
from fullframe.strategy import Strategy
from fullframe.techniques.budget import Costs, measured
from fullframe.techniques.precision import computing
from fullframe.training.step import Loss, TrainStep


class SimulatedStep(TrainStep):
    """`TrainStep` on fake tensors, under `tracer`; time passes on `clock`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        clock: StepClock,
        tracer: Tracer,
    ):
        super().__init__(model, loss, optimizer, strategy)
        self._clock, self._tracer = clock, tracer
        self._offload = SimulatedOffload(clock)
        self._is_copied = not (strategy.recompute == "budget" or strategy.update_in_backward)
        self._started = 0  # the event with which the step's own begin, after what was left by the one before

    def twice(self, batch: Any) -> None:
        """Two steps. The second does what the first did, so it is not run but copied, where nothing says otherwise.

        Only what the first makes and leaves is not made again: the optimizer's state, mostly.
        """
        self._clock.reset()
        self(batch)
        self._tracer.end_step()
        if self._is_copied:
            started, ended = self._started, len(self._tracer.trace.events)
            self._begin()
            self._tracer.repeat(started, ended)
        else:
            self._clock.reset()
            self(batch)
        self._tracer.end_step()

    def _begin(self) -> None:
        super()._begin()
        self._started = len(self._tracer.trace.events)

    def _numbered(self, batch: Any) -> Iterator[tuple[int, Any]]:
        """The first microbatch makes the gradients, the last one sends them; those between are all like the second."""
        first, *others = super()._numbered(batch)
        between, last = others[:-1], others[-1:]
        yield first
        for number, microbatch in between[:1]:
            started, before = len(self._tracer.trace.events), self._clock.reading()
            yield number, microbatch
            self._tracer.repeat(started, times=len(between) - 1)
            self._clock.repeat(before, times=len(between) - 1)
        yield from last

    def _update(self) -> None:
        """A step that stands for the second, too, takes the time of one that has its state: it is made beforehand."""
        if self._is_copied:
            with self._clock.stopped():
                super()._update()
        super()._update()

    def _read(self, *scalars: Tensor) -> list[float]:
        """A loss of 1 over 1 element; nobody is broken or raises a hand. The host waits for them."""
        self._clock.synchronize()
        return [1.0 if number < 2 else 0.0 for number in range(len(scalars))]

    def _same_turns(self, mine: list[int]) -> list[int]:
        return mine

    def _saving(self) -> AbstractContextManager[None]:
        offloads = self._strategy.offload and self._clock.device.is_cuda
        return self._offload.saving() if offloads else nullcontext()

    def _block_costs(self, microbatch: Any) -> Costs:
        def forward() -> None:
            with self._model.no_sync(), computing(self._strategy.precision, "cpu"):  # type: ignore[operator]
                self._loss(self._model, microbatch)

        plain, names = self._model.module, self.recomputation.candidates
        return measured(plain, names, forward, lambda: self._clock.step_seconds)  # type: ignore[arg-type]
