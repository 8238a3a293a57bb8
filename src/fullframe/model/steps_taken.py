"""Which steps optimizers have taken with sharded parameters, of which each rank has parts that no other rank sees.

So nothing but the steps themselves, and what an optimizer is set to, can be compared.
"""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from fullframe.errors import DivergenceError

_taken = [0]


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer is and was given, by names; without tensors, for which the host might have to wait."""
    found: dict[str, Any] = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, (bool, int, float, str, tuple)):
                found[f"the optimizer's {name}, group {number},"] = value
    return found


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Before a step with sharded parameters."""
    _taken[0] = crc32(repr(options_of(optimizer)).encode(), _taken[0])


def begin_anew() -> None:
    """On all ranks, as a model's parameters are sharded: what an error has left behind is forgotten."""
    _taken[0] = 0


def steps_taken() -> int:
    """A checksum of all of these steps since then, and of the optimizers' options in each."""
    return _taken[0]


def require_same_steps(taken: Sequence[int]) -> None:
    """Raises DivergenceError where those of the ranks of a job or a replica are not the same."""
    if len(set(taken)) > 1:
        raise DivergenceError(
            "the ranks' optimizers have taken other steps with the sharded parameters, each with its own parts: one "
            "rank alone has left a step out, or has another lr or another option. Step and schedule on all ranks "
            "alike, by what all ranks know"
        )
