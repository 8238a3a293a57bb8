"""Ops on infinities, NaN, ties, zeros, and on short floats and integers: torch's numbers, dtypes and refusals.

The runner of OVER_FLOATS, HALVES and INTEGERS in `tests/spatial/rules/test_*.py`.
"""

import math
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.exactness import unlike
from tests.rank_group import rank_group
from tests.spatial.cases import MESHES, WORLDS, Op

SHAPE = (2, 3, 5, 7)
inf, nan = math.inf, math.nan


def drawn() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def infinite() -> Tensor:
    x = drawn()
    x[0, 0, 1, 1], x[0, 1, 4, 6], x[1, 0, 0, 0], x[1, 0, 4, 5], x[1, 1, 2, 3:5] = inf, -inf, inf, -inf, inf
    return x


def with_nan() -> Tensor:
    x = infinite()
    x[0, 2, 4, 6], x[0, 0, 0, 5], x[1, 2, 1, 2:4] = nan, nan, nan
    return x


def masked() -> Tensor:
    """Scores with -inf on one rank's columns and rows, and one row of nothing else."""
    x = drawn()
    x[:, :2, :, :4], x[0, :, 3:], x[1, 2, 1] = -inf, -inf, -inf
    return x


def tied() -> Tensor:
    x = torch.randint(-1, 2, SHAPE, generator=torch.Generator().manual_seed(4)).double()
    return torch.where(x == 0, -x, x)


def constant() -> Tensor:
    x = torch.full(SHAPE, 0.1, dtype=torch.float64)  # of which no sum is exact
    x[0, 0] = 0
    x[0, 1] = 2
    return x


FLOATS = {f.__name__: f for f in (drawn, infinite, with_nan, masked, tied, constant)}


def _told(op: Op) -> Op:
    """The op's results, and whether each requires a gradient."""

    def told(*operands: Tensor) -> Any:
        results = [t for t in tree_leaves(op(*operands)) if isinstance(t, Tensor)]
        return [*results, *(torch.tensor(t.requires_grad) for t in results)]

    return told


def found(cases: dict[str, tuple[Op, list[Tensor], list[Tensor]]], tolerance: float, world: int) -> list[str]:
    """What differs from one process: each case is an op, its split operands and its whole ones."""
    wrong = []
    for height, width in (pair for pair in MESHES if pair[0] * pair[1] == world):
        for name, (op, split, whole) in cases.items():
            unequal = unlike(_told(op), split, whole, height, width, tolerance)
            wrong += [f"{name} on {height}x{width}: {what}" for what in unequal]
    return wrong


def on_all_meshes(function: Callable[..., list[str]], *args: Any) -> list[str]:
    """What `function(*args, world)` finds on any rank."""
    answers = [rank_group(world).run(function, *args, world) for world in WORLDS]
    return [wrong for ranks in answers for rank in ranks for wrong in rank]


def floats(module: str, name: str, world: int) -> list[str]:
    """Findings of `OVER_FLOATS[name]` of a test module, on infinities, NaN, ties and zeros."""
    op = import_module(module).OVER_FLOATS[name]
    tolerance = 1e-6 if name in ("sum", "mean", "cumsum") else 1e-12  # of a float32 result
    return found({data: (op, [FLOATS[data]()], []) for data in FLOATS}, tolerance, world)


def halves(module: str, name: str, kind: str, world: int) -> list[str]:
    """Findings of `HALVES[name]` of a test module, on 16 bit."""
    dtype: torch.dtype = getattr(torch, kind)
    x = torch.randn((2, 4, 9, 301), generator=torch.Generator().manual_seed(5))
    op = import_module(module).HALVES[name]
    return found({kind: (op, [(x * 100).to(dtype)], [])}, max(4 * torch.finfo(dtype).eps, 3e-6), world)


def integers(module: str, name: str, kind: str, world: int) -> list[str]:
    """Findings of `INTEGERS[name]` of a test module."""
    x = torch.randn((2, 4, 9, 301), generator=torch.Generator().manual_seed(5))[:, :, :5, :7] * 99
    x = x.to(torch.int64).to(getattr(torch, kind))
    x[0, 1], x[1, 0, :, 5:], x[1, 1] = 0, 0, 1
    return found({kind: (import_module(module).INTEGERS[name], [x], [])}, 1e-6, world)


def as_in_torch(
    module: str, over_floats: Iterable[str], halves_: Iterable[str] = (), integers_: Iterable[str] = ()
) -> Callable[..., None]:
    """A test of a module's OVER_FLOATS, HALVES and INTEGERS of these names, each by a function above."""
    calls: list[tuple[Callable[..., Any], tuple[str, ...]]] = [(floats, (name,)) for name in over_floats]
    calls += [(halves, (name, kind)) for name in halves_ for kind in ("float16", "bfloat16")]
    calls += [(integers, (name, kind)) for name in integers_ for kind in ("uint8", "int16", "bool")]

    @pytest.mark.parametrize(
        ("run", "args"), [pytest.param(*call, id=", ".join((call[0].__name__, *call[1]))) for call in calls]
    )
    def test(run: Any, args: tuple[str, ...]) -> None:
        assert not on_all_meshes(run, module, *args)

    return test


def classes(x: Tensor) -> Tensor:
    classes = (x[:, 0].detach().abs().float() * 7).long() % 4
    return torch.where(classes == 3, -100, classes)


def signs(x: Tensor) -> Tensor:
    return x.detach().sign() + (x.detach() == 0)


def rows(x: Tensor) -> Tensor:
    """(N * H * W, C)."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def positive(x: Tensor) -> Tensor:
    return x.detach().abs() + 0.1


def scores(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
