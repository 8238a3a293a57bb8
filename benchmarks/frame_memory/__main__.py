"""`python -m benchmarks.frame_memory [--json] [--svg FILE]`: GiB of a GPU when 1 to 8 of them share each frame."""

import json as json_text
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

import fullframe as ff
from benchmarks import machine, show
from benchmarks.frame_memory.picture import picture
from benchmarks.planning.convnext_xl import recipe

GPUS = (1, 2, 4, 8)
STRATEGIES = {"plain": ff.Strategy(precision="bf16"), "recompute": ff.Strategy(precision="bf16", recompute="blocks")}
RESULT = Path(__file__).with_name("result.json")


def predicted() -> dict[str, Any]:
    """The GiB of the GPU that needs most, for each strategy and number of GPUs."""
    gib = {
        name: [ff.simulate(recipe(), replace(strategy, width=n), f"{n}xA100-80GB").device_bytes / 2**30 for n in GPUS]
        for name, strategy in STRATEGIES.items()
    }
    return {"gpus": GPUS, "gib": gib, "machine": machine()}


def print_table(found: dict[str, Any], console: Console) -> None:
    """A line for each strategy."""
    for name, gib in found["gib"].items():
        row = [f"{n} GPUs {x:5.2f} GiB  " for n, x in zip(found["gpus"], gib, strict=True)]
        console.print(f"{name:10}", *row, highlight=False)


def main(json: bool = False, svg: Path | None = None, again: bool = True) -> None:
    """Predict and print.

    Args:
        json: Print one JSON object and nothing else.
        svg: Draw the figures into this file.
        again: Simulate again; without, the figures are those of result.json.
    """
    found = predicted() if again else json_text.loads(RESULT.read_text())
    show(found, print_table, json)
    if svg is not None:
        svg.write_text(picture(found["gpus"], found["gib"]["plain"], found["gib"]["recompute"]))


if __name__ == "__main__":
    tyro.cli(main)
