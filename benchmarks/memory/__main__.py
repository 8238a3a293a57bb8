"""`python -m benchmarks.memory [--json]`: starts the processes one case after another, prints the peaks and ratios."""

import json as json_text
import os
import subprocess
import sys
import tempfile
from typing import Any

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import machine, reader, show
from benchmarks.memory.measure import BUDGET_BYTES, OPTIMIZERS, SHAPE, TECHNIQUES
from benchmarks.spatial_memory.__main__ import ALLOCATOR

RANKS = (1, 2)


def peaks(technique: str, optimizer: str, ranks: int) -> list[int]:
    """What training takes beyond the baseline, by rank."""
    environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as directory:
        arguments = [sys.executable, "-m", "benchmarks.memory.measure", technique, optimizer, str(ranks)]
        processes = [
            subprocess.Popen(
                [*arguments, str(rank), f"{directory}/store"], env=environment, stdout=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{technique}, {optimizer}, {ranks} ranks: a process failed; its traceback is above")
    results = [json_text.loads(output.splitlines()[-1]) for output in outputs]
    return [result["peak_bytes"] - result["baseline_bytes"] for result in results]


def measured(progress: Console) -> dict[str, Any]:
    """Every optimizer: plain PyTorch, then each technique on 1 and 2 ranks."""
    rows = []
    for optimizer in OPTIMIZERS:
        (plain,) = peaks("plain", optimizer, 1)
        progress.print(f"{optimizer}, plain: {plain / 2**30:.3f} GiB", highlight=False)
        for ranks in RANKS:
            for technique in TECHNIQUES:
                found = peaks(technique, optimizer, ranks)
                ratio = max(found) / plain
                rows.append(
                    {
                        "optimizer": optimizer,
                        "technique": technique,
                        "ranks": ranks,
                        "rank_bytes": found,
                        "plain_bytes": plain,
                        "ratio": ratio,
                    }
                )
                progress.print(f"{optimizer}, {technique}, {ranks} ranks: {ratio:.3f}", highlight=False)
    return {
        "machine": machine(),
        "shape": list(SHAPE),
        "budget_bytes": BUDGET_BYTES,
        "threads": 1,
        "allocator": ALLOCATOR,
        "rows": rows,
    }


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(title="Peak memory of a rank, ConvNeXt-tiny, two steps, GiB (over plain PyTorch's)", box=SIMPLE)
    for heading in ("optimizer", "plain", "ranks", *TECHNIQUES):
        table.add_column(heading)
    for optimizer in OPTIMIZERS:
        for ranks in RANKS:
            rows = [row for row in found["rows"] if (row["optimizer"], row["ranks"]) == (optimizer, ranks)]
            table.add_row(
                optimizer,
                f"{rows[0]['plain_bytes'] / 2**30:.3f}",
                str(ranks),
                *(f"{max(row['rank_bytes']) / 2**30:.3f} ({row['ratio']:.2f})" for row in rows),
            )
    console.print(table)


def main(json: bool = False) -> None:
    """Peak memory of training over techniques, optimizers and ranks, and its ratio to plain PyTorch.

    Args:
        json: Print one JSON object and nothing else.
    """
    found = measured(Console(stderr=True) if json else reader())
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
