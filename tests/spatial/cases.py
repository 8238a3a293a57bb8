"""Ops on drawn tensors, each against one process: the runner of the CASES in `tests/spatial/rules/test_*.py`."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.exactness import differences_from, one_process
from tests.rank_group import rank_group

TOLERANCE = 1e-12
MESHES = [(1, 2), (2, 1), (1, 3), (2, 2)]
VOLUME_MESHES = [(1, 1, 2), (1, 1, 3), (2, 1, 2), (1, 2, 2)]  # height, width, depth
WORLDS = sorted({height * width for height, width in MESHES})
SIZES = ((16, 64), (17, 37))  # parts that are equal, and parts that are not and begin at odd rows and columns
NARROW = (11, 37)  # where one will do

Op = Callable[..., Any]


class Case(NamedTuple):
    op: Op
    split: tuple[tuple[int, ...], ...] = ((2, 4),)  # leading dims of each split operand; H and W follow
    whole: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[tuple[int, int], ...] = SIZES

    @property
    def smallest(self) -> tuple[int, int]:
        """The least of its sizes, for what is asked of one alone."""
        return NARROW if self.sizes == SIZES else min(self.sizes)


def one(op: Callable[[Tensor], Any]) -> Case:
    return Case(op)


def small(op: Callable[[Tensor], Any]) -> Case:
    return Case(op, sizes=((7, 11),))


# A test of all cases runs every fourth in `make test`.
every_fourth = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.further)])


def all_cases(every: int = 1) -> dict[str, Case]:
    """The cases of all families, by "family: name"; or every nth."""
    found: dict[str, Case] = {}
    for path in sorted((Path(__file__).parent / "rules").glob("test_*.py")):
        cases = getattr(import_module(f"tests.spatial.rules.{path.stem}"), "CASES", {})
        found.update({f"{path.stem.removeprefix('test_')}: {name}": case for name, case in cases.items()})
    return dict(islice(found.items(), 0, None, every))


def as_in_one_process(module: str, cases: Iterable[str]) -> Callable[[str], None]:
    """A test of each of the `CASES` of a test module, of these names."""

    @pytest.mark.parametrize("name", cases)
    def test(name: str) -> None:
        require_the_numbers_of_one_process(module, name)

    return test


def require_the_numbers_of_one_process(module: str, name: str) -> None:
    """Outputs and gradients of `CASES[name]` of a test module, float64, on all `MESHES`, at uneven sizes.

    Where an operand is a volume (N, C, D, H, W), also with its depth split.
    """
    for world in WORLDS:
        for answers in rank_group(world).run(_differences, module, name, world):
            wrong = {what: error for what, error in answers if not error <= TOLERANCE}
            assert not wrong, f"{name}: {wrong}"
            assert any(what.startswith("output") for what, _ in answers)


def _differences(module: str, name: str, world: int) -> list[tuple[str, float]]:
    case: Case = import_module(module).CASES[name]
    sizes = SIZES[-1:] if case.sizes == SIZES and world > 2 else case.sizes  # equal parts: in `tests/whole`
    found = differences_of(case, [mesh for mesh in MESHES if prod(mesh) == world], sizes)
    if any(len(lead) == 3 for lead in case.split):
        found += differences_of(case, [mesh for mesh in VOLUME_MESHES if prod(mesh) == world], case.sizes[-1:])
    return found


# Torch 2.11 has none.
AMINMAX_HAS_A_GRADIENT = type(torch.ones(1, requires_grad=True).aminmax().min.grad_fn).__name__ == "AminmaxBackward0"


def aminmax(x: Tensor, **options: Any) -> list[Tensor]:
    """Smallest and largest value, without a graph where torch has no gradient of them."""
    return [part if AMINMAX_HAS_A_GRADIENT else part.detach() for part in x.aminmax(**options)]


def raised(calls: Iterable[Callable[[], Any]]) -> list[str]:
    """The kind of error of each call; "nothing" where there is none."""
    kinds = []
    for call in calls:
        try:
            call()
            kinds.append("nothing")
        except Exception as error:
            kinds.append(type(error).__name__)
    return kinds


def differences_of(
    case: Case, meshes: Sequence[tuple[int, ...]], sizes: Sequence[tuple[int, int]]
) -> list[tuple[str, float]]:
    """On the ranks: what is compared, and how far it is from one process's; a mesh is (height, width[, depth])."""
    found = []
    for size in sizes:
        generator = torch.Generator().manual_seed(1)
        split = [torch.randn((*lead, *size), generator=generator, dtype=torch.float64) for lead in case.split]
        whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in case.whole]
        here = one_process(case.op, split, whole)
        for on in meshes:
            height, width, depth = (*on, 1)[:3]
            for what, error in differences_from(here, case.op, split, whole, height, width, depth=depth).items():
                found.append((f"{what} at {size} on {on}", error))
    return found
