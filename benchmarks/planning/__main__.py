"""`python -m benchmarks.planning [--json]`: plans of a large model by the clock, plans of a small one against runs."""

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
from benchmarks.planning.measure import HERE, Run, environment, planned, trained
from fullframe.planning.plan import plan
from fullframe.planning.ranking import winner
from fullframe.planning.search import weight
from fullframe.recipe import load_recipe
from fullframe.simulation.clock.timed_ops import Timings
from fullframe.simulation.devices.table import parse_cluster
from fullframe.simulation.simulate import simulate
from fullframe.strategy import Strategy, describe

CLUSTERS = ("4xV100-16GB", "8xA100-80GB", "1xT4")
GIB = 2**30
PARTS = ("to_half", "to_quarter", "aggregate", "refine")  # of the stereo network, which repeats no block
RECOMPUTED = {"recompute": "blocks", "recompute_modules": PARTS}
STRATEGIES = (
    Strategy(width=2),
    Strategy(height=2),
    Strategy(),
    Strategy(width=2, **RECOMPUTED),
    Strategy(height=2, **RECOMPUTED),
    Strategy(**RECOMPUTED),
    Strategy(width=2, shard_optimizer=True),
    Strategy(width=2, shard_parameters=True),
)
PLAN_SECONDS, SIMULATION_SECONDS, NEAR = 60.0, 3.0, 1.15


def against_runs(limit_gib: float, steps: int, cache: Path) -> dict[str, Any]:
    """The stereo example on 2 ranks of this CPU: the plan within a limit, and strategies predicted and run."""
    subprocess.run([sys.executable, "-m", "fullframe.cli", "calibrate", "--processes", "2"], check=True,
                   env=environment(cache), stdout=subprocess.DEVNULL)  # fmt: skip
    os.environ["XDG_CACHE_HOME"] = str(cache)
    recipe, limit = load_recipe(HERE / "stereo.py"), int(limit_gib * GIB)
    best = winner(plan(recipe, "2xcpu", memory_limit_bytes=limit, precisions=["fp32"]))
    if best is None:
        raise SystemExit(f"nothing fits in {limit_gib} GiB; give a larger --limit-gib")
    cluster, timings = parse_cluster("2xcpu"), Timings()
    strategies = list(dict.fromkeys((best.strategy, *STRATEGIES)))
    # In turns, and the better of two runs counts: a shared machine is slower for minutes at a time.
    runs = [trained(strategy, steps, cache) for _ in range(2) for strategy in strategies]
    rows = []
    for number, strategy in enumerate(strategies):
        prediction = simulate(recipe, strategy, cluster, timings=timings)
        both = runs[number :: len(strategies)]
        run = Run(min(one.step_seconds for one in both), max(one.process_bytes for one in both))
        rows.append(
            {
                "strategy": describe(strategy),
                "predicted_fits": prediction.device_bytes <= limit,
                "fits": run.process_bytes <= limit,
                "predicted_bytes": prediction.device_bytes,
                "bytes": run.process_bytes,
                "predicted_seconds": prediction.step_seconds,
                "rank": prediction.step_seconds * weight(strategy),  # as the plan has it: of equals the simpler one
                "seconds": run.step_seconds,
            }
        )
    fitting = [row for row in rows if row["predicted_fits"] and row["fits"]]
    fastest = min(row["seconds"] for row in fitting)
    first = min(fitting, key=lambda row: row["rank"])
    return {
        "limit_bytes": limit,
        "winner": rows[0]["strategy"],
        "winner_runs_within_the_limit": rows[0]["fits"],
        "strategies_that_fit": len(fitting),
        "predicted_to_fit_and_do_not": sum(row["predicted_fits"] and not row["fits"] for row in rows),
        "fastest_predicted": first["strategy"],
        "over_the_fastest_measured": first["seconds"] / fastest,
        "reached": rows[0]["fits"] and len(fitting) >= 6 and first["seconds"] <= NEAR * fastest,
        "rows": rows,
    }


def print_tables(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(title="fullframe plan, ConvNeXt-XL, 7 frames of 512 x 2048", box=SIMPLE)
    for heading in (
        "GPUs",
        "seconds",
        "one simulation",
        "strategies",
        "simulated",
        "winner",
        "GiB",
        "s a step",
        "reached",
    ):
        table.add_column(heading)
    for row in found["plans"]:
        numbers = (f"{row['gib']:.1f}", f"{row['step_seconds']:.3g}")
        in_time = row["seconds"] <= PLAN_SECONDS and row["simulation_seconds"] <= SIMULATION_SECONDS
        reached = "[green]yes[/]" if in_time else "[red]no[/]"
        times = f"{row['seconds']:.0f}", f"{row['simulation_seconds']:.1f}"
        counts = str(row["strategies"]), str(row["simulated"])
        table.add_row(row["gpus"], *times, *counts, row["winner"], *numbers, reached)
    console.print(table)
    stereo = found["stereo"]
    if stereo is None:
        return
    table = Table(title=f"stereo example, 2 ranks, {stereo['limit_bytes'] / GIB:.2f} GiB each", box=SIMPLE)
    for heading in ("strategy", "GiB predicted", "measured", "s a step predicted", "measured", "fits"):
        table.add_column(heading)
    for row in stereo["rows"]:
        figures = (row["predicted_bytes"] / GIB, row["bytes"] / GIB, row["predicted_seconds"], row["seconds"])
        table.add_row(row["strategy"], *(f"{figure:.3f}" for figure in figures), "yes" if row["fits"] else "no")
    console.print(table)
    console.print(
        f"winner: {stereo['winner']}; fastest predicted of {stereo['strategies_that_fit']} that fit: "
        f"{stereo['fastest_predicted']}, {stereo['over_the_fastest_measured']:.2f} of the fastest measured; "
        f"{'reached' if stereo['reached'] else 'not reached'}"
    )


def main(json: bool = False, limit_gib: float = 1.25, steps: int = 13, plans: bool = True, stereo: bool = True) -> None:
    """How long planning takes, and whether what it says of a CPU is so.

    Args:
        json: Print one JSON object and nothing else.
        limit_gib: What one rank of the stereo example may use.
        steps: Optimizer steps of each run.
        plans: Plan the large model.
        stereo: Run the small one.
    """
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        found = {
            "machine": machine(),
            "plans": [planned(gpus, cache) for gpus in CLUSTERS] if plans else [],
            "stereo": against_runs(limit_gib, steps, cache) if stereo else None,
        }
    show(found, print_tables, json)


if __name__ == "__main__":
    tyro.cli(main)
