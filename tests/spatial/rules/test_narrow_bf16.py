"""bf16 convolutions of narrow maps, volumes and borders; on processors with AVX-512 torch's own are wrong."""

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fullframe as ff
from fullframe.simulation.fake.cuda_kernels import cuda_kernels
from fullframe.simulation.fake.replaced import replaced
from fullframe.spatial.rules import narrow_bf16
from fullframe.spatial.rules.narrow_bf16 import called, convolution, convolution_backward
from tests.rank_group import rank_group

ROUNDING = 0.03  # relative; what reads past a row's end is off by more than the result's size, or NaN
# kernel, stride, padding, dilation, columns
NARROW = [
    case
    for case in product((2, 3, 5), (2, 3), (0, 1), (1, 2), (3, 5))
    if case[4] + 2 * case[2] > case[3] * (case[0] - 1)
]


def leave_nan_in_freed_memory() -> None:
    """Where a kernel reads what it has not written, it is likely to find these."""
    filled = [torch.full((2**n,), float("nan")) for n in range(4, 17)]
    del filled


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def _require_float32_s(shape: tuple[int, ...], kernel: int, stride: int, padding: int, dilation: int) -> None:
    dims = len(shape) - 2
    x, weight, bias = torch.randn(shape), torch.randn(6, shape[1], *(kernel,) * dims), torch.randn(6)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    options = (stride,) * dims, (padding,) * dims, (dilation,) * dims, False, (0,) * dims, 1
    expected = torch.convolution(x.float(), weight.float(), bias.float(), *options)
    leave_nan_in_freed_memory()
    out = convolution(x, weight, bias, *options)
    assert out.dtype == torch.bfloat16
    assert error(out, expected) < ROUNDING

    gradient, wanted = torch.randn_like(out), [True, True, True]
    asked = torch.ops.aten.convolution_backward(gradient.float(), x.float(), weight.float(), [6], *options, wanted)
    leave_nan_in_freed_memory()
    found = convolution_backward(gradient, x, weight, [6], *options, wanted)
    assert all(f.dtype == torch.bfloat16 and error(f, a) < ROUNDING for f, a in zip(found, asked, strict=True))


def test_a_convolution_and_its_gradients_are_those_of_float32() -> None:
    torch.manual_seed(0)
    for kernel, stride, padding, dilation, columns in NARROW:
        _require_float32_s((2, 8, 17, columns), kernel, stride, padding, dilation)


@pytest.mark.parametrize("stride", [1, 2])
def test_also_of_volumes_smaller_than_the_kernel(stride: int) -> None:
    """Of fewer slices or columns. (Of fewer rows, plain torch ends the process: such a test would tell of no fault.)"""
    torch.manual_seed(0)
    for shape, kernel in (((2, 7, 9), 3), ((4, 7, 9), 5), ((1, 6, 8), 2), ((7, 5, 1), 3)):
        _require_float32_s((2, 20, *shape), kernel, stride, kernel // 2, 1)


def test_a_function_under_autocast_gives_what_autocast_gives() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 4, 33, 3), torch.randn(4, 4, 3, 3).requires_grad_()
    options: dict[str, Any] = {"stride": (2, 2), "padding": (1, 0), "dilation": (1, 1)}
    expected = F.conv2d(x.bfloat16().float(), weight.bfloat16().float(), None, **options)
    with torch.autocast("cpu", torch.bfloat16):
        leave_nan_in_freed_memory()
        out = called(F.conv2d, x, weight, None, **options)
    assert out.dtype == torch.bfloat16
    assert error(out.detach(), expected.detach()) < ROUNDING
    leave_nan_in_freed_memory()
    out.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    (asked,) = torch.autograd.grad(expected.sum(), weight)
    assert error(weight.grad, asked) < ROUNDING


class Multiplied(TorchDispatchMode):
    """The dtypes in which images are convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname == "convolution":
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_avx512", [True, False])
def test_programs_and_simulations_of_processors_do_as_the_processor_does(has_avx512: bool) -> None:
    """Both run on fake tensors; a simulation of a GPU does as a GPU does."""
    single = {torch.float32} if has_avx512 else {torch.bfloat16}
    with replaced(narrow_bf16, "HAS_AVX512", has_avx512), FakeTensorMode():
        for kernels, dtypes in ((nullcontext(), single), (cuda_kernels(True), {torch.bfloat16})):
            x, weight = torch.ones(1, 4, 33, 3).bfloat16(), torch.ones(4, 4, 3, 3).bfloat16()
            with kernels, Multiplied() as multiplied:
                out = called(F.conv2d, x, weight, None, stride=(2, 2), padding=(1, 0), dilation=(1, 1))
            assert out.dtype == torch.bfloat16
            assert multiplied.dtypes == dtypes


def _network(x: Tensor, weights: list[Tensor]) -> Tensor:
    """A stem with a border, a patch embedding without one, and the way up."""
    x = F.conv2d(x, weights[0], stride=2, padding=3)
    x = F.conv2d(x, weights[1], stride=2)
    return F.conv_transpose2d(x, weights[2], stride=2, padding=1)


def _volume_network(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Of 4 slices each rank has 2, fewer than the kernel; then 2, of which it has one."""
    x = F.conv3d(x, weights[0], padding=1)
    x = F.conv3d(x, weights[1], stride=2)
    return F.conv_transpose3d(x, weights[2], stride=2, padding=1)


NETWORKS: dict[str, tuple[Any, tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "images": (_network, (2, 3, 42, 18), ((8, 3, 7, 7), (8, 8, 2, 2), (8, 4, 4, 4))),
    "volumes": (_volume_network, (2, 20, 4, 14, 18), ((20, 20, 3, 3, 3), (20, 20, 2, 2, 2), (20, 16, 4, 4, 4))),
}


def _split(kind: str, axis: str) -> list[float]:
    mesh = ff.init_mesh(**{"height": 1, "width": 1} | {axis: 2})
    generator = torch.Generator().manual_seed(0)
    network, size, shapes = NETWORKS[kind]
    image = torch.randn(size, generator=generator)
    errors = []
    for _ in range(3):  # it is in the first calls of a process that it went wrong, or in later ones
        weights = [torch.randn(shape, generator=generator).div(8).bfloat16().requires_grad_() for shape in shapes]
        singles = [weight.detach().float().requires_grad_() for weight in weights]
        expected = network(image.bfloat16().float(), singles)
        pattern = torch.randn(expected.shape, generator=generator)
        (expected * pattern).mean().backward()
        leave_nan_in_freed_memory()
        out = network(ff.shard(image.bfloat16(), mesh), weights)
        (out.float() * ff.shard(pattern, mesh)).mean().backward()
        errors.append(error(out.full().detach(), expected.detach()))
        for weight, single in zip(weights, singles, strict=True):
            assert weight.grad is not None and single.grad is not None
            total = weight.grad.float()
            torch.distributed.all_reduce(total, torch.distributed.ReduceOp.SUM)
            errors.append(error(total / 2, single.grad))
    return errors


@pytest.mark.parametrize(("kind", "axis"), [("images", "width"), ("images", "height"), ("volumes", "depth")])
def test_split_networks_are_one_process_s(kind: str, axis: str) -> None:
    for errors in rank_group(2).run(_split, kind, axis):
        assert all(e < ROUNDING for e in errors), errors
