"""What oneDNN takes for itself: by hand, in bytes of float32 maps."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from fullframe.simulation.memory import scratch
from fullframe.simulation.memory.scratch import cpu_scratch
from tests.simulation.real_steps import held_bytes

aten = torch.ops.aten
MAP = 2 * 8 * 10 * 10 * 4  # bytes of the maps below
BLOCKED = 2 * MAP  # 8 channels fill half of a block of 16
WEIGHT = 8 * 8 * 9 * 4


is_torchs, HAS_BF16 = scratch._is_torchs, scratch._HAS_BF16


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Each thread takes a tile of its own, and which of two ends first is chance."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _as_on_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted by hand is so there; what real kernels take here, `tests/observation/memory` asks."""
    monkeypatch.setattr(scratch, "_BLOCK_CHANNELS", 16)
    monkeypatch.setattr(scratch, "_HAS_BF16", False)
    monkeypatch.setattr(scratch, "_is_torchs", lambda *_: False)


def maps(dtype: torch.dtype = torch.float32, kernel: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and an output of the input's shape."""
    x = torch.zeros(2, 8, 10, 10, dtype=dtype)
    return x, torch.zeros(8, 8, kernel, kernel, dtype=dtype), x


def options(dims: int, stride: int = 1, padding: int = 1, transposed: bool = False) -> tuple[Any, ...]:
    return [stride] * dims, [padding] * dims, [1] * dims, transposed, [0] * dims, 1


def forward(x: Tensor, weight: Tensor, out: Tensor) -> int:
    return cpu_scratch(aten.convolution.default, (x, weight, None, *options(2)), out)


def backward(x: Tensor, weight: Tensor, of_x: bool = True, of_weight: bool = True) -> int:
    out = (x if of_x else None, weight if of_weight else None, None)
    return cpu_scratch(aten.convolution_backward.default, (x, x, weight, [0], *options(2)), out)


def test_forward() -> None:
    x, weight, out = maps()
    assert forward(x, weight, out) == BLOCKED  # the result's; an input of fewer channels than 16 is read as it lies
    assert forward(x, weight, torch.zeros(2, 80, 10, 10)) == 10 * MAP
    wide, of_wide = torch.zeros(2, 16, 10, 10), torch.zeros(8, 16, 3, 3)
    assert forward(wide, of_wide, out) == BLOCKED + 2 * WEIGHT + BLOCKED - MAP  # to begin with; the result is made last
    assert forward(wide, of_wide, torch.zeros(2, 80, 10, 10)) == 10 * MAP
    depthwise = torch.zeros(8, 1, 3, 3)  # copies also few
    assert forward(x, depthwise, out) == BLOCKED + WEIGHT // 8 + BLOCKED - MAP
    assert forward(*maps(kernel=1)) == 0
    half = maps(torch.bfloat16, kernel=1)
    assert forward(*half) == MAP + 8 * 8 * 2 + MAP // 2  # in 16 bit also 1x1 kernels copy
    last = x.to(memory_format=torch.channels_last)
    assert forward(last, weight, out) == 2 * WEIGHT
    assert cpu_scratch(aten.relu.default, (x,), x) == 0


def test_backward_is_the_larger_of_the_two_gradients_needs() -> None:
    x, weight, _ = maps()
    for_x = BLOCKED + WEIGHT + BLOCKED - MAP
    for_weight = MAP + MAP + WEIGHT - WEIGHT  # in blocks of 8, as the input has fewer channels than 16
    assert backward(x, weight, of_weight=False) == for_x
    assert backward(x, weight, of_x=False) == for_weight
    assert backward(x, weight) == for_x - WEIGHT
    assert backward(*maps(kernel=1)[:2]) == 0
    half, of_half, _ = maps(torch.bfloat16)
    sums = 4 * of_half.numel() + (BLOCKED // 2 + BLOCKED // 2) // 2
    assert backward(half, of_half, of_x=False) == (BLOCKED + BLOCKED) // 2 + sums


def test_backward_with_channels_last() -> None:
    x, weight, _ = maps()
    last = x.to(memory_format=torch.channels_last)
    assert backward(last, weight) == 3 * WEIGHT
    assert backward(last, weight, of_weight=False) == 0
    deep = torch.zeros(8, 1, 7, 7)
    assert backward(last, deep) == 256 * deep.nbytes  # partial sums
    halves = backward(last.bfloat16(), deep.bfloat16())
    assert halves == 256 * deep.nbytes + 16 * 8 * 10 * 10 * 4


def allocated(call: Callable[[], Any]) -> int:
    """What torch's allocator hands out during a call, at its most, beyond what the call returns."""
    gc.collect()  # what earlier tests left would be counted as given back by this call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = call()
    return max(held_bytes(profiled)) - sum(t.nbytes for t in tree_leaves(made) if isinstance(t, Tensor))


# Kernel rows, stride, padding, transposed, and the kernel's shape for maps of 8 channels.
VOLUMES = [
    (3, 1, 1, False, (4, 8, 3, 3, 3)),
    (3, 2, 1, False, (4, 8, 3, 3, 3)),
    (1, 1, 0, False, (4, 8, 1, 1, 1)),
    (2, 2, 0, True, (8, 4, 2, 2, 2)),
]


# Samples, channels of input and result, kernel rows, stride.
FEW = [(1, 3, 8, 3, 1), (2, 8, 8, 3, 1), (1, 12, 24, 3, 1), (1, 12, 16, 3, 1), (3, 16, 24, 3, 1), (1, 24, 8, 3, 1)]
FEW += [(2, 3, 16, 7, 2), (1, 12, 24, 7, 2)]
POINTS = [(1, 16, 16, 1, 1), (2, 24, 8, 1, 1), (1, 8, 24, 1, 1), (1, 32, 24, 3, 1), (2, 16, 8, 3, 1)]


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="counted on AVX-512")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_channels_do_not_fill_take_what_torch_takes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """To a fiftieth of what the op holds, for both passes."""
    monkeypatch.setattr(scratch, "_is_torchs", is_torchs)
    monkeypatch.setattr(scratch, "_HAS_BF16", HAS_BF16)
    if dtype == torch.bfloat16 and not HAS_BF16:
        pytest.skip("counted where the processor multiplies bf16")
    for samples, inputs, outputs, kernel, stride in FEW if dtype == torch.float32 else POINTS:
        x, weight = torch.randn(samples, inputs, 64, 100), torch.randn(outputs, inputs, kernel, kernel)
        x, weight, settings = x.to(dtype), weight.to(dtype), options(2, stride, kernel // 2)
        out = aten.convolution(x, weight, None, *settings)
        held, case = x.nbytes + out.nbytes, (samples, inputs, outputs, kernel)
        said = cpu_scratch(aten.convolution.default, (x, weight, None, *settings), out)
        got = allocated(partial(aten.convolution, x, weight, None, *settings))
        assert got == pytest.approx(said, abs=0.02 * (said + held)), case
        if stride == 1:
            args = out, x, weight, [0], *settings
            said = cpu_scratch(aten.convolution_backward.default, args, (x, weight, None))
            got = allocated(partial(aten.convolution_backward, *args, [True, True, False]))
            assert got == pytest.approx(said, abs=0.02 * (said + held + x.nbytes)), case


@pytest.mark.parametrize(("kernel", "stride", "padding", "transposed", "shape"), VOLUMES)
def test_windows_of_small_volumes_lie_side_by_side(
    kernel: int, stride: int, padding: int, transposed: bool, shape: tuple[int, ...]
) -> None:
    """What is counted is what torch really takes, to a hundredth, for both passes and each gradient alone."""
    x, weight = torch.randn(1, 8, 12, 16, 16), torch.randn(shape)
    settings = options(3, stride, padding, transposed)
    out = aten.convolution(x, weight, None, *settings)
    columns = x[0, 0].numel() * 4 * 8 if transposed else out[0, 0].numel() * 8 * kernel**3
    forward = cpu_scratch(aten.convolution.default, (x, weight, None, *settings), out)
    assert forward == (4 * columns if kernel > 1 else 0)
    assert allocated(lambda: aten.convolution(x, weight, None, *settings)) == pytest.approx(forward, rel=0.01)
    for mask in ([True, True, False], [True, False, False], [False, True, False]):
        args = (out, x, weight, [0], *settings)
        made = aten.convolution_backward(*args, mask)
        said = cpu_scratch(aten.convolution_backward.default, args, made)
        got = allocated(partial(aten.convolution_backward, *args, mask))
        assert got == pytest.approx(said, rel=0.01), mask


# Kernel rows, stride, padding, dilation, transposed, groups, and the kernel's shape for maps of 8 channels.
MAPS = [
    (3, 1, 1, 1, False, 1, (16, 8, 3, 3)),
    (3, 2, 1, 1, False, 1, (16, 8, 3, 3)),
    (1, 1, 0, 1, False, 1, (16, 8, 1, 1)),
    (1, 2, 0, 1, False, 1, (16, 8, 1, 1)),
    (3, 1, 2, 2, False, 1, (16, 8, 3, 3)),
    (3, 1, 1, 1, False, 4, (16, 2, 3, 3)),
    (7, 1, 3, 1, False, 8, (8, 1, 7, 7)),
    (3, 2, 1, 1, True, 1, (8, 16, 3, 3)),
    (2, 2, 0, 1, True, 2, (8, 8, 2, 2)),
]


@pytest.mark.parametrize(("dtype", "samples"), [(torch.float64, 3), (torch.float32, 1)])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "transposed", "groups", "shape"), MAPS)
def test_windows_of_maps_that_onednn_does_not_take_lie_side_by_side(
    dtype: torch.dtype, samples: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool,
    groups: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What is counted is what torch really takes, for both passes and each gradient alone."""
    monkeypatch.setattr(scratch, "_is_torchs", is_torchs)
    x, weight = torch.randn(samples, 8, 16, 20, dtype=dtype), torch.randn(shape, dtype=dtype)
    settings = [stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0] * 2, groups
    if dtype == torch.float32 and not is_torchs(x, weight, settings):
        pytest.skip("in fp32 oneDNN takes these")
    out = aten.convolution(x, weight, None, *settings)
    said = cpu_scratch(aten.convolution.default, (x, weight, None, *settings), out)
    assert allocated(lambda: aten.convolution(x, weight, None, *settings)) == said
    for mask in ([True, True, False], [True, False, False], [False, True, False]):
        args = (out, x, weight, [0], *settings)
        made = aten.convolution_backward(*args, mask)
        said = cpu_scratch(aten.convolution_backward.default, args, made)
        assert allocated(partial(aten.convolution_backward, *args, mask)) == said, mask


def test_large_volumes_are_onednn_s() -> None:
    x, weight = torch.zeros(2, 8, 12, 16, 16), torch.zeros(8, 8, 3, 3, 3)
    found = cpu_scratch(aten.convolution.default, (x, weight, None, *options(3)), x)
    assert found == 2 * x.nbytes  # 8 channels fill half of a block of 16


ATTENTION = [
    (torch.float32, 768, 768, 8),
    (torch.float32, 100, 60, 16),
    (torch.float64, 300, 2000, 32),
    (torch.bfloat16, 20, 20, 8),
]


@pytest.mark.parametrize(("dtype", "queries", "keys", "channels"), ATTENTION)
def test_attention_holds_a_tile_of_scores(dtype: torch.dtype, queries: int, keys: int, channels: int) -> None:
    query, key = torch.randn(2, 4, queries, channels, dtype=dtype), torch.randn(2, 4, keys, channels, dtype=dtype)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, sums = forward(query, key, key)
    assert allocated(partial(forward, query, key, key)) == cpu_scratch(forward, (query, key, key), out)
    args = (out, query, key, key, out, sums, 0.0, False)
    assert allocated(partial(backward, *args)) == cpu_scratch(backward, args, out)


def test_truths_are_added_up_as_numbers() -> None:
    x = torch.zeros(10, 10)
    assert cpu_scratch(aten.sum.default, (x > 0,), torch.tensor(0)) == 8 * 100
    assert cpu_scratch(aten.sum.dim_IntList, (x, [0]), x[0]) == 0
