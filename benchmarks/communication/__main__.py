"""`python -m benchmarks.communication [--json]`: counts what a step sends, beside the fewest bytes possible."""

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
from benchmarks.communication.measure import SHAPE, on_rank

RANKS = (2, 4)


def measured() -> list[dict[str, Any]]:
    """A row for a model and a number of ranks."""
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as directory:
            store, result = str(Path(directory, "store")), Path(directory, "result.json")
            torch.multiprocessing.spawn(on_rank, args=(ranks, store, str(result)), nprocs=ranks)
            rows += json_text.loads(result.read_text())
    return rows


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    shape = "x".join(map(str, SHAPE))
    table = Table(
        title=f"Bytes sent in a step by all ranks together, {shape}, float32, split along the width", box=SIMPLE
    )
    for heading in ("model", "ranks", "ops that borrow", "messages", "minimum", "ratio", "statistics", "parameters"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for line in found["rows"]:
        exact = line["message_bytes"] == line["minimum_bytes"]
        table.add_row(
            line["model"],
            str(line["ranks"]),
            f"{line['borrowing_ops']} of {line['ops']}",
            f"{line['message_bytes']:,}",
            f"{line['minimum_bytes']:,}",
            f"[{'green' if exact else 'red'}]{line['ratio']:.4f}[/]",
            f"{line['statistics_bytes'] + line['broadcast_bytes']:,}",
            f"{line['parameter_bytes']:,}",
        )
    console.print(table)


def main(json: bool = False) -> None:
    """Bytes a split step sends against the fewest its windows allow.

    Args:
        json: Print one JSON object and nothing else.
    """
    found = {"machine": machine(), "shape": list(SHAPE), "rows": measured()}
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
