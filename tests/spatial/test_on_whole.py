"""Split maps of no elements: no images, no channels, no rows."""

import pytest
import torch

from fullframe.spatial.on_whole import as_too_small
from fullframe.spatial.rules.registry import TooSmall
from tests.spatial.cases import Op
from tests.spatial.values import found, on_all_meshes

SHAPES = (0, 3, 7, 9), (1, 0, 4, 6), (2, 3, 0, 6), (0, 2, 5, 1)
OPS: dict[str, Op] = {
    "norms": lambda x: [torch.linalg.vector_norm(x, p, 0) for p in (0, 1, 2)] if len(x) else x.norm(float("inf"), -1),
    "largest": lambda x: [x.logsumexp((0, 1, 2, 3)), torch.masked.logsumexp(x), x.logsumexp(-1)],
    "counted": lambda x: [x.detach().histc(4, 0, 0), *torch.histogram(x.detach(), 3), x.detach().unique(dim=1)],
    "runs": lambda x: [x.detach().unique_consecutive(), x.detach().unique_consecutive(dim=1)],
    "middle": lambda x: [t.median() if n else t.nanmedian() for t in (x, x.detach().int()) for n in (0, 1)],
    "joined": lambda x: torch.cat([x, x.sin()], 1).sum(2),
    "area": lambda x: torch.trapezoid(x, x, dim=0) if not len(x) else x.diff(dim=-1),
    "refused by torch": lambda x: x.amax(),
}


def _empty(name: str, world: int) -> list[str]:
    cases = {f"{name} of {shape}": (_or_refusal(OPS[name]), [torch.ones(shape).double()], []) for shape in SHAPES}
    return found(cases, 0.0, world)


def _or_refusal(op: Op) -> Op:
    """The op; where torch refuses, a tensor that names the error in its size."""

    def answer(x: torch.Tensor) -> object:
        try:
            return op(x)
        except (IndexError, RuntimeError) as refused:
            return torch.zeros(len(type(refused).__name__))

    return answer


@pytest.mark.parametrize("name", OPS)
def test_nothing_is_as_in_one_process(name: str) -> None:
    assert not on_all_meshes(_empty, name)


def test_other_errors_are_left_as_they_are() -> None:
    small = TooSmall(["width"])
    assert as_too_small(small, torch.sin, (), {}) is small
    assert as_too_small(ValueError("else"), torch.sin, (torch.ones(0),), {}) is None
