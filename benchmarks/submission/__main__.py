"""`python -m benchmarks.submission [--json] [--runs 300]`: `launch --sweep` and `jobs` on a real Slurm.

The cluster is the tests' own, on this machine; no run is started, as the jobs are held. Needs root and slurm-wlm.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from benchmarks import machine, show
from tests.launching.cluster import cluster, why_not


def measured(runs: int, rounds: int) -> dict[str, Any]:
    """Seconds of each command, as a user waits for it; the starts of Python and of the imports are in it."""
    if why_not():
        raise SystemExit(f"no Slurm can be started here: {why_not()}")
    found: dict[str, list[float]] = {"launch_seconds": [], "jobs_seconds": [], "help_seconds": []}
    with cluster() as slurm, tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.py").write_text("def recipe(lr): ...\n")

        def timed(name: str, *words: str) -> str:
            started = time.monotonic()
            command = [sys.executable, "-m", "fullframe", *words]
            done = subprocess.run(
                command, cwd=folder, env={**os.environ, **slurm.environment}, check=True, capture_output=True, text=True
            )
            found[name].append(time.monotonic() - started)
            return done.stdout

        sweep = "lr=" + ",".join(map(str, range(runs)))
        for number in range(rounds):
            words = ["launch", "job.py", "--on", "slurm", "--sweep", sweep, "--run-dir", f"sweep{number}"]
            timed("launch_seconds", *words, "--sbatch", "hold")
            shown = timed("jobs_seconds", "jobs", f"sweep{number}")
            if f"{runs} runs: {runs} pending" not in shown:
                raise SystemExit(f"not all runs are shown:\n{shown}")
            timed("help_seconds", "--help")
    return {"machine": machine(), "runs": runs, **{name: min(seconds) for name, seconds in found.items()}}


def print_lines(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    console.print(
        f"{found['runs']} runs: submitted in {found['launch_seconds']:.2f} s, shown in {found['jobs_seconds']:.2f} s; "
        f"fullframe --help takes {found['help_seconds']:.2f} s",
        highlight=False,
    )


def main(json: bool = False, runs: int = 300, rounds: int = 3) -> None:
    """Time of a sweep's submission and of its table.

    Args:
        json: Print one JSON object and nothing else.
        runs: Runs of the sweep.
        rounds: How often all is timed; the least counts.
    """
    show(measured(runs, rounds), print_lines, json)


if __name__ == "__main__":
    tyro.cli(main)
