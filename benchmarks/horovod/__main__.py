"""`python -m benchmarks.horovod [--json] [--rounds 200] [--steps 12]`: over `dist.all_reduce`, and over DDP.

Two gloo ranks of one thread. Every round times all variants in turn; a ratio is of medians.
"""

import json as json_text
import tempfile
from pathlib import Path
from typing import Any

import torch.multiprocessing
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import machine, show
from benchmarks.horovod.measure import RANKS, on_rank


def measured(rounds: int, steps: int, networks: tuple[str, ...]) -> dict[str, Any]:
    """The findings of a run on fresh ranks."""
    with tempfile.TemporaryDirectory() as directory:
        store, result = str(Path(directory, "store")), Path(directory, "result.json")
        torch.multiprocessing.spawn(on_rank, args=(store, str(result), rounds, steps, networks), nprocs=RANKS)
        return {"machine": machine(), **json_text.loads(result.read_text())}


def print_tables(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(
        "allreduce",
        "hvd.allreduce_",
        "dist.all_reduce",
        "ratio",
        "quartiles",
        "fastest tenth",
        title=f"{RANKS} ranks, gloo",
    )
    for row in found["allreduce"]:
        times = [f"{1e6 * row[name]:.0f} us" for name in ("hvd_seconds", "dist_seconds")]
        table.add_row(row["size"], *times, *_words(row["ratio"]), f"{row['fastest_ratio']:.3f}")
    console.print(table)
    table = Table(
        "network",
        "DistributedOptimizer",
        "DDP",
        "speed over DDP",
        "quartiles",
        "fastest tenth",
        title="images a second",
    )
    for row in found["training"]:
        rates = [f"{row[name]:.2f}" for name in ("hvd_images_per_second", "ddp_images_per_second")]
        table.add_row(row["network"], *rates, *_words(row["ratio"]), f"{row['fastest_ratio']:.3f}")
    console.print(table)


def _words(ratio: dict[str, float]) -> tuple[str, str]:
    return f"{ratio['median']:.3f}", f"{ratio['low']:.3f} {ratio['paired']:.3f} {ratio['high']:.3f}"


def main(
    json: bool = False, rounds: int = 200, steps: int = 12, networks: tuple[str, ...] = ("resnet50", "convnext_tiny")
) -> None:
    """Time of Horovod's allreduce over torch's, and of a step with DistributedOptimizer over one with DDP.

    Args:
        json: Print one JSON object and nothing else.
        rounds: How often every allreduce is timed.
        steps: How many steps of every variant are timed.
        networks: Functions of `benchmarks.networks`.
    """
    show(measured(rounds, steps, networks), print_tables, json)


if __name__ == "__main__":
    tyro.cli(main)
