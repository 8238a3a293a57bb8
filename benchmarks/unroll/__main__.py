"""`python -m benchmarks.unroll [--json] [--plot FILE]`: memory and time against the number of iterations."""

import json as json_text
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import machine, show
from benchmarks.unroll.measure import STATE_BYTES
from fullframe.techniques.unrolling.schedules import extra_runs

ON_STAGES = {"2 stages": "none", "2 stages, iterations": "iterations"}  # what each of two ranks recomputes
CHOICES = ("loop", "none", "iterations", "nested", "6", "3", "1", *ON_STAGES)  # a number: so many states are kept
_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed goes back to the kernel, as the count is the kernel's


def measured(counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for a choice and a number of iterations, each from a process of its own."""
    rows = []
    for choice in CHOICES:
        for count in counts if choice not in ON_STAGES else counts[1:]:
            states = min(int(choice), count) if choice.isdigit() else None
            theory = None if states is None else count + extra_runs(count, states)
            found = _on_two_ranks(count, choice) if choice in ON_STAGES else _in_one_process(count, choice)
            rows.append({"choice": choice, "iterations": count, "runs_in_theory": theory, **found})
    return rows


def _command(count: int, choice: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.unroll.measure", str(count), choice]


def _in_one_process(count: int, choice: str) -> dict[str, Any]:
    environment = {**os.environ, **_MAPPED}
    done = subprocess.run(_command(count, choice), check=True, capture_output=True, text=True, env=environment)
    return json_text.loads(done.stdout)  # type: ignore[no-any-return]


def _on_two_ranks(count: int, choice: str) -> dict[str, Any]:
    """Of the rank that holds more; the seconds are that one's too."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [*_command(count, ON_STAGES[choice]), str(rank), f"{folder}/store"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **_MAPPED},
            )
            for rank in range(2)
        ]
        found = [json_text.loads(rank.communicate()[0]) for rank in ranks]
    return max(found, key=lambda each: each["peak_bytes"])  # type: ignore[no-any-return]


def _named(choice: str) -> str:
    return f"{choice} state{'s' * (choice != '1')}" if choice.isdigit() else choice


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    size = STATE_BYTES >> 20
    title = f"Peak MiB above the start (a state has {size}), CPU seconds over the plain loop's, runs of the block"
    table = Table(title=title, box=SIMPLE)
    counts = sorted({row["iterations"] for row in found["rows"]})
    for heading in ("kept", *(f"{count} iterations" for count in counts)):
        table.add_column(heading, justify="right")
    at = {(row["choice"], row["iterations"]): row for row in found["rows"]}
    for choice in CHOICES:
        cells = []
        for count in counts:
            if (choice, count) not in at:
                cells.append("")
                continue
            row, loop = at[choice, count], at["loop", count]
            cells.append(f"{row['peak_bytes'] / 2**20:.0f} {row['seconds'] / loop['seconds']:.2f} {row['runs']}")
        table.add_row(_named(choice), *cells)
    console.print(table)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Memory and time against iterations, as a picture."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for choice in CHOICES:
        line = [row for row in rows if row["choice"] == choice]
        label = _named(choice)
        counts = [row["iterations"] for row in line]
        left.plot(counts, [row["peak_bytes"] / 2**20 for row in line], marker="o", label=label)
        right.plot(counts, [row["seconds"] for row in line], marker="o", label=label)
    left.set(xlabel="iterations", ylabel="peak MiB above the start")
    right.set(xlabel="iterations", ylabel="CPU seconds of a forward and backward pass")
    left.legend()
    figure.savefig(file, dpi=120)


def main(json: bool = False, plot: Path | None = None, iterations: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> None:
    """Memory and time of unrolled iterations, by what is kept for backward.

    Args:
        json: Print one JSON object and nothing else.
        plot: Draw the findings into this file too (png, svg or pdf); needs matplotlib.
        iterations: Numbers of iterations.
    """
    found = {"machine": machine(), "state_bytes": STATE_BYTES, "rows": measured(iterations)}
    show(found, print_table, json)
    if plot is not None:
        draw(found["rows"], plot)


if __name__ == "__main__":
    tyro.cli(main)
