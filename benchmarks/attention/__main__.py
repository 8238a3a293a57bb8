"""`python -m benchmarks.attention [--json]`: bytes kept for backward, and step time, of a vision transformer."""

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
from benchmarks.attention.measure import on_rank

RANKS = (1, 2, 4)


def measured(sides: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for a kind of attention, a number of tokens and a number of ranks, with its shares of one process's."""
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as directory:
            store, result = str(Path(directory, "store")), Path(directory, "result.json")
            torch.multiprocessing.spawn(on_rank, args=(ranks, sides, store, str(result)), nprocs=ranks)
            rows += json_text.loads(result.read_text())
    alone = {(line["attention"], line["tokens"]): line for line in rows if line["ranks"] == 1}
    for line in rows:
        one = alone[line["attention"], line["tokens"]]
        line["share"], line["time"] = line["kept_bytes"] / one["kept_bytes"], line["seconds"] / one["seconds"]
    return rows


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(title="Kept for backward by a rank, and a step's time, over one process in plain torch", box=SIMPLE)
    for heading in ("attention", "tokens", "ranks", "kept MiB", "share", "time"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for line in found["rows"]:
        kept = f"{line['kept_bytes'] / 2**20:.1f}"
        numbers = (f"{line['tokens']:,}", str(line["ranks"]), kept, f"{line['share']:.3f}", f"{line['time']:.2f}")
        table.add_row(line["attention"], *numbers)
    console.print(table)


def main(json: bool = False, sides: tuple[int, ...] = (32, 48)) -> None:
    """What attention of split tokens keeps, and how long it takes.

    Args:
        json: Print one JSON object and nothing else.
        sides: Square roots of the numbers of tokens.
    """
    found = {"machine": machine(), "rows": measured(sides)}
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
