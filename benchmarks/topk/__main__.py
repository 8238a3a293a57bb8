"""`python -m benchmarks.topk [--json] [--images 1]`: the top of split tokens, over that of the whole in plain torch.

Values are random, so no two are equal; "equal" is the same of numbers rounded to 16 bit, where whole rows have to be
sent. The ratio is of medians; every round times all variants in turn.
"""

import json as json_text
import tempfile
from pathlib import Path
from typing import Any

import torch.multiprocessing
import tyro
from rich.console import Console

from benchmarks import machine, show
from benchmarks.topk.measure import RANKS, on_rank


def measured(images: int, tokens: int, k: int, rounds: int) -> dict[str, Any]:
    """The findings of a run on fresh ranks."""
    with tempfile.TemporaryDirectory() as directory:
        store, result = str(Path(directory, "store")), Path(directory, "result.json")
        torch.multiprocessing.spawn(on_rank, args=(store, str(result), images, tokens, k, rounds), nprocs=RANKS)
        return {"machine": machine(), **json_text.loads(result.read_text())}


def print_lines(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    for name in ("different", "equal"):
        times = found[name]
        console.print(
            f"{name} values: {times['split_microseconds']:.0f} us split over {RANKS} ranks, "
            f"{times['whole_microseconds']:.0f} us whole, ratio {times['ratio']['median']:.2f}"
        )


def main(json: bool = False, images: int = 1, tokens: int = 20_000, k: int = 300, rounds: int = 50) -> None:
    """Time of `torch.topk` of split tokens.

    Args:
        json: Print one JSON object and nothing else.
        images: Samples of a batch.
        tokens: Tokens of a sample.
        k: How many of them are asked for.
        rounds: How often every variant is timed.
    """
    show(measured(images, tokens, k, rounds), print_lines, json)


if __name__ == "__main__":
    tyro.cli(main)
