"""`python -m benchmarks.spatial_memory [--json]`: starts the processes one case after another, prints the ratios."""

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

from benchmarks import machine, show
from benchmarks.spatial_memory.measure import RANKS
from benchmarks.spatial_memory.models import CASES

TARGET = 0.52
# Every tensor beyond 64 KiB gets a mapping of its own and gives it back when freed. By default glibc raises that
# threshold up to 32 MiB as it goes, and then keeps freed tensors: the kernel would count what nobody uses.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def step_bytes(case: str, axis: str) -> list[int]:
    """What one step takes beyond the baseline, by rank; one number for axis "none"."""
    environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.spatial_memory.measure",
                    case,
                    axis,
                    str(rank),
                    f"{directory}/store",
                ],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1 if axis == "none" else RANKS)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{case}, split {axis}: a process failed; its traceback is above")
    results = [json_text.loads(output.splitlines()[-1]) for output in outputs]
    return [result["peak_bytes"] - result["baseline_bytes"] for result in results]


def measured() -> dict[str, Any]:
    """All cases: whole, then split along each axis."""
    rows = []
    for name, case in CASES.items():
        (whole,) = step_bytes(name, "none")
        for axis in ("height", "width"):
            ranks = step_bytes(name, axis)
            ratio = max(ranks) / whole
            rows.append(
                {
                    "model": name,
                    "shape": list(case.shape),
                    "axis": axis,
                    "one_process_bytes": whole,
                    "rank_bytes": ranks,
                    "ratio": ratio,
                    "target": TARGET,
                    "reached": ratio <= TARGET,
                }
            )
    return {"machine": machine(), "ranks": RANKS, "threads": 1, "allocator": ALLOCATOR, "rows": rows}


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(title="Peak memory of a forward and backward beyond the baseline, GiB", box=SIMPLE)
    for heading in ("model", "image", "split", "1 process", "rank 0", "rank 1", "ratio", "reached"):
        table.add_column(heading)
    for row in found["rows"]:
        reached = "[green]yes[/]" if row["reached"] else "[red]no[/]"
        table.add_row(
            row["model"],
            "x".join(map(str, row["shape"])),
            row["axis"],
            *(f"{value / 2**30:.3f}" for value in (row["one_process_bytes"], *row["rank_bytes"])),
            f"{row['ratio']:.3f}",
            f"{reached}, <= {row['target']:.2f}",
        )
    console.print(table)


def main(json: bool = False) -> None:
    """Peak memory of a rank of 2 over that of one process.

    Args:
        json: Print one JSON object and nothing else.
    """
    found = measured()
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
