"""`python -m benchmarks.spatial_efficiency [--json] [--quick]`: starts the ranks, prints what they found."""

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
from benchmarks.spatial_efficiency.measure import CASES, RANKS, on_rank

STEP_TARGETS = dict(zip(CASES, (0.94, 0.87), strict=False))  # share of the bound, at least
OPERATOR_TARGETS = {"relu": 6.0, "add": 6.0, "conv 1x1": 20.0}  # microseconds over plain torch, at most


def measured(quick: bool) -> dict[str, Any]:
    """The findings of a run on fresh ranks."""
    with tempfile.TemporaryDirectory() as directory:
        store, result = Path(directory, "store"), Path(directory, "result.json")
        torch.multiprocessing.spawn(on_rank, args=(str(store), str(result), quick), nprocs=RANKS)
        found: dict[str, Any] = json_text.loads(result.read_text())
    for row in found["steps"]:
        target = row["target"] = STEP_TARGETS.get((row["network"], tuple(row["shape"])))
        row["reached"] = None if target is None else row["share_of_bound"]["median"] >= target
    for row in found["operators"]:
        limit = row["target_microseconds"] = OPERATOR_TARGETS.get(row["name"])
        row["reached"] = None if limit is None else row["overhead_microseconds"] <= limit
    return {"machine": machine(), "ranks": RANKS, "threads": 1, "quick": quick, **found}


def spread(value: dict[str, float]) -> str:
    """A ratio and its quartiles."""
    return f"{value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def verdict(reached: bool, target: str) -> str:
    """Whether a target was reached, and which."""
    return f"[green]yes[/], {target}" if reached else f"[red]no[/], {target}"


def print_tables(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader: steps first, then single operators."""
    console.print(found["machine"], highlight=False)
    steps = Table(title="Forward and backward with DDP, 2 ranks of one thread", box=SIMPLE)
    for heading in ("network", "input", "split", "1 process", "bound", "split", "speedup", "share of bound", "reached"):
        steps.add_column(heading)
    for row in found["steps"]:
        steps.add_row(
            row["network"],
            "x".join(map(str, row["shape"])),
            row["axis"],
            *(f"{row[key]:.3f} s" for key in ("one_process_seconds", "bound_seconds", "split_seconds")),
            f"{row['speedup']['median']:.2f}",
            spread(row["share_of_bound"]),
            "" if row["target"] is None else verdict(row["reached"], f">= {row['target']:.2f}"),
        )
    console.print(steps)
    table = Table(title="One operator on a tiny tensor, microseconds a call", box=SIMPLE)
    for heading in ("operator", "plain", "split", "over plain", "reached", "over plain with backward"):
        table.add_column(heading)
    for row in found["operators"]:
        target = row["target_microseconds"]
        table.add_row(
            row["name"],
            f"{row['plain_microseconds']:.1f}",
            f"{row['split_microseconds']:.1f}",
            f"{row['overhead_microseconds']:.1f}",
            "" if target is None else verdict(row["reached"], f"<= {target:.0f}"),
            f"{row['overhead_with_backward_microseconds']:.1f}",
        )
    console.print(table)


def main(json: bool = False, quick: bool = False) -> None:
    """Time of a split step against one process and against the bound.

    Args:
        json: Print one JSON object and nothing else.
        quick: A few rounds only: for trying it, not for a number to keep.
    """
    found = measured(quick)
    show(found, print_tables, json)


if __name__ == "__main__":
    tyro.cli(main)
