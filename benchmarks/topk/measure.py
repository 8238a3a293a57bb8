"""The part that runs on the 2 ranks: `torch.topk` of split tokens and of the whole of them, timed in turn."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fullframe as ff
from benchmarks.timing import Timed, interleaved, ratio

RANKS, CALLS = 2, 20


def on_rank(rank: int, store: str, result: str, images: int, tokens: int, k: int, rounds: int) -> None:
    """On one rank: times each variant; rank 0 leaves its findings as JSON in the file `result`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    mesh = ff.init_mesh(height=RANKS)
    side = tokens // 100
    x = torch.randn(images, 1, side, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    variants = []
    for name, whole in (("different", x), ("equal", x.bfloat16())):
        split = ff.shard(whole, mesh).flatten(2)
        plain = whole.flatten(2)
        assert all(map(torch.equal, split.topk(k), plain.topk(k)))
        variants += [Timed(f"{name}: split", best(split, k)), Timed(f"{name}: whole", best(plain, k))]
    seconds = interleaved(variants, rounds, lambda: None)
    if rank == 0:
        found = {
            name: {
                "split_microseconds": 1e6 / CALLS * sorted(seconds[f"{name}: split"])[rounds // 2],
                "whole_microseconds": 1e6 / CALLS * sorted(seconds[f"{name}: whole"])[rounds // 2],
                "ratio": ratio(seconds[f"{name}: split"], seconds[f"{name}: whole"]),
            }
            for name in ("different", "equal")
        }
        Path(result).write_text(json.dumps({"images": images, "tokens": side * 100, "k": k, "ranks": RANKS, **found}))
    dist.destroy_process_group()


def best(x: Tensor, k: int) -> Callable[[], Any]:
    """What is timed: several calls, as after a barrier the ranks do not go on at the same moment."""
    return lambda: [torch.topk(x, k, dim=2) for _ in range(CALLS)]
