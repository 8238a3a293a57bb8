"""What optimizers are set to, and which steps they have taken with sharded parameters.

Of these each rank has parts that no other rank sees. So nothing but the steps themselves, what an optimizer is set to,
and whole values that are assigned, can be compared.
"""

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakSet
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullframe.errors import DivergenceError
from fullframe.ranks.agreement import first_difference
from fullframe.ranks.raw_bytes import in_bytes, plain

_ELEMENTS = 4096  # of assigned values, that are looked at
_taken = [0]


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer is and was given, by names; without tensors, for which the host might have to wait."""
    return {"the optimizer": type(optimizer).__name__} | _options(optimizer.param_groups)


def _options(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        f"the optimizer's {name}, group {number},": value
        for number, group in enumerate(groups)
        for name, value in group.items()
        if isinstance(value, (bool, int, float, str, tuple))
    }


class Stepped:
    """What optimizers that have stepped with a model's parameters are set to, until its ranks have compared it.

    So what one rank alone sets is found before a step goes by it, be that the run's last.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._groups: list[list[dict[str, Any]]] = []  # not the optimizers, which the user may let go of
        self._stepped: set[Any] = set()
        _all.add(self)

    def note(self, groups: list[dict[str, Any]]) -> None:
        """Before a step of an optimizer that has these groups of parameters.

        One whose parameters have all stepped is left out: inside a ZeroRedundancyOptimizer's step is that of a part.
        """
        new = {parameter for group in groups for parameter in group["params"]} - self._stepped
        if new and any(parameter in new for parameter in self._model.parameters()):
            self._groups.append(groups)
            self._stepped |= new

    def options(self, trained: Collection[nn.Parameter] = ()) -> list[str]:
        """What is in their groups now, in words; nothing unless all that is `trained` (the model's own) has stepped.

        For optimizers of a part may be each rank's own, as where states are sharded by hand.
        """
        own = trained or [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if not self._stepped.issuperset(own):
            return ["no optimizer of all parameters has stepped since the backward pass before"]
        return [f"{name} is {value}" for groups in self._groups for name, value in _options(groups).items()]

    def compared(self) -> None:
        """The ranks have compared it."""
        self._groups.clear()
        self._stepped.clear()


_all: Any = WeakSet()  # every `Stepped` that there is


def _before_a_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for stepped in _all:
        stepped.note(optimizer.param_groups)


register_optimizer_step_pre_hook(_before_a_step)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Before a step with sharded parameters."""
    _taken[0] = crc32(repr(options_of(optimizer)).encode(), _taken[0])


def note_values(given: Tensor) -> None:
    """Before they are assigned to a sharded parameter: a few of those that each rank has, or that it was done."""
    values = b"" if type(given) is not Tensor or not given.is_cpu else _few(given)
    _taken[0] = crc32(values + b"=", _taken[0])


def _few(given: Tensor) -> Any:
    return in_bytes(plain(given.detach().reshape(-1)[:_ELEMENTS])).numpy().tobytes()


def begin_anew() -> None:
    """On all ranks, as a model's parameters are sharded: what an error has left behind is forgotten."""
    _taken[0] = 0


def steps_taken() -> int:
    """A checksum of all of these steps since then, and of the optimizers' options in each."""
    return _taken[0]


def require_same_options(said: Sequence[Sequence[str]], ranks: Sequence[int]) -> None:
    """Raises DivergenceError where what the optimizers of these ranks are set to, in words, is not the same."""
    if any(one != said[0] for one in said):
        first, number, other = first_difference(said)
        raise DivergenceError(
            f"the ranks do not take the same steps: {first} on rank {ranks[0]}, {other} on rank {ranks[number]}. Make "
            "them alike on all ranks, and let a scheduler go by what all ranks know"
        )


def require_same_steps(taken: Sequence[int]) -> None:
    """Raises DivergenceError where those of the ranks of a job or a replica are not the same."""
    if len(set(taken)) > 1:
        raise DivergenceError(
            "the ranks' optimizers have taken other steps with the sharded parameters, each with its own parts: one "
            "rank alone has left a step out, has another lr or another option, or was given other values. Step, "
            "schedule and load states on all ranks alike, by what all ranks know"
        )
