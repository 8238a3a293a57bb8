"""Weights in channels_last: contiguous where they are sharded, and maps in channels_last as before."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fullframe as ff
from fullframe.model.compiled.blocks import CompiledBlocks, Programs
from fullframe.model.sharding.memory_format import lay_contiguous
from fullframe.ranks.memory_format import memory_format_of
from fullframe.spatial.tensor import local_or_whole
from tests.exactness import mesh
from tests.rank_group import rank_group


def convolutions(dims: int) -> nn.Sequential:
    conv: Any = nn.Conv2d if dims == 2 else nn.Conv3d
    transposed: Any = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
    norm: Any = nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d
    return nn.Sequential(conv(3, 4, 3, padding=1), norm(4), nn.ReLU(), conv(4, 6, 1), transposed(6, 2, 2, stride=2))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("of_image", [True, False])
def test_maps_lie_as_weights_in_channels_last_make_them(dims: int, of_image: bool) -> None:
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    torch.manual_seed(0)
    expected = convolutions(dims).to(memory_format=last)
    model = convolutions(dims)
    model.load_state_dict(expected.state_dict())
    model.to(memory_format=last)
    lay_contiguous(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    x = torch.randn(2, 3, *(5, 6, 7)[:dims])
    x = x.to(memory_format=last) if of_image else x
    found = []
    for plain, laid in zip(expected, model, strict=True):
        here, there = plain(x), laid(x)
        torch.testing.assert_close(there, here)
        assert memory_format_of(there) is memory_format_of(here)
        found.append(memory_format_of(there))
        x = here
    assert found[0] is found[-1] is last  # in between a 1 x 1 x 1 kernel of one thread gives another


def test_other_weights_that_have_gaps() -> None:
    """A transposed one, and one of two layers; what is contiguous stays where it is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(3, 4, 3))
    model[0].weight = model[1].weight = nn.Parameter(torch.randn(4, 4).t())
    before, where = model[0].weight.clone(), model[2].weight.data_ptr()
    lay_contiguous(model)
    assert model[0].weight is model[1].weight
    assert model[0].weight.is_contiguous()
    assert torch.equal(model[0].weight, before)
    assert model[2].weight.data_ptr() == where
    assert not model[2]._forward_pre_hooks


@pytest.mark.parametrize("in_channels_last", [False, True])
def test_a_parametrized_weight_is_not_computed(in_channels_last: bool) -> None:
    """Spectral norm takes a step of its iteration whenever the weight is read."""
    conv = parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, padding=1))
    conv.to(memory_format=torch.channels_last if in_channels_last else torch.contiguous_format)
    before = [buffer.clone() for buffer in conv.buffers()]
    lay_contiguous(conv)
    assert before
    assert all(map(torch.equal, before, conv.buffers()))
    made = memory_format_of(conv(torch.randn(2, 3, 5, 7)))
    assert made is (torch.channels_last if in_channels_last else torch.contiguous_format)


def strides(compiles: bool) -> tuple[list[bool], str]:
    """Whether maps of a sharded model on two ranks are in channels_last; which of its blocks are compiled."""
    torch.manual_seed(0)
    on = mesh(1, 2)
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1)) for _ in range(2)]
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *blocks).to(memory_format=torch.channels_last)
    parallel = ff.parallelize(model, on, shard_parameters=True)
    compiled = CompiledBlocks(model, ["1", "2"], Programs("aot_eager")) if compiles else None
    found: list[bool] = []
    for layer in model:
        layer.register_forward_hook(
            lambda layer, args, y: found.append(memory_format_of(local_or_whole(y)) is torch.channels_last)
        )
    loss: Tensor = parallel(ff.shard(torch.randn(2, 3, 6, 9), on)).square().mean()
    loss.backward()
    return found, compiled.summary if compiled else ""


@pytest.mark.parametrize("compiles", [False, True])
def test_split_maps_and_compiled_blocks(compiles: bool) -> None:
    for found, summary in rank_group(2).run(strides, compiles):
        assert found == [True] * 3
        assert summary.startswith("2 of 2 blocks are compiled" if compiles else ""), summary
