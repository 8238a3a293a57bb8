"""`python -m benchmarks.scaling [--json] [--quick]`: data replicas against plain DDP."""

import json as json_text
import tempfile
from pathlib import Path
from typing import Any

import torch.multiprocessing
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import machine, show
from benchmarks.scaling.measure import on_rank

RANKS = (1, 2)
TARGET = 0.98


def measured(quick: bool) -> dict[str, Any]:
    """The findings of fresh ranks, one group after the other."""
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as directory:
            store, result = Path(directory, "store"), Path(directory, "result.json")
            options = (ranks, str(store), str(result), 5 if quick else 31)
            torch.multiprocessing.spawn(on_rank, args=options, nprocs=ranks)
            rows += json_text.loads(result.read_text())
    return {"machine": machine(), "threads": 1, "quick": quick, "target": TARGET, "rows": rows}


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(title="Images a second, a replica of one thread each", box=SIMPLE)
    for heading in (
        "network",
        "input of a replica",
        "replicas",
        "plain DDP",
        "fullframe",
        "share (quartiles)",
        "reached",
    ):
        table.add_column(heading)
    for row in found["rows"]:
        share = row["share_of_plain"]
        reached = "[green]yes[/]" if share["paired"] >= found["target"] else "[red]no[/]"
        table.add_row(
            row["network"],
            "x".join(map(str, row["shape"])),
            str(row["ranks"]),
            f"{row['plain_images_per_second']:.2f}",
            f"{row['images_per_second']:.2f}",
            f"{share['paired']:.3f} ({share['low']:.3f}-{share['high']:.3f})",
            f"{reached}, >= {found['target']:.2f}",
        )
    console.print(table)


def main(json: bool = False, quick: bool = False) -> None:
    """Training with data replicas against the same loop in plain PyTorch with DDP.

    Args:
        json: Print one JSON object and nothing else.
        quick: A few rounds only: for trying it, not for a number to keep.
    """
    show(measured(quick), print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
