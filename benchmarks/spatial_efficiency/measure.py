"""The part that runs on the 2 ranks: the variants of one step, timed in turn, and single operators on tiny tensors.

The bound is what no split can beat: each rank trains on its half image as if it were the whole, and only the
gradients are exchanged. A split that borrows rows, and still gets the numbers of the whole image, comes after it.
"""

import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import fullframe as ff
from benchmarks.networks import UNet, convnext_tiny, resnet50
from benchmarks.timing import Timed, interleaved, ratio
from fullframe.spatial.gradients import manage

RANKS = 2
NETWORKS: dict[str, Callable[[], nn.Module]] = {"ConvNeXt-tiny": convnext_tiny, "ResNet-50": resnet50, "UNet": UNet}
CASES = (
    ("ConvNeXt-tiny", (1, 3, 256, 1024)),
    ("ConvNeXt-tiny", (2, 3, 128, 256)),
    ("ResNet-50", (1, 3, 256, 512)),
    ("UNet", (1, 3, 256, 512)),
)
AXES = ("height", "width")


def training_step(model: nn.Module, image: Tensor) -> None:
    """Forward and backward; where there is a pooled output the loss reads it too: every parameter has a gradient."""
    output = model(image)
    if isinstance(output, Tensor):
        loss = output.square().mean()
    else:
        loss = output.last_hidden_state.square().mean() + output.pooler_output.tanh().mean()
    loss.backward()


class Models:
    """The same network four times: alone, under DDP for the bound, and split along each axis."""

    def __init__(self, build: Callable[[], nn.Module], meshes: dict[str, DeviceMesh]):
        self.meshes = meshes
        self.alone = build()
        self.bound = DistributedDataParallel(build())
        self.split = {axis: ff.parallelize(build(), mesh) for axis, mesh in meshes.items()}

    def zero_grad(self) -> None:
        """Drops all gradients: outside the timed part, and so that one variant's do not stay for the next."""
        for model in (self.alone, self.bound, *self.split.values()):
            model.zero_grad(set_to_none=True)

    def variants(self, image: Tensor) -> list[Timed]:
        """One step of each kind on (N, 3, H, W)."""
        rank = dist.get_rank()
        timed = [Timed("one process", (lambda: training_step(self.alone, image)) if rank == 0 else None)]
        for axis, dim in zip(AXES, (2, 3), strict=True):
            half = image.chunk(RANKS, dim)[rank].contiguous()
            shard = ff.shard(image, self.meshes[axis])
            timed.append(Timed(f"bound {axis}", lambda half=half: training_step(self.bound, half)))
            timed.append(Timed(f"split {axis}", lambda axis=axis, shard=shard: training_step(self.split[axis], shard)))
        return timed


def step_table(meshes: dict[str, DeviceMesh], rounds: Sequence[int]) -> list[dict[str, Any]]:
    """One row for a network, a shape and an axis."""
    rows = []
    for (network, shape), count in zip(CASES, rounds, strict=True):
        models = Models(NETWORKS[network], meshes)
        torch.manual_seed(1)
        seconds = interleaved(models.variants(torch.randn(shape)), count, models.zero_grad)
        for axis in AXES:
            bound, split, alone = seconds[f"bound {axis}"], seconds[f"split {axis}"], seconds["one process"]
            rows.append(
                {
                    "network": network,
                    "shape": list(shape),
                    "axis": axis,
                    "rounds": count,
                    "one_process_seconds": statistics.median(alone),
                    "bound_seconds": statistics.median(bound),
                    "split_seconds": statistics.median(split),
                    "share_of_bound": ratio(bound, split),
                    "speedup": ratio(alone, split),
                    "bound_speedup": ratio(alone, bound),
                }
            )
    return rows


def operators() -> dict[str, tuple[Callable[[Tensor], Tensor], tuple[Tensor, ...]]]:
    """What is timed, as (function of the feature map, its parameters)."""
    torch.manual_seed(2)
    bias, small, large = (nn.Parameter(torch.randn(shape)) for shape in ((8,), (8, 8, 1, 1), (8, 8, 3, 3)))
    for parameter in (bias, small, large):
        manage(parameter, None)  # as a model's, whose gradients its wrapper averages
    return {
        "relu": (F.relu, ()),
        "add": (lambda x: x + x, ()),
        "conv 1x1": (lambda x: F.conv2d(x, small, bias), (small, bias)),
        "conv 3x3, with its exchange": (lambda x: F.conv2d(x, large, bias, padding=1), (large, bias)),
    }


def calls(function: Callable[[Tensor], Tensor], x: Tensor, count: int) -> Callable[[], None]:
    """`count` forward calls that build their autograd graph and drop it."""

    def run() -> None:
        for _ in range(count):
            function(x)

    return run


def backward_calls(
    function: Callable[[Tensor], Tensor], x: Tensor, parameters: tuple[Tensor, ...], count: int
) -> Callable[[], None]:
    """`count` forward and backward calls; a split tensor is differentiated at its local part."""

    def local(value: Tensor) -> Tensor:
        return value.local if isinstance(value, ff.SpatialTensor) else value

    leaves = (local(x), *parameters)
    gradient = torch.ones_like(local(function(x)))

    def run() -> None:
        for _ in range(count):
            torch.autograd.grad(local(function(x)), leaves, gradient)

    return run


def operator_table(mesh: DeviceMesh, batches: int, count: int = 100) -> list[dict[str, Any]]:
    """Microseconds a call on (1, 8, 8, 16) split into halves, and on such a half in plain torch."""
    torch.manual_seed(3)
    full = torch.randn(1, 8, 8, 16, requires_grad=True)
    # Both contiguous and inside a graph, as feature maps are; a part fresh from `shard` is a view with gaps.
    split = ff.shard(full, mesh).contiguous()
    half = full.chunk(RANKS, -1)[dist.get_rank()].contiguous()
    rows = []
    for name, (function, parameters) in operators().items():
        variants = [
            Timed("plain", calls(function, half, count)),
            Timed("split", calls(function, split, count)),
            Timed("plain backward", backward_calls(function, half, parameters, count)),
            Timed("split backward", backward_calls(function, split, parameters, count)),
        ]
        seconds = interleaved(variants, batches, lambda: None)
        micros = {key: statistics.median(values) / count * 1e6 for key, values in seconds.items()}
        rows.append(
            {
                "name": name,
                "plain_microseconds": micros["plain"],
                "split_microseconds": micros["split"],
                "overhead_microseconds": micros["split"] - micros["plain"],
                "overhead_with_backward_microseconds": micros["split backward"] - micros["plain backward"],
            }
        )
    return rows


def on_rank(rank: int, store: str, result: str, quick: bool) -> None:
    """Everything, on one of the ranks; rank 0 leaves its findings as JSON in the file `result`."""
    import json

    torch.set_num_threads(1)
    # DDP's remark about the strides of a depthwise weight's gradient; the bound gets it as well.
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    meshes = {"height": ff.init_mesh(height=RANKS), "width": ff.init_mesh(width=RANKS)}
    found = {
        "operators": operator_table(meshes["width"], batches=9 if quick else 41),
        "steps": step_table(meshes, rounds=(3, 5, 3, 3) if quick else (15, 31, 15, 15)),
    }
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
