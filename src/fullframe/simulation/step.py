"""The training step where there are no numbers to read, no seconds to wait and no host memory."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fullframe.simulation.offload import SimulatedOffload
from fullframe.simulation.roofline import StepClock
from fullframe.strategy import Strategy
from fullframe.training.budget import Costs, measured
from fullframe.training.precision import computing
from fullframe.training.step import Loss, TrainStep


class SimulatedStep(TrainStep):
    """`TrainStep` on fake tensors; time passes on `clock`."""

    def __init__(
        self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, strategy: Strategy, clock: StepClock
    ):
        super().__init__(model, loss, optimizer, strategy)
        self._clock = clock
        self._offload = SimulatedOffload(clock)

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
