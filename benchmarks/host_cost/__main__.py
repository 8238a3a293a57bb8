"""`python -m benchmarks.host_cost [--rounds 200] [--steps 10] [--compiled] [--json]`."""

from typing import Any

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import machine, show
from benchmarks.host_cost.measure import IMAGE, MAP, RANK, RANKS, measured


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    shape = "x".join(map(str, MAP))
    title = f"Host microseconds on rank {RANK} of {RANKS}, {shape} on the rank: forward, and forward with backward"
    table = Table(title=title, box=SIMPLE)
    for heading in ("op", "plain", "split", "more", "plain, both", "split, both", "more", "ratio"):
        table.add_column(heading, justify="left" if heading == "op" else "right")
    for name, times in found["ops"].items():
        row = [name]
        for end in (" forward", ""):
            plain, split = times[f"plain{end}"], times[f"split{end}"]
            row += [f"{plain:.0f}", f"{split:.0f}", f"{split - plain:.0f}"]
        table.add_row(*row, f"{times['split'] / times['plain']:.2f}")
    console.print(table)
    step = found["step"]
    image = "x".join(map(str, IMAGE))
    console.print(
        f"ResNet-50 UNet, forward and backward of {image} on the rank: plain {step['plain'] / 1e3:.1f} ms, "
        f"split {step['split'] / 1e3:.1f} ms, ratio {step['split'] / step['plain']:.2f}",
        highlight=False,
    )
    console.print(f"of which convolutions, called apart: {step['convolutions'] / 1e3:.1f} ms", highlight=False)
    for name, programs in step["programs"].items():
        console.print(
            f"{name} {step[name] / 1e3:.1f} ms, {step[name] / step['split']:.2f} of split; without the convolutions "
            f"{step['host'][name]:.2f}; {len(programs)} programs, made in {sum(programs):.0f} s",
            highlight=False,
        )
    if step["programs"]:
        console.print(f"as they are: {step['as they are'] or 'none'}", highlight=False)


def main(rounds: int = 200, steps: int = 10, compiled: bool = False, json: bool = False) -> None:
    """Host time of split tensors, over plain torch's.

    Args:
        rounds: Calls of each op, of which the fastest counts.
        steps: Steps of the network, likewise.
        compiled: The step compiled too, by blocks and as one program, which takes minutes to compile.
        json: Print one JSON object and nothing else.
    """
    found = {
        "machine": machine(),
        "rank": RANK,
        "ranks": RANKS,
        "map": MAP,
        "image": IMAGE,
        **measured(rounds, steps, compiled),
    }
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
