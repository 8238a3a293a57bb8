"""The part that runs on the ranks: a step of each model, its bytes counted and its windows recorded."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from benchmarks.communication.minimum import Recorder
from benchmarks.communication.traffic import BROADCASTS, GATHERS, MESSAGES, REDUCTIONS, counted
from benchmarks.networks import UNet, convnext_tiny, resnet50
from benchmarks.spatial_memory.models import feature_loss, segmentation_loss

SHAPE = (1, 3, 128, 256)


class Case(NamedTuple):
    """A network and what is minimised."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor, Tensor], Tensor]  # (model, image, labels)


CASES = {
    "ConvNeXt-tiny": Case(convnext_tiny, feature_loss),
    "ResNet-50": Case(resnet50, feature_loss),
    "UNet": Case(UNet, segmentation_loss),
}


def row(name: str, ranks: int) -> dict[str, Any]:
    """One model: bytes of a step over all ranks, by purpose, and the minimum."""
    case, mesh = CASES[name], ff.init_mesh(width=ranks)
    torch.manual_seed(0)
    model = ff.parallelize(case.build(), mesh)
    image = ff.shard(torch.randn(SHAPE), mesh)
    labels = ff.shard(torch.randint(8, (SHAPE[0], *SHAPE[2:])), mesh)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        case.loss(model, image, labels).backward()

    step()  # after the first step DDP arranges its buckets
    with Recorder() as recorder:
        traffic = counted(step)
    world = dist.group.WORLD.group_name  # DDP's group; everything else has one of its own
    parameters = sum(call.bytes for call in traffic.calls if call.kind == REDUCTIONS and call.group == world)
    sums = torch.tensor(
        [
            traffic.total(MESSAGES),
            traffic.total(GATHERS, REDUCTIONS) - parameters,
            traffic.total(BROADCASTS),
            parameters,
        ]
    )
    dist.all_reduce(sums)
    messages, statistics, broadcasts, parameters = sums.tolist()
    minimum = sum(call.bytes for call in recorder.calls)
    return {
        "model": name,
        "ranks": ranks,
        "ops": len(recorder.calls),
        "borrowing_ops": sum(call.bytes > 0 for call in recorder.calls),
        "message_bytes": messages,
        "minimum_bytes": minimum,
        "ratio": messages / minimum,
        "statistics_bytes": statistics,
        "broadcast_bytes": broadcasts,
        "parameter_bytes": parameters,
    }


def on_rank(rank: int, ranks: int, store: str, result: str) -> None:
    """All models on one of the ranks; rank 0 writes the rows."""
    torch.set_num_threads(1)
    # DDP's remark about the strides of a depthwise weight's gradient.
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = [row(name, ranks) for name in CASES]
    if rank == 0:
        Path(result).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
