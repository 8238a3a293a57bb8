"""`python -m benchmarks.prediction [--json] [--only N ...]`: predicts, then measures, case after case."""

import json as json_text
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import machine, reader, show
from benchmarks.prediction.cases import CASES, Case
from fullframe.simulation.simulate import simulate

MEDIAN_TARGET, WORST_TARGET = 0.02, 0.06
_COUNTER = Path(__file__).with_name("allocations.c")


def measured(number: int) -> list[int]:
    """The real peak of each rank."""
    with tempfile.TemporaryDirectory() as directory:
        counter = f"{directory}/allocations.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", counter, _COUNTER, "-ldl"], check=True)
        command = [sys.executable, "-m", "benchmarks.prediction.measure", str(number)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), f"{directory}/store"],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "LD_PRELOAD": counter},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(CASES[number].strategy.ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"case {number}, {CASES[number]}: a process failed; its traceback is above")
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("{")]
    return [json_text.loads(line)["peak_bytes"] for line in lines]


def compared(number: int, case: Case) -> dict[str, Any]:
    """The rank whose prediction is furthest off."""
    warnings.filterwarnings("ignore")
    start = time.process_time()
    found = [simulate(case.recipe, case.strategy, "cpu", rank=rank) for rank in range(case.strategy.ranks)]
    predicted = [max(each.peak_bytes for each in (one, one.evaluation) if each is not None) for one in found]
    seconds = (time.process_time() - start) / case.strategy.ranks
    pairs = list(zip(predicted, measured(number), strict=True))
    predicted_bytes, measured_bytes = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return {
        "case": number,
        "model": case.model,
        "technique": case.technique,
        "predicted_bytes": predicted_bytes,
        "measured_bytes": measured_bytes,
        "error": predicted_bytes / measured_bytes - 1,
        "simulation_seconds": seconds,
    }


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(title="Peak of what torch has allocated on a rank in two steps and an evaluation, MiB", box=SIMPLE)
    for heading in ("", "model", "technique", "predicted", "measured", "error", "simulated in, s"):
        table.add_column(heading)
    for row in found["rows"]:
        table.add_row(
            str(row["case"]),
            row["model"],
            row["technique"],
            f"{row['predicted_bytes'] / 2**20:.1f}",
            f"{row['measured_bytes'] / 2**20:.1f}",
            f"{row['error']:+.2%}",
            f"{row['simulation_seconds']:.1f}",
        )
    console.print(table)
    console.print(
        f"error: median {found['median_error']:.2%} (target {MEDIAN_TARGET:.0%}), "
        f"worst {found['worst_error']:.2%} (target {WORST_TARGET:.0%}), most below what was measured "
        f"{found['most_below']:.2%}",
        highlight=False,
    )


def main(json: bool = False, only: tuple[int, ...] = ()) -> None:
    """Predicted against measured peak memory.

    Args:
        json: Print one JSON object and nothing else.
        only: Numbers of the cases to take; all without.
    """
    console = reader()
    rows = []
    for number, case in enumerate(CASES):
        if only and number not in only:
            continue
        rows.append(compared(number, case))
        if not json:
            console.print(f"{number} {case.model}, {case.technique}: {rows[-1]['error']:+.2%}", highlight=False)
    errors = [row["error"] for row in rows]
    found = {
        "machine": machine(),
        "rows": rows,
        "median_error": median(map(abs, errors)),
        "worst_error": max(map(abs, errors)),
        "most_below": max(0.0, -min(errors)),
    }
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
