"""Which steps optimizers have taken with sharded parameters, of which each rank has parts that no other rank sees.

So nothing but the steps themselves, what an optimizer is set to, and whole values that are assigned, can be compared.
"""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fullframe.errors import DivergenceError
from fullframe.model.same.optimizers import options_of
from fullframe.ranks.raw_bytes import in_bytes, plain

_ELEMENTS = 4096  # of assigned values, that are looked at
_taken = [0]


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


def require_same_steps(taken: Sequence[int]) -> None:
    """Raises DivergenceError where those of the ranks of a job or a replica are not the same."""
    if len(set(taken)) > 1:
        raise DivergenceError(
            "the ranks' optimizers have taken other steps with the sharded parameters, each with its own parts: one "
            "rank alone has left a step out, has another lr or another option, or was given other values. Step, "
            "schedule and load states on all ranks alike, by what all ranks know"
        )
