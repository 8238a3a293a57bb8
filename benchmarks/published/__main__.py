"""`python -m benchmarks.published [--json]`: what was published, and what a simulation says of the same set-up."""

import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any, Literal

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import machine, show
from benchmarks.published.figures import FIGURES, GIB, Figure
from benchmarks.published.models import inputs_of_softmax_kept
from benchmarks.published.times import DURATIONS, Duration
from fullframe.recipe import Recipe
from fullframe.simulation.simulate import simulate


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
    """One row of memory."""
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
    """One row of time."""
    seconds = simulate(duration.make(), duration.strategy, duration.device).step_seconds
    return {
        "name": duration.name,
        "device": duration.device,
        "precision": duration.strategy.precision,
        "channels_last": duration.channels_last,
        "published_seconds": duration.seconds,
        "predicted_seconds": seconds,
        "error": seconds / duration.seconds - 1,
        "use": duration.use,
        "source": duration.source,
    }


def median_errors(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The median of the errors without their signs, by what the rows were used for."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        errors[row.get("use", "held against")].append(abs(row["error"]))
    return {use: median(found) for use, found in errors.items()}


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    if found["rows"]:
        table = Table("set-up", "measure", "published", "predicted", "error", "left open", box=SIMPLE)
        table.title = "Peak memory, GiB"
        for row in found["rows"]:
            others = (f"{assumed}: {bytes / GIB:.2f}" for assumed, bytes in row["others"].items())
            numbers = (f"{row[f'{of}_bytes'] / GIB:.2f}" for of in ("published", "predicted"))
            table.add_row(row["name"], row["measure"], *numbers, f"{row['error']:+.1%}", ", ".join(others))
        console.print(table)
    if found["durations"]:
        table = Table("set-up", "device", "precision", "layout", "published", "predicted", "error", "", box=SIMPLE)
        table.title = "Step, ms"
        for row in found["durations"]:
            layout = "channels last" if row["channels_last"] else ""
            numbers = (f"{row[f'{of}_seconds'] * 1e3:.1f}" for of in ("published", "predicted"))
            use = "" if row["use"] == "held against" else row["use"]
            table.add_row(row["name"], row["device"], row["precision"], layout, *numbers, f"{row['error']:+.1%}", use)
        console.print(table)
    for what, errors in found["median_errors"].items():
        said = ", ".join(f"{use} {error:.1%}" for use, error in errors.items())
        console.print(f"median error of {what}: {said}", highlight=False)


def main(json: bool = False, what: Literal["all", "memory", "time"] = "all", only: tuple[int, ...] = ()) -> None:
    """Predicted against published peak memory and step times.

    Args:
        json: Print one JSON object and nothing else.
        what: Memory, time, or both.
        only: Numbers of the figures to take; all without.
    """
    warnings.filterwarnings("ignore")
    console = Console(stderr=True)

    def chosen(figures: list[Any], wanted: str) -> list[Any]:
        taken = [figure for number, figure in enumerate(figures) if not only or number in only]
        return taken if what in ("all", wanted) else []

    rows = [compared(figure) for figure in track(chosen(FIGURES, "memory"), "memory", console=console)]
    durations = [timed(duration) for duration in track(chosen(DURATIONS, "time"), "time", console=console)]
    errors = {"memory": median_errors(rows), "time": median_errors(durations)}
    found = {"machine": machine(), "rows": rows, "durations": durations, "median_errors": errors}
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
