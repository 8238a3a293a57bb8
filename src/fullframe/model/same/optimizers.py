"""Whether the ranks' optimizers are set alike, and step what is alike."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullframe.errors import DivergenceError
from fullframe.model.same.strangers import Groups, strangers, warn_of_strangers
from fullframe.ranks.agreement import first_difference
from fullframe.ranks.raw_bytes import checksums


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer is and was given, by names; without tensors, for which the host might have to wait."""
    return {"the optimizer": type(optimizer).__name__} | _options(optimizer.param_groups)


def _options(groups: Groups) -> dict[str, Any]:
    return {
        f"the optimizer's {name}, group {number},": value
        for number, group in enumerate(groups)
        for name, value in group.items()
        if isinstance(value, (bool, int, float, str, tuple))
    }


class Said(NamedTuple):
    """What a rank's optimizers are, in words."""

    options: list[str]
    strangers: list[str]  # parameters that no model holds: a criterion's, which nobody averages


class Stepped:
    """What optimizers that have stepped with a model's parameters are set to, until its ranks have compared it.

    So what one rank alone sets is found before a step goes by it, be that the run's last.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._groups: list[Groups] = []  # not the optimizers, which the user may let go of
        self._stepped: set[Any] = set()
        self._strangers: list[str] | None = None  # as they were when it was first asked since the last comparison
        self._comparisons = 0  # of strangers
        _all.add(self)

    def note(self, groups: Groups) -> bool:
        """Before a step of an optimizer that has these groups of parameters: whether any is the model's.

        One whose parameters have all stepped is left out: inside a ZeroRedundancyOptimizer's step is that of a part.
        """
        given = {parameter for group in groups for parameter in group["params"]}
        is_its = any(parameter in given for parameter in self._model.parameters())
        new = given - self._stepped
        if is_its and any(parameter in new for parameter in self._model.parameters()):
            self._groups.append(groups)
            self._stepped |= new
        return is_its

    def said(self, trained: Collection[nn.Parameter] = ()) -> Said:
        """What they are now; nothing unless all that is `trained` (the model's own) has stepped.

        For optimizers of a part may be each rank's own, as where states are sharded by hand.
        """
        own = trained or [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if not self._stepped.issuperset(own):
            return Said(["no optimizer of all parameters has stepped since the backward pass before"], [])
        options = [f"{name} is {value}" for groups in self._groups for name, value in _options(groups).items()]
        if self._strangers is None:
            self._strangers = self._found_strangers() if len(self._stepped) > len(own) else []
        return Said(options, self._strangers)

    def _found_strangers(self) -> list[str]:
        found = [each for groups in self._groups for each in strangers(groups)]
        self._comparisons += bool(found)
        if self._comparisons & (self._comparisons - 1):  # on a GPU the host waits for values: ever more seldom
            return []
        sums = checksums([parameter for *_, parameter in found])
        return [
            f"parameter {place} of group {number}, shape {tuple(parameter.shape)}, of values {value & 0xFFFFFFFF:08x},"
            for (number, place, parameter), value in zip(found, sums, strict=True)
        ]

    def compared(self) -> None:
        """The ranks have compared it."""
        self._groups.clear()
        self._stepped.clear()
        self._strangers = None


_all: Any = WeakSet()  # every `Stepped` that there is


def _before_a_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    groups = optimizer.param_groups
    if _all and not any([stepped.note(groups) for stepped in _all]):
        warn_of_strangers(groups)


register_optimizer_step_pre_hook(_before_a_step)


def require_same_options(said: Sequence[Said], ranks: Sequence[int]) -> None:
    """Raises DivergenceError where these ranks' optimizers are set otherwise, or step what is not the same on all."""
    if any(one.options != said[0].options for one in said):
        first, number, other = first_difference([one.options for one in said])
        raise DivergenceError(
            f"the ranks do not take the same steps: {first} on rank {ranks[0]}, {other} on rank {ranks[number]}. Make "
            "them alike on all ranks, and let a scheduler go by what all ranks know"
        )
    if any(one.strangers != said[0].strangers for one in said):
        first, number, other = first_difference([one.strangers for one in said])
        raise DivergenceError(
            "the optimizer steps a parameter that no parallel model holds (a criterion's?), whose gradient nobody "
            f"averages: {first} on rank {ranks[0]}, {other} on rank {ranks[number]}. Give the module that has it to "
            "ff.parallelize, too, or put it into the model"
        )
