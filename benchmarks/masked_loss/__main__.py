"""`python -m benchmarks.masked_loss [--json] [--quick]`: starts the ranks, prints what they found."""

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
from benchmarks.masked_loss.measure import RANKS, on_rank

TARGET = 1.3  # of the loss over all pixels, at most


def measured(quick: bool) -> dict[str, Any]:
    """The findings of a run on fresh ranks."""
    with tempfile.TemporaryDirectory() as directory:
        store, result = Path(directory, "store"), Path(directory, "result.json")
        torch.multiprocessing.spawn(on_rank, args=(str(store), str(result), quick), nprocs=RANKS)
        rows: list[dict[str, Any]] = json_text.loads(result.read_text())
    for row in rows:
        row["target"], row["reached"] = TARGET, row["split_over_all_pixels"]["median"] <= TARGET
    return {"machine": machine(), "ranks": RANKS, "threads": 1, "quick": quick, "rows": rows}


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(
        title="Forward and backward of a smooth L1 loss, milliseconds, split on width over 2 ranks", box=SIMPLE
    )
    for heading in (
        "network", "input", "valid", "all pixels", "mask", "where", "mask / all", f"<= {TARGET}",
        "1 process, mask / all", "speedup of mask",
    ):  # fmt: skip
        table.add_column(heading)
    for row in found["rows"]:
        kinds = ("all pixels", "mask", "where")
        table.add_row(
            row["network"],
            "x".join(map(str, row["shape"])),
            f"{row['share']:.0%}",
            *(f"{row['seconds'][f'split, {kind}'] * 1e3:.1f}" for kind in kinds),
            "{median:.2f} ({low:.2f}-{high:.2f})".format(**row["split_over_all_pixels"]),
            "[green]yes[/]" if row["reached"] else "[red]no[/]",
            f"{row['one_process_over_all_pixels']['median']:.2f}",
            f"{row['speedup']['median']:.2f}",
        )
    console.print(table)


def main(json: bool = False, quick: bool = False) -> None:
    """Time of a loss over the pixels of a mask.

    Args:
        json: Print one JSON object and nothing else.
        quick: A few rounds only: for trying it, not for a number to keep.
    """
    show(measured(quick), print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
