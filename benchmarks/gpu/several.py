"""Ranks with a GPU each, by NCCL: how near a split step comes to its bound, and what hides behind what.

The bound is a replica a GPU on its part of the frame as if that were the whole: DDP, no exchange, wrong numbers.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fullframe as ff
from benchmarks.gpu.found import Found, device_of, wait_for
from benchmarks.networks import UNet, convnext_tiny, resnet50
from benchmarks.timing import slowest

_NETWORKS: dict[str, Callable[[], nn.Module]] = {"UNet": UNet, "ResNet-50": resnet50, "ConvNeXt-tiny": convnext_tiny}
_ROUNDS = 8


def bound(kind: str) -> Found:
    """A step of each network, bf16, split over all ranks' columns, against the bound; and one traced."""
    found, device = Found(), device_of(kind)
    ranks = dist.get_world_size()
    mesh = ff.init_mesh(width=ranks)
    small = kind == "cpu"
    rows, columns = (32, 32 * ranks) if small else (1024, 2048)
    networks = {"UNet": lambda: UNet(4, 2)} if small else _NETWORKS
    for name, build in networks.items():
        frame = torch.randn(1, 3, rows, columns, generator=torch.Generator().manual_seed(0)).to(device)
        part = frame.chunk(ranks, -1)[dist.get_rank()].contiguous()
        split, alone = ff.parallelize(build().to(device), mesh), _ddp(build().to(device), device)
        frame = ff.shard(frame, mesh, check=False)
        times: dict[str, list[float]] = {"split": [], "bound": []}
        for number in range(2 + (1 if small else _ROUNDS)):
            for what, model, x in (("split", split, frame), ("bound", alone, part)):
                took = _seconds(model, x, device)
                if number >= 2:
                    times[what].append(took)
        taken, least = statistics.median(times["split"]), statistics.median(times["bound"])
        row: dict[str, Any] = {"network": name, "ranks": ranks, "seconds": taken, "bound_seconds": least}
        row["share_of_bound"] = least / taken
        if device.type == "cuda":
            row |= traced(split, frame, device)
        found.note(**row)
    return found


def _ddp(model: nn.Module, device: torch.device) -> nn.Module:
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def _step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, torch.bfloat16):
        out: Any = model(x)
    maps = [out] if isinstance(out, Tensor) else [out.last_hidden_state, out.pooler_output]
    loss = sum(each.float().square().mean() for each in maps)
    loss.backward()  # type: ignore[union-attr]


def _seconds(model: nn.Module, x: Tensor, device: torch.device) -> float:
    """Of the slowest rank."""
    wait_for(device)
    dist.barrier()
    started = time.perf_counter()
    _step(model, x)
    wait_for(device)
    return slowest(time.perf_counter() - started)


def traced(model: nn.Module, x: Tensor, device: torch.device) -> dict[str, float]:
    """How long messages take, and the share of it in which other kernels work."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        _step(model, x)
        wait_for(device)
    spans: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for event in profiled.profiler.kineto_results.events():
        if str(event.device_type()).endswith("CUDA"):
            spans["nccl" in event.name().lower()].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    messages, hidden = overlap(spans[True], spans[False])
    return {"message_seconds": messages / 1e9, "hidden_share": hidden / messages if messages else 1.0}


def overlap(messages: list[tuple[int, int]], others: list[tuple[int, int]]) -> tuple[int, int]:
    """Nanoseconds in which there are messages, and in which there is something else beside them; of (start, end)."""
    mine, its = _joined(messages), _joined(others)
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in mine for b in its)
    return sum(end - start for start, end in mine), both


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
