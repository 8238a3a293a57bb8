"""`python -m benchmarks.optimizers [--json]`: bytes per parameter of each optimizer, whole and spread over 2 ranks."""

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
from benchmarks.optimizers.measure import on_rank

OPTIMIZERS = ("sgd", "adamw", "adafactor", "adamw8bit")
SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "update_in_backward": (1, {"update_in_backward": True}),
    "2 ranks, shard_optimizer": (2, {"data": 2, "shard_optimizer": True}),
    "2 ranks, shard_parameters": (2, {"data": 2, "shard_parameters": True}),
}
PARTS = ("parameter", "gradient", "state", "temporary")


def measured() -> list[dict[str, Any]]:
    """A row for an optimizer and a way to spread it."""
    rows: list[dict[str, Any]] = []
    for spread, (ranks, options) in SPREAD.items():
        for optimizer in OPTIMIZERS:
            if (optimizer, options) == ("adafactor", {"data": 2, "shard_parameters": True}):
                continue  # which torch's Adafactor cannot
            with tempfile.TemporaryDirectory() as directory:
                store, result = str(Path(directory, "store")), Path(directory, "result.json")
                arguments = (ranks, store, str(result), {"optimizer": optimizer, **options})
                torch.multiprocessing.spawn(on_rank, args=arguments, nprocs=ranks)
                rows.append({"spread": spread, "optimizer": optimizer, **json_text.loads(result.read_text())})
    return rows


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(title="Bytes per parameter on a rank, ConvNeXt-tiny, float32", box=SIMPLE)
    for heading in ("", "optimizer", *PARTS, "all"):
        table.add_column(heading, justify="left" if heading in ("", "optimizer") else "right")
    before = ""
    for row in found["rows"]:
        values = [row[part] for part in PARTS]
        label = row["spread"] if row["spread"] != before else ""
        table.add_row(label, row["optimizer"], *(f"{value:.2f}" for value in (*values, sum(values))))
        before = row["spread"]
    console.print(table)


def main(json: bool = False) -> None:
    """What each optimizer keeps and needs, in bytes for each parameter of the model.

    Args:
        json: Print one JSON object and nothing else.
    """
    found = {"machine": machine(), "rows": measured()}
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
