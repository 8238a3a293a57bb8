"""`python -m benchmarks.compile [--json] [--quick]`: starts the ranks, prints what they found."""

import json as json_text
import os
import tempfile
from pathlib import Path
from typing import Any

import torch.multiprocessing
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import machine, show
from benchmarks.compile.measure import AXIS, RANKS, RATIOS, on_rank

TARGETS = {"large": 0.93, "small": 0.85}  # share of the compiled bound, at least
START_TARGET = 15.0  # seconds, of the second start


def ranks_found(cases: dict[str, int]) -> dict[str, Any]:
    """The findings of fresh ranks: of so many rounds of each case, or of its start where that is 0."""
    with tempfile.TemporaryDirectory() as directory:
        store, result = Path(directory, "store"), Path(directory, "result.json")
        torch.multiprocessing.spawn(on_rank, args=(str(store), str(result), cases), nprocs=RANKS)
        found: dict[str, Any] = json_text.loads(result.read_text())
    return found


def measured(quick: bool) -> dict[str, Any]:
    """First start with an empty cache, second start, then the steps, which find their programs in the cache."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        starts = [ranks_found({"small": 0})["small"] for _ in range(2)]
        steps = ranks_found({"small": 3} if quick else {"small": 31, "large": 15})
    for name, row in steps.items():
        row["target"] = TARGETS[name]
        row["reached"] = row["ratios"]["share_of_compiled_bound"]["median"] >= TARGETS[name]
    return {
        "machine": machine(), "ranks": RANKS, "threads": 1, "axis": AXIS, "quick": quick,
        "starts": starts, "second_start_reached": starts[1]["seconds"] <= START_TARGET, "steps": steps,
    }  # fmt: skip


def print_tables(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    table = Table(title=f"ConvNeXt-tiny, forward and backward, 2 ranks of one thread, split {AXIS}", box=SIMPLE)
    for heading in ("", *found["steps"]):
        table.add_column(heading)
    rows = list(found["steps"].values())
    table.add_row("input", *("x".join(map(str, row["shape"])) for row in rows))
    for name in rows[0]["seconds"]:
        table.add_row(f"{name}, s", *(f"{row['seconds'][name]:.3f}" for row in rows))
    for name in RATIOS:
        values = ((row["ratios"][name], row["processor_ratios"][name]) for row in rows)
        cells = (f"{of['median']:.2f} ({of['low']:.2f}-{of['high']:.2f}), {spent:.2f}" for of, spent in values)
        table.add_row(name.replace("_", " "), *cells)
    table.add_row("", *("by the clock (quartiles), by processor time" for _ in rows))
    verdicts = (f"{'[green]yes' if row['reached'] else '[red]no'}[/], >= {row['target']}" for row in rows)
    table.add_row("reached", *verdicts)
    console.print(table)
    for title, start in zip(("first start", "second start, from the cache on disk"), found["starts"], strict=True):
        console.print(
            f"{title}: {start['count']} programs made in {start['seconds']} s, "
            f"the first step took {start['first_step_seconds']} s",
            highlight=False,
        )
    for row in rows:
        left = {name: whys for name, whys in row["as_they_are"].items() if whys}
        console.print(f"as they are: {left or 'none'}", highlight=False)


def main(json: bool = False, quick: bool = False) -> None:
    """Time of a split step with compiled blocks, over the one without, one process, and what no split can beat.

    Args:
        json: Print one JSON object and nothing else.
        quick: A few rounds of the small input only: for trying it, not for a number to keep.
    """
    show(measured(quick), print_tables, json)


if __name__ == "__main__":
    tyro.cli(main)
