"""`python -m benchmarks.published [--json]`: what was published, and what a simulation says of the same set-up."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import machine, show
from benchmarks.published.figures import DURATIONS, FIGURES, GIB, Duration, Figure
from benchmarks.published.models import inputs_of_softmax_kept
from fullframe.recipe import Recipe
from fullframe.simulation.simulate import simulate

TARGET = 0.05


def predicted(figure: Figure, make: Callable[[], Recipe]) -> int:
    """Bytes by the figure's own measure."""
    with inputs_of_softmax_kept() if figure.softmax_keeps_input else nullcontext():
        told = simulate(make(), figure.strategy, figure.device, without=("prefetched_batch",))
    context = told.terms["context"] if figure.context_bytes is None else figure.context_bytes
    by_measure = {
        "allocated": told.peak_bytes,
        "reserved": told.reserved_bytes,
        "device": told.reserved_bytes + context,
    }
    return by_measure[figure.measure] + figure.extra_bytes(told.parameters)


def compared(figure: Figure) -> dict[str, Any]:
    """One row."""
    bytes = predicted(figure, figure.make)
    others = {assumed: predicted(figure, make) for assumed, make in figure.others.items()}
    return {
        "name": figure.name,
        "measure": figure.measure,
        "published_bytes": figure.published_bytes,
        "predicted_bytes": bytes,
        "error": bytes / figure.published_bytes - 1,
        "source": figure.source,
        "assumed": figure.assumed,
        "others": others,
    }


def timed(duration: Duration) -> dict[str, Any]:
    """Seconds of a step for each set-up that the source leaves open."""
    told = {
        name: simulate(duration.make(), strategy, duration.device) for name, strategy in duration.strategies.items()
    }
    return {
        "name": duration.name,
        "published_seconds": duration.published_seconds,
        "predicted_seconds": {name: prediction.step_seconds for name, prediction in told.items()},
        "source": duration.source,
        "assumed": duration.assumed,
    }


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(title="Peak memory, GiB", box=SIMPLE)
    for heading in ("set-up", "measure", "published", "predicted", "error", "left open"):
        table.add_column(heading)
    for row in found["rows"]:
        table.add_row(
            row["name"],
            row["measure"],
            f"{row['published_bytes'] / GIB:.2f}",
            f"{row['predicted_bytes'] / GIB:.2f}",
            f"{row['error']:+.1%}",
            ", ".join(f"{assumed}: {bytes / GIB:.2f}" for assumed, bytes in row["others"].items()),
        )
    console.print(table)
    for row in found["durations"]:
        said = ", ".join(f"{precision}: {seconds:.3f}" for precision, seconds in row["predicted_seconds"].items())
        console.print(
            f"{row['name']}: {row['published_seconds']} s a step published; predicted {said}", highlight=False
        )
    console.print(f"median error {found['median_error']:.1%} (target {TARGET:.0%})", highlight=False)


def main(json: bool = False, only: tuple[int, ...] = ()) -> None:
    """Predicted against published peak memory.

    Args:
        json: Print one JSON object and nothing else.
        only: Numbers of the figures to take; all without.
    """
    warnings.filterwarnings("ignore")
    rows = [compared(figure) for number, figure in enumerate(FIGURES) if not only or number in only]
    durations = [timed(duration) for duration in DURATIONS] if not only else []
    found = {
        "machine": machine(),
        "rows": rows,
        "durations": durations,
        "median_error": median(abs(row["error"]) for row in rows),
    }
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
