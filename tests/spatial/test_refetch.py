"""Gathered tensors are not kept for backward, and are there when it comes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fullframe as ff
from fullframe.spatial.refetch import borrow, fetching_again
from tests.exactness import mesh, relative
from tests.rank_group import rank_group
from tests.spatial.corners import noise
from tests.spatial.rules.test_attention import tokens


def kept_bytes(attend: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Bytes of the different storages that are saved for backward."""
    storages: dict[int, Any] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        attend(x)
    return sum(storage.nbytes() for storage in storages.values())


def by_kernel(x: Tensor) -> Tensor:
    q, k, v = tokens(x.repeat(1, 3, 1, 1), 3).unbind(1)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])


def by_objects(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(torch.ones(5, 16), tokens(x, 1), tokens(x, 1))


def by_hand(x: Tensor) -> Tensor:
    k = tokens(x, 1)
    return (k @ k.transpose(-2, -1)).softmax(-1) @ k


def _kept(height: int, width: int) -> list[float]:
    x = torch.ones(1, 16, 16, 64, requires_grad=True)
    return [
        kept_bytes(f, ff.shard(x, mesh(height, width))) / kept_bytes(f, x) for f in (by_kernel, by_objects, by_hand)
    ]


@pytest.mark.parametrize("height,width", [(1, 2), (2, 2)])
def test_no_whole_keys_and_values_are_kept_for_backward(height: int, width: int) -> None:
    for shares in rank_group(height * width).run(_kept, height, width):
        assert max(shares) <= 1.04 / (height * width) + 0.01, shares


def _written() -> str:
    x = ff.shard(noise(1, 4, 6, 10).requires_grad_(), mesh(1, 2))
    k = tokens(x) * 2
    out = F.scaled_dot_product_attention(tokens(x), k, k * 1)
    k.add_(1)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_part_that_was_written_to_is_told_in_backward() -> None:
    for message in rank_group(2).run(_written):
        assert "modified by an inplace operation" in message


def _recomputed(height: int, width: int) -> list[float]:
    """Gradients under recompute, without hooks, and twice through one graph, against those of one process."""
    x = noise(1, 4, 6, 10).requires_grad_()
    expected = torch.autograd.grad(by_kernel(x).sin().sum(), x)[0]
    split = ff.shard(x, mesh(height, width))
    again = checkpoint(by_kernel, split, use_reentrant=False)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        kept = by_kernel(split)
    out = by_kernel(split).sin().sum()
    found = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (again, kept)]
    found += [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
    return [relative(expected, gradient) for gradient in found]


@pytest.mark.parametrize("height,width", [(1, 2), (2, 2)])
def test_recompute_and_a_second_backward_fetch_again_and_none_does_without_hooks(height: int, width: int) -> None:
    for errors in rank_group(height * width).run(_recomputed, height, width):
        assert max(errors) < 1e-12, errors


def _twice() -> float:
    """The second derivative of attention by hand."""
    x = noise(1, 4, 6, 10).requires_grad_()
    found = []
    for given in (x, ff.shard(x, mesh(1, 2))):
        k = tokens(given, 1)
        (gradient,) = torch.autograd.grad(((k @ k.transpose(-2, -1)).softmax(-1) @ k).sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    return relative(*found)


def test_a_second_derivative_is_that_of_one_process() -> None:
    assert max(rank_group(2).run(_twice)) < 1e-11


def _unequal_kernels() -> float:
    """A rank without queries takes another kernel, which saves other tensors."""
    x = noise(1, 4, 6, 10).requires_grad_()
    found = []
    for given in (x, ff.shard(x, mesh(1, 2))):
        k = tokens(given)
        q = tokens(given[..., :3])
        found.append(torch.autograd.grad(F.scaled_dot_product_attention(q, k, k.sin()).cos().sum(), x)[0])
    return relative(*found)


def test_ranks_may_take_different_kernels() -> None:
    assert max(rank_group(2).run(_unequal_kernels)) < 1e-12


def test_without_loans_the_op_runs_as_it_is() -> None:
    x = torch.ones(2)
    assert fetching_again([], lambda: x) is x


def _borrowed() -> tuple[int, bool]:
    """Bytes that a product with a borrowed tensor keeps on a rank, and whether the gradient is one process's."""
    x = noise(1, 1, 6, 10).requires_grad_()
    split = ff.shard(x, mesh(1, 2))
    loan, spec = borrow(split.local, split.spec, ["width"])
    weights = torch.arange(60.0, dtype=torch.float64).view(6, 10)
    kept = kept_bytes(lambda _: fetching_again([loan], lambda: loan.whole.mT.exp() * loan.whole.mT), x)
    out = fetching_again([loan], lambda: loan.whole.mT * loan.whole.mT)
    (gradient,) = torch.autograd.grad((out * weights.T).sum(), x)
    assert not spec.placements and loan.whole.shape == (1, 1, 6, 10)
    return kept, torch.allclose(gradient, 2 * x * weights)


def test_a_saved_view_of_a_loan_is_fetched_again() -> None:
    for kept, right in rank_group(2).run(_borrowed):
        assert kept == (30 + 60) * 8 and right  # this rank's part, and the exponentials
