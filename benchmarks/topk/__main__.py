"""The time of `torch.topk` (k = 300) over 20,000 split tokens, over that of plain torch's on the whole of them.

`python -m benchmarks.topk [--json] [--images 1] [--tokens 20000] [--k 300] [--rounds 50]`, on 2 gloo ranks of one
thread. Values are random, so no two are equal; "equal" is the same of numbers rounded to 16 bit, where whole rows have
to be sent. The ratio is of medians; every round times all variants in turn.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import fullframe as ff
from benchmarks.timing import Timed, interleaved, ratio

RANKS, CALLS = 2, 20


def measure(rank: int, folder: str, images: int, tokens: int, k: int, rounds: int) -> None:
    """On one rank: times each variant, and writes the ratios into `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
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
        with open(os.path.join(folder, "result.json"), "w") as file:
            json.dump(
                {"images": images, "tokens": side * 100, "k": k, "ranks": RANKS, "torch": torch.__version__, **found},
                file,
            )
    dist.destroy_process_group()


def best(x: Tensor, k: int) -> Callable[[], Any]:
    """What is timed: several calls, as after a barrier the ranks do not go on at the same moment."""
    return lambda: [torch.topk(x, k, dim=2) for _ in range(CALLS)]


def main() -> None:
    """Starts the ranks and prints what they measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--k", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=50)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (folder, chosen.images, chosen.tokens, chosen.k, chosen.rounds), RANKS)
        with open(os.path.join(folder, "result.json")) as file:
            found = json.load(file)
    if chosen.json:
        print(json.dumps(found))
        return
    for name in ("different", "equal"):
        times = found[name]
        print(
            f"{name} values: {times['split_microseconds']:.0f} us split over {RANKS} ranks, "
            f"{times['whole_microseconds']:.0f} us whole, ratio {times['ratio']['median']:.2f}"
        )


if __name__ == "__main__":
    main()
