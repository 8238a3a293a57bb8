"""Norms by the kernels of a GPU: their maths, on stand-ins for CUDA's that run on the CPU, a few plain lines each."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

import fullframe as ff
from fullframe.spatial.rules import norm_kernels
from fullframe.spatial.rules.normalization import OverReplicas
from tests.exactness import mesh
from tests.other_sizes import OTHER_SIZES, in_one_process, of_one_size_each
from tests.rank_group import rank_group
from tests.spatial.cases import MESHES
from tests.spatial.corners import BF16, F32, F64, Case, autocast, faults, last, noise


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _view(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (like.dim() - 2))


def _sums(values: Tensor) -> Tensor:
    return values.sum([d for d in range(values.dim()) if d != 1])


def stats(x: Tensor, eps: float) -> Any:
    var, mean = torch.var_mean(_wide(x), [d for d in range(x.dim()) if d != 1], correction=0)
    return mean, torch.rsqrt(var + eps)


def gather_stats(
    x: Tensor, mean: Tensor, invstd: Tensor, running_mean: Any, running_var: Any, momentum: float, eps: float,
    counts: Tensor
) -> Any:  # fmt: skip
    """Of Welford's parts, one a rank; CUDA's holds the number of elements as an integer."""
    assert counts.dtype == (x if running_mean is None else running_mean).dtype, "CUDA's reads it so"
    assert counts.dtype not in (BF16, torch.float16), "the counts are rounded"
    center, squares, total = torch.zeros_like(mean[0]), torch.zeros_like(mean[0]), 0
    for own, inverse, count in zip(mean, invstd, counts.tolist(), strict=True):
        factor = 1 / (total + count) if total + count else math.nan
        squares += (inverse**-2 - eps) * count + (center - own) ** 2 * (total * count * factor)
        center = total * factor * center + count * factor * own
        total = int(total + count)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(momentum * center)
        running_var.mul_(1 - momentum).add_(momentum * squares / (total - 1))
    return center, torch.rsqrt(squares / total + eps)


def elemt(x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    for t in (weight, bias):
        assert t is None or t.dtype in (x.dtype, mean.dtype), "CUDA's takes no other"
    out = (_wide(x) - _view(mean, x)) * _view(invstd, x)
    out = out if weight is None else out * _view(weight, x)
    return (out if bias is None else out + _view(bias, x)).to(x.dtype)


def backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, for_x: bool, for_weight: bool, for_bias: bool
) -> Any:
    layouts = [[step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (grad, x)]
    assert grad.is_contiguous() or layouts[0] == layouts[1], "CUDA's reads both in one layout"
    of_bias = _sums(_wide(grad))
    by_var = _sums(_wide(grad) * (_wide(x) - _view(mean, x)))
    like = mean if weight is None else weight
    return of_bias, by_var, (by_var * invstd).to(like.dtype), of_bias.to(like.dtype).clone()


def backward_elemt(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, by_mean: Tensor, by_var: Tensor, counts: Tensor
) -> Tensor:
    assert counts.dtype == torch.int32
    total = counts.sum()
    slope = _view(invstd**2 * by_var / total, x)
    distance = _wide(grad) - _view(by_mean / total, x) - (_wide(x) - _view(mean, x)) * slope
    scale = invstd if weight is None else invstd * weight
    return (distance * _view(scale, x)).to(x.dtype)


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}


@contextmanager
def kernels() -> Iterator[dict[str, int]]:
    """Inside, the CPU has them; how often each was run."""
    library, runs = Library("aten", "IMPL"), dict.fromkeys(KERNELS, 0)

    def counted(name: str) -> Any:
        def run(*args: Any) -> Any:
            runs[name] += 1
            return KERNELS[name](*args)

        return run

    for name in KERNELS:
        library.impl(name, counted(name), "CPU")
    norm_kernels.has_kernels.cache_clear()
    try:
        yield runs
    finally:
        library._destroy()
        norm_kernels.has_kernels.cache_clear()


def batch(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Any:
    kept = mean.detach().clone(), var.detach().clone()
    return F.batch_norm(x, *kept, weight, bias, True), *kept


def bare(x: Tensor, *rest: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, None, None, True)


def instance(x: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
    return F.instance_norm(x, None, None, weight, bias)


def picked(x: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
    """Elements that lie on the first rank alone."""
    rows = torch.arange(x.shape[-1]) + x[:1, :1] * 0 < 3
    chosen = x[rows.expand_as(x)]
    return F.batch_norm(chosen[:, None].expand(-1, 4), None, None, weight, bias, True)


def cases() -> dict[str, Case]:
    found = {}
    for dtype, kind in ((F64, F64), (F32, F32), (BF16, F32), (BF16, BF16)):
        weights = [noise(4, dtype=kind) for _ in range(3)] + [noise(4, dtype=kind).abs()]
        x = noise(2, 4, 13, 11, dtype=dtype)
        for name, op in {"batch": batch, "bare": bare, "instance": instance, "picked": picked}.items():
            if name == "instance" and dtype is BF16:
                continue  # a rank's share of a gradient that cancels is rounded, as of any parameter in 16 bit
            found[f"{name} {dtype} {kind}"] = Case(op, [x], weights)
        found[f"channels last {dtype} {kind}"] = Case(batch, [last(x)], weights)
    weights = [noise(4, dtype=F32) for _ in range(3)] + [noise(4, dtype=F32).abs()]
    found["autocast"] = Case(autocast(batch), [noise(2, 4, 13, 11, dtype=BF16)], weights)
    return found


def all_faults(height: int, width: int) -> tuple[dict[str, Any], dict[str, int]]:
    with kernels() as runs:
        return {name: wrong for name, case in cases().items() if (wrong := faults(case, height, width))}, runs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_as_in_one_process(sizes: tuple[int, int]) -> None:
    for found, runs in rank_group(sizes[0] * sizes[1]).run(all_faults, *sizes):
        assert not found, found
        assert all(runs.values()), runs


def second_derivative(height: int, width: int, with_gaps: bool) -> list[Tensor]:
    with kernels():
        x, weight = noise(2, 4, 6, 5).requires_grad_(), noise(4).requires_grad_()
        given = ff.shard(x, mesh(height, width)) if height * width > 1 else x
        given = given.transpose(2, 3) if with_gaps else given
        made = F.batch_norm(given, None, None, weight, None, True).sin()
        loss = (made.full() if isinstance(made, ff.SpatialTensor) else made).square().sum()
        first = torch.autograd.grad(loss, (x, weight), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))
        return [t.detach() for t in (*first, *second)]


@pytest.mark.parametrize("with_gaps", [False, True], ids=["contiguous", "with gaps"])
def test_gradients_of_gradients(with_gaps: bool) -> None:
    expected = second_derivative(1, 1, with_gaps)
    for found in rank_group(2).run(second_derivative, 1, 2, with_gaps):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def of_replicas(first: int) -> tuple[Any, dict[str, int]]:
    """One of `first` samples and one of the others, whose counts travel."""
    everything, weight = noise(4, 3, 5, 4), noise(3)
    share = slice(0, first) if dist.get_rank() == 0 else slice(first, 4)
    x = everything[share].requires_grad_()
    buffers = torch.zeros(3).double(), torch.ones(3).double()
    with kernels() as runs, OverReplicas(1):
        made = F.batch_norm(x, *buffers, weight, None, True)
        (made * everything[share].cos()).sum().backward()
    return (share, made.detach(), x.grad, *buffers), runs


@pytest.mark.parametrize("first", [1, 0])
def test_replicas(first: int) -> None:
    x, weight = noise(4, 3, 5, 4).requires_grad_(), noise(3)
    buffers = torch.zeros(3).double(), torch.ones(3).double()
    made = F.batch_norm(x, *buffers, weight, None, True)
    (made * x.detach().cos()).sum().backward()
    for (share, *found), runs in rank_group(2).run(of_replicas, first):
        assert all(runs.values()) or share.stop == 0
        torch.testing.assert_close(found, [made[share].detach(), x.grad[share], *buffers])  # type: ignore[index]


def of_sizes(sizes: Any) -> Any:
    with kernels():
        return of_one_size_each(sizes)


@pytest.mark.parametrize("sizes", OTHER_SIZES, ids=str)
def test_replicas_need_not_have_images_of_one_size(sizes: Any) -> None:
    expected = in_one_process(sizes)
    for found in rank_group(4).run(of_sizes, sizes):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
