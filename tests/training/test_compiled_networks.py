"""Five optimizer steps of whole networks with compiled blocks, recomputed, on 2 replicas of 2 ranks, in microbatches.

Parameters, buffers and losses are those of one process in plain torch. With autocast to bfloat16 a step's gradient is
no further from the true one than that of one process with autocast.
"""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.model.compiled import blocks
from tests.model.compiled.test_models import built
from tests.model.compiled.test_models import loss as of_maps
from tests.rank_group import rank_group

REPLICAS, MICROBATCHES, STEPS = 2, 2, 5
SAMPLES = REPLICAS * MICROBATCHES
SIZES = {"swin": (3, 100, 150)}  # of an image, where it is not this:
SIZE = (3, 64, 90)
VIEWS = {"stereo": 2}  # images of a sample


def batches(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    shape = (SAMPLES * VIEWS.get(name, 1), *SIZES.get(name, SIZE))
    return [torch.randn(shape, generator=draw).to(dtype) for _ in range(STEPS)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2e-4, momentum=0.9)


def in_one_process(name: str) -> tuple[nn.Module, list[float]]:
    """Samples one after the other; batch norm's running statistics are those of the first replica, as in DDP."""
    model = built(name)
    optimizer, losses = optimizer_of(model), []
    for batch in batches(name):
        optimizer.zero_grad()
        total, first = 0.0, {}
        for number, sample in enumerate(batch.chunk(SAMPLES)):
            value = of_maps(model, sample) / SAMPLES
            value.backward()
            total += value.item()
            if number + 1 == MICROBATCHES:
                first = {key: buffer.clone() for key, buffer in model.named_buffers()}
        for key, buffer in model.named_buffers():
            buffer.copy_(first[key])
        optimizer.step()
        losses.append(total)
    return model, losses


def stepped(name: str, strategy: ff.Strategy, backend: str) -> tuple[float, list[float], list[float], str]:
    """The largest relative difference from one process, losses of both, and which blocks are compiled."""
    torch.set_num_threads(1)
    here, expected = in_one_process(name)
    there, losses = built(name), []
    with mock.patch.object(blocks, "Programs", partial(blocks.Programs, backend)):
        mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
        model = ff.parallelize(there, mesh, find_unused_parameters=True, compile=strategy.compile)
        step = ff.TrainStep(model, of_maps, optimizer_of(model), strategy)
    for batch in batches(name):
        mine = batch.chunk(strategy.data)[mesh.get_local_rank("data")]
        losses.append(step(ff.shard(mine, mesh)).loss)
    worst = 0.0
    pairs: list[Any] = list(zip(here.parameters(), there.parameters(), strict=True))
    if mesh.get_local_rank("data") == 0:  # others get these buffers at their next forward pass
        pairs += zip(here.buffers(), there.buffers(), strict=True)
    for a, b in pairs:
        worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-6)))
    assert model.compiled is not None
    return worst, expected, losses, model.compiled.summary


def strategy_of(height: int, width: int) -> ff.Strategy:
    return ff.Strategy(
        compile=True, data=REPLICAS, height=height, width=width, microbatches=MICROBATCHES, recompute="blocks"
    )


# network: rows and columns of ranks; all but the quick ones are slow tests, for all that they capture
MESHES = {
    "convnext": (1, 2), "resnet": (1, 2), "unet": (2, 1), "segformer": (2, 1), "swin": (1, 2), "stereo": (1, 2),
    "raft": (2, 1),
}  # fmt: skip
QUICK = ("raft",)


def marked(*case: Any, quick: bool = False) -> Any:
    return case if quick else pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(marked(name, "aot_eager", quick=name in QUICK) for name in MESHES),
        marked("convnext", "inductor"),
        marked("raft", "inductor"),
    ],
)
def test_five_steps_of_a_network_are_those_of_one_process(name: str, backend: str) -> None:
    strategy = strategy_of(*MESHES[name])
    for worst, expected, losses, summary in rank_group(4).run(stepped, name, strategy, backend, timeout_seconds=1500):
        assert worst < 1e-9, (worst, summary)
        assert losses == pytest.approx(expected, rel=1e-10)
        assert " is not: " not in summary


def gradient(model: nn.Module) -> Tensor:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.double().flatten() for grad in found])


def rounded(name: str, strategy: ff.Strategy, backend: str) -> tuple[float, float, str]:
    """How far gradients in bfloat16 are from those in float64: in one process, and split with compiled blocks."""
    batch = batches(name, torch.float32)[0]
    true, here, there = built(name), built(name).float(), built(name).float()
    of_maps(true, batch.double()).backward()
    with torch.autocast("cpu", torch.bfloat16):
        value = of_maps(here, batch)
    value.backward()
    with mock.patch.object(blocks, "Programs", partial(blocks.Programs, backend)):
        mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
        model = ff.parallelize(there, mesh, find_unused_parameters=True, compile=strategy.compile)
        step = ff.TrainStep(model, of_maps, optimizer_of(model), strategy)
    step(ff.shard(batch, mesh))
    assert model.compiled is not None
    norm = gradient(true).norm()
    one, split = (float((gradient(net) - gradient(true)).norm() / norm) for net in (here, there))
    return one, split, model.compiled.summary


@pytest.mark.parametrize(
    ("name", "backend"),
    [*(marked(name, "aot_eager", quick=name in QUICK) for name in MESHES), marked("convnext", "inductor")],
)
def test_in_bfloat16_a_network_is_as_exact_as_in_one_process(name: str, backend: str) -> None:
    height, width = MESHES[name]
    strategy = ff.Strategy(compile=True, height=height, width=width, precision="bf16")
    for one, split, summary in rank_group(2).run(rounded, name, strategy, backend, timeout_seconds=900):
        assert 1e-4 < one < 0.8 and split < 1.15 * one, (one, split)  # ResNet's is 0.78: it has many norms
        assert " is not: " not in summary
