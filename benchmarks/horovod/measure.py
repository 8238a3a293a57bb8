"""The part that runs on the 2 ranks: collectives and training steps, timed in turn."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fullframe.horovod as hvd
from benchmarks import networks as networks_of
from benchmarks.timing import Timed, interleaved, ratio

RANKS = 2
SIZES = {"64 KiB": 64 << 10, "16 MiB": 16 << 20}
CALLS = {"64 KiB": 10, "16 MiB": 2}  # timed together: a single call would be timed with the barrier before it
IMAGES, HEIGHT, WIDTH = 2, 96, 128  # of each rank


def on_rank(rank: int, store: str, result: str, rounds: int, steps: int, networks: tuple[str, ...]) -> None:
    """On one rank: times everything; rank 0 leaves its findings as JSON in the file `result`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    hvd.init()
    found = {
        "allreduce": [allreduce(size, rounds) for size in SIZES],
        "training": [training(network, steps) for network in networks],
    }
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    hvd.shutdown()
    dist.destroy_process_group()


def allreduce(size: str, rounds: int) -> dict[str, Any]:
    """One size, summed in place by both."""
    ours, theirs = (torch.zeros(SIZES[size] // 4) for _ in range(2))
    calls = range(CALLS[size])
    variants = [
        Timed("hvd", lambda: [hvd.allreduce_(ours, op=hvd.Sum) for _ in calls]),
        Timed("dist", lambda: [dist.all_reduce(theirs) for _ in calls]),
    ]
    seconds = interleaved(variants, rounds if CALLS[size] > 4 else max(rounds // 4, 8), lambda: None)
    medians = {f"{name}_seconds": statistics.median(seconds[name]) / CALLS[size] for name in seconds}
    fastest = fastest_tenth(seconds["hvd"]) / fastest_tenth(seconds["dist"])
    return {"size": size, **medians, "ratio": ratio(seconds["hvd"], seconds["dist"]), "fastest_ratio": fastest}


def fastest_tenth(seconds: Sequence[float]) -> float:
    """The time that a tenth of the rounds kept below: on a machine that others use, those that were left alone."""
    return statistics.quantiles(seconds, n=10)[0]


def training(network: str, steps: int) -> dict[str, Any]:
    """One network: whole steps, batch to update, of both."""
    seconds = interleaved([Timed("hvd", with_hvd(network)), Timed("ddp", with_ddp(network))], steps, lambda: None)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rates = {f"{name}_images_per_second": RANKS * IMAGES / seconds for name, seconds in medians.items()}
    fastest = fastest_tenth(seconds["ddp"]) / fastest_tenth(seconds["hvd"])
    return {"network": network, **rates, "ratio": ratio(seconds["ddp"], seconds["hvd"]), "fastest_ratio": fastest}


def model_of(network: str) -> nn.Module:
    """A network with the same weights on every rank."""
    torch.manual_seed(0)
    model: nn.Module = getattr(networks_of, network)()
    return model


def with_hvd(network: str) -> Callable[[], object]:
    """A step whose gradients are averaged by Horovod's optimizer."""
    model = model_of(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return step(model, hvd.DistributedOptimizer(optimizer, model.named_parameters()))


def with_ddp(network: str) -> Callable[[], object]:
    """A step whose gradients are averaged by DDP."""
    model = DistributedDataParallel(model_of(network))
    return step(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


def step(model: nn.Module, optimizer: Any) -> Callable[[], object]:
    """Forward, backward, update."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(IMAGES, 3, HEIGHT, WIDTH, generator=generator)

    def run() -> None:
        optimizer.zero_grad()
        out = model(images).pooler_output
        F.mse_loss(out, torch.zeros_like(out)).backward()
        optimizer.step()

    return run
