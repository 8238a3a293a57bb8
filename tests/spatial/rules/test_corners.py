"""Single findings of `python -m tests.whole.opinfo`, each in the few lines that show it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fullframe as ff
from fullframe.spatial.spec import spec_of
from fullframe.spatial.tensor import SpatialTensor, wrap
from tests.exactness import differences, mesh
from tests.rank_group import rank_group

CASES: dict[str, Callable[[Tensor], Any]] = {
    "a matrix of no rows": lambda x: torch.zeros(0, 6, dtype=x.dtype) @ x[0, 0] * 2,
    "more differences than rows": lambda x: x.diff(9, 1),
    "vector norm of order 0": lambda x: torch.linalg.vector_norm(x, 0, (1, 3)) * x.sum(),
    "operands called x1 and x2": lambda x: torch.nn.functional.cosine_similarity(x1=x, x2=x.sin(), dim=1),
}


def _image() -> Tensor:
    return torch.randn(2, 3, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _worst(name: str) -> float:
    return max(differences(CASES[name], [_image()], [], 1, 2).values())


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    assert max(rank_group(2).run(_worst, name)) < 1e-12


def _untouched() -> list[float]:
    """Torch copies in these functions: a write to the result does not reach the argument."""
    found = []
    shuffles = [lambda x: torch.pixel_shuffle(x, 3), lambda x: torch.channel_shuffle(x, 3)]
    for shuffle in [*shuffles, lambda x: x.repeat_interleave(2, dim=1)]:
        x = torch.randn(1, 9, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        shell = ff.shard(x, mesh(1, 2))
        shuffle(shell).zero_()
        found.append(float((shell.full() - x).abs().max()))
    return found


def test_a_write_to_a_copy_does_not_reach_the_argument() -> None:
    for found in rank_group(2).run(_untouched):
        assert found == [0.0, 0.0, 0.0]


def _gathered() -> tuple[float, bool]:
    """In gather mode: operands by names that are the function's own, and a result that is sparse."""
    x = _image()
    shell = ff.shard(x, mesh(1, 2))
    spec = shell.spec
    loose = wrap(shell.local, spec_of(spec.spatial, spec.shape, spec.placements, True))
    assert isinstance(loose, SpatialTensor)
    apart = torch.cdist(x1=loose, x2=loose)
    leaf = loose.detach().requires_grad_()
    sparse = leaf.to_sparse()
    return float((apart - torch.cdist(x, x)).abs().max()), torch.equal(sparse.to_dense(), x)


@pytest.mark.filterwarnings("ignore")
def test_gathered_calls() -> None:
    for apart, same in rank_group(2).run(_gathered):
        assert apart == 0.0 and same


def _variance() -> None:
    x = ff.shard(_image(), mesh(1, 2))
    with pytest.raises(ValueError, match="incorrect size"):
        torch.nn.functional.gaussian_nll_loss(x, x, torch.ones(2, 3, 6, 3))


def test_a_variance_of_another_size_is_refused() -> None:
    rank_group(2).run(_variance)
