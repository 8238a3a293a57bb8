"""An exponential moving average of a model's parameters (Polyak averaging), for evaluation and export."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullframe.errors import StrategyError
from fullframe.model.sharding.values import local_value


class ParameterAverage:
    """`average = decay * average + (1 - decay) * parameter` after each step; sharded parameters are averaged sharded.

    Buffers (batch norm's running statistics) are averages already and are not averaged again. Raises StrategyError for
    trained parameters of 16 bits or fewer, in which what a step adds to an average is rounded away.
    """

    def __init__(self, model: nn.Module, decay: float):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                raise StrategyError(
                    f"strategy.ema_decay would average {name} in {parameter.dtype}, in which what a step adds is "
                    "rounded away; keep the parameters in float32, and compute in 16 bits by precision='bf16'"
                )
        self._model, self._decay = model, decay
        self._parameters: dict[str, nn.Parameter] = {}
        self._average: dict[str, Tensor] = {}
        self._follow()

    @torch.no_grad()
    def update(self) -> None:
        """Take one step of the average."""
        self._follow()
        numbers = {name: p for name, p in self._parameters.items() if p.is_floating_point() or p.is_complex()}
        averages = [self._average[name] for name in numbers]
        torch._foreach_lerp_(averages, [p.detach() for p in numbers.values()], 1 - self._decay)
        for name in self._parameters.keys() - numbers.keys():  # as of weights that are frozen in 8 bits
            self._average[name].copy_(self._parameters[name])

    def _follow(self) -> None:
        """See the parameters that the model has now; the average of one of another shape begins with its value."""
        before, self._parameters = self._average, dict(self._model.named_parameters())
        self._average = {
            name: before[name] if name in before and before[name].shape == p.shape else p.detach().clone()
            for name, p in self._parameters.items()
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model holds the averages. What it takes to put them back is allocated before."""
        self._follow()
        pairs = [(local_value(p.detach()), local_value(self._average[name])) for name, p in self._parameters.items()]
        largest: dict[tuple[torch.dtype, torch.device], int] = {}
        for own, _ in pairs:
            kind = own.dtype, own.device
            largest[kind] = max(largest.get(kind, 0), own.numel())
        aside = {kind: torch.empty(size, dtype=kind[0], device=kind[1]) for kind, size in largest.items()}
        _swap(pairs, aside)
        try:
            yield
        finally:
            _swap(pairs, aside)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, by the parameters' names."""
        return dict(self._average)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; raises KeyError when it is of another model."""
        for name, average in self._average.items():
            average.copy_(state[name])


@torch.no_grad()
def _swap(pairs: list[tuple[Tensor, Tensor]], aside: dict[tuple[torch.dtype, torch.device], Tensor]) -> None:
    for own, other in pairs:
        kept = aside[own.dtype, own.device][: own.numel()].view(own.shape).copy_(own)
        own.copy_(other)
        other.copy_(kept)
