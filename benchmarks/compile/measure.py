"""On a rank: forward and backward of one step, as it is and with compiled blocks, timed in turn.

The bound is what no split can beat: each rank trains on its half image as if it were the whole, with compiled blocks
and no exchange. All blocks are compiled by the same code, so that a ratio tells of the split alone.
"""

import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fullframe as ff
from benchmarks.networks import convnext_tiny
from benchmarks.spatial_efficiency.measure import training_step
from benchmarks.timing import Timed, interleaved, ratio
from fullframe.model.compiled.blocks import CompiledBlocks, compiled_blocks
from fullframe.spatial.gradients import manage

RANKS = 2
CASES = {"large": (1, 3, 256, 1024), "small": (2, 3, 128, 256)}
AXIS = "width"
RATIOS = {
    "split_over_compiled": ("split", "split, compiled"),
    "speedup_of_compiled": ("one process, compiled", "split, compiled"),
    "speedup_as_they_are": ("one process", "split"),
    "one_process_over_compiled": ("one process", "one process, compiled"),
    "share_of_bound": ("bound", "split"),
    "share_of_compiled_bound": ("bound, compiled", "split, compiled"),
}


class Models:
    """The same network six times: alone, under DDP for the bound, and split, as it is and with compiled blocks."""

    def __init__(self, build: Callable[[], nn.Module]):
        self.mesh = ff.init_mesh(width=RANKS)
        alone = {"one process": build(), "one process, compiled": build()}
        bound = {"bound": build(), "bound, compiled": build()}
        self.compiled: dict[str, CompiledBlocks] = {}
        for name, model in (alone | bound).items():
            if name.endswith("compiled"):
                for parameter in model.parameters():
                    manage(parameter, None)  # as of a model whose gradients are averaged: by DDP, or by nobody
                self.compiled[name] = compiled_blocks(model, True)
        split = {
            "split": ff.parallelize(build(), self.mesh),
            "split, compiled": ff.parallelize(build(), self.mesh, compile=True),
        }
        blocks = split["split, compiled"].compiled
        assert blocks is not None
        self.compiled["split, compiled"] = blocks
        self.alone = alone
        self.bound = {name: DistributedDataParallel(model) for name, model in bound.items()}
        self.split = split
        self.spent: dict[str, list[float]] = {}  # this rank's processor seconds of each step, the first one too

    def zero_grad(self) -> None:
        """Drop all gradients: outside the timed part, and so that one variant's do not stay for the next."""
        for model in (*self.alone.values(), *self.bound.values(), *self.split.values()):
            model.zero_grad(set_to_none=True)

    def variants(self, image: torch.Tensor) -> list[Timed]:
        """One step of each kind on (N, 3, H, W)."""
        rank = dist.get_rank()
        half, shard = image.chunk(RANKS, -1)[rank].contiguous(), ff.shard(image, self.mesh)
        given: list[tuple[dict[str, Any], Any]] = [(self.bound, half), (self.split, shard)]
        steps = [Timed(name, self._step(name, model, x)) for models, x in given for name, model in models.items()]
        alone = {name: self._step(name, model, image) if rank == 0 else None for name, model in self.alone.items()}
        return [Timed(name, run) for name, run in alone.items()] + steps

    def _step(self, name: str, model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
        spent = self.spent[name] = []

        def step() -> None:
            began = time.thread_time()
            training_step(model, x)
            spent.append(time.thread_time() - began)

        return step

    def processor_seconds(self) -> dict[str, float]:
        """The median of each kind of step, on the rank that computes longest: of use where the machine is busy."""
        mine = {name: statistics.median(spent[1:]) for name, spent in self.spent.items()}
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, mine)
        return {name: max(each[name] for each in everyone if name in each) for name in everyone[0]}


def found_for(shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """The medians, the ratios, and what compiling took."""
    models = Models(convnext_tiny)
    torch.manual_seed(1)
    seconds = interleaved(models.variants(torch.randn(shape)), rounds, models.zero_grad)
    processor = models.processor_seconds()
    whys = {name: blocks.programs.whys for name, blocks in models.compiled.items()}
    return {
        "shape": list(shape),
        "rounds": rounds,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "processor_seconds": processor,
        "processor_ratios": {name: processor[over] / processor[under] for name, (over, under) in RATIOS.items()},
        "ratios": {name: ratio(seconds[over], seconds[under]) for name, (over, under) in RATIOS.items()},
        "programs": {name: _made(blocks) for name, blocks in models.compiled.items()},
        "as_they_are": {name: {block: why for block, why in each.items() if why} for name, each in whys.items()},
    }


def _made(blocks: CompiledBlocks) -> dict[str, Any]:
    seconds = [said.seconds for said in blocks.programs.said]
    return {"count": len(seconds), "seconds": round(sum(seconds), 1)}


def starts_for(shape: tuple[int, ...]) -> dict[str, Any]:
    """A first step of the split model with compiled blocks, in a new process: what its programs take."""
    mesh = ff.init_mesh(width=RANKS)
    model = ff.parallelize(convnext_tiny(), mesh, compile=True)
    began = time.perf_counter()
    training_step(model, ff.shard(torch.randn(shape), mesh))
    assert model.compiled is not None
    return {"first_step_seconds": round(time.perf_counter() - began, 1), **_made(model.compiled)}


def on_rank(rank: int, store: str, result: str, cases: dict[str, int]) -> None:
    """The rounds of each case, or without rounds the start alone; rank 0 leaves its findings in the file `result`."""
    torch.set_num_threads(1)
    # DDP's remark about the strides of a depthwise weight's gradient; the bound gets it as well.
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    found = {
        name: found_for(CASES[name], rounds) if rounds else starts_for(CASES[name]) for name, rounds in cases.items()
    }
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
