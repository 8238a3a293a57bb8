"""The strides of what split tensors give are torch's, whose order decides what `flatten` copies and what is a view."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group


def _weight(x: Tensor, *shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(x.dtype)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "relu": torch.relu,
    "add": lambda x: x + x[:, :1],
    "convolution": lambda x: F.conv2d(x, _weight(x, 4, 4, 3, 3), None, 1, 1),
    "by a weight that lies channels last": lambda x: F.conv2d(
        x, _weight(x, 4, 4, 3, 3).to(memory_format=torch.channels_last), None, 2, 1
    ),
    "depthwise": lambda x: F.conv2d(x, _weight(x, 4, 1, 3, 3), None, 1, 1, 1, 4),
    "1x1": lambda x: F.conv2d(x, _weight(x, 4, 4, 1, 1)),
    "transposed": lambda x: F.conv_transpose2d(x, _weight(x, 4, 4, 3, 3), None, 2, 1),
    "batch norm": lambda x: F.batch_norm(x, None, None, None, None, True),
    "group norm": lambda x: F.group_norm(x, 2),
    "instance norm": F.instance_norm,
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 4),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), "replicate"),
    "circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "softmax": lambda x: x.softmax(1),
    "sum": lambda x: x.sum(1, keepdim=True),
    "flip": lambda x: x.flip(3),
    "roll": lambda x: x.roll((1, 2), (2, 3)),
    "roll of all": lambda x: x.roll(1),
    "slice": lambda x: x[..., 1:-1],
    "slice, relu": lambda x: x[..., 1:-1].relu(),
    "tokens": lambda x: x.flatten(2).transpose(1, 2),
    "pixel shuffle": lambda x: F.pixel_shuffle(torch.cat([x, x], 1), 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "to another dtype": lambda x: x.half(),
    "layer norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),
    "matmul": lambda x: x @ x.mT,
}


def _others(dtype: torch.dtype, last: bool, cropped: bool) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Strides of one process and of split tensors, where they differ; of dims of one element they say nothing."""
    x = torch.arange(2 * 4 * 9 * 12).view(2, 4, 9, 12).sin().to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    x = x[:, :, 1:8, 1:-1] if cropped else x
    split, found = ff.shard(x, mesh(1, 2)), {}
    for name, op in OPS.items():
        here, there = op(x), op(split)
        strides = [tuple(s for s, size in zip(t.stride(), here.shape, strict=True) if size > 1) for t in (here, there)]
        if strides[0] != strides[1]:
            found[name] = (strides[0], strides[1])
    return found


@pytest.mark.parametrize("cropped", [False, True], ids=["dense", "cropped"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_as_in_one_process(last: bool, cropped: bool) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        for found in rank_group(2).run(_others, dtype, last, cropped):
            assert not found


def _after_attention(x: Tensor) -> Tensor:
    """What lies channels last, or does not, by the strides of dims of one row alone: one sample, one head."""
    samples, channels, height, width = x.shape
    heads = x.flatten(2).transpose(1, 2).contiguous().view(samples, height * width, 1, channels).transpose(1, 2)
    heads = F.scaled_dot_product_attention(heads, heads, heads)
    tokens = heads.transpose(1, 2).reshape(samples, height * width, channels)
    return tokens.view(samples, height, width, channels).permute(0, 3, 1, 2)


def _others_of_one_sample() -> list[str]:
    x = torch.arange(4 * 9 * 12).view(1, 4, 9, 12).sin().double()
    split, found = ff.shard(x, mesh(1, 2)), []
    last = x.contiguous(memory_format=torch.channels_last)
    for name, op in {
        "transposed": lambda x: x.transpose(0, 1),
        "attention": _after_attention,
        "group norm": lambda x: F.group_norm(last if x is not split else ff.shard(last, mesh(1, 2)), 2),
        "convolution": lambda x: F.conv2d(F.group_norm(_after_attention(x), 2), _weight(x, 4, 4, 1, 1)),
    }.items():
        here, there = op(x), op(split)
        torch.manual_seed(0)
        noise = torch.randn_like(here)
        torch.manual_seed(0)
        if here.stride() != there.stride() or not torch.equal(noise, ff.full(torch.randn_like(there))):
            found.append(f"{name}: {here.stride()}, {there.stride()}")
    return found


def test_strides_of_one_sample_decide_too() -> None:
    for found in rank_group(2).run(_others_of_one_sample):
        assert not found
