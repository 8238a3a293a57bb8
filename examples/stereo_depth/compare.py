"""The first steps of the stereo job in one process and on two ranks, side by side.

Exact means that nothing but rounding differs. In float32 that is 1e-7 at the first loss, and then it grows, because
AdamW divides every gradient by its own size: a gradient that is all rounding moves its weight as far as any other.
How far it may grow is measured here, not guessed: one process starts again from weights that are moved by their own
last bit. The two ranks must stay within `ALLOWANCE` of the furthest that this moves a number up to the same step.
With --float64 the two runs differ by about 1e-14 (slow: PyTorch has no fast float64 convolution over volumes).
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from recipe import Motorcycle, recipe
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff
from fullframe.launching.local import launch

ALLOWANCE = 10.0  # the yardstick rounds once, at the start; a run rounds in every operation
FIRST = 1e-6  # for the first loss, a forward pass: 8 times float32's spacing of 1.2e-7
FLOAT64 = 1e-11
DRAWS = 3


def main() -> int:
    """Print the table; 1 when the two runs differ by more than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = dataclasses.replace(recipe(), evaluate=None, evaluation_data=None, finish=None)
    if options.float64:
        job = dataclasses.replace(job, model=lambda: recipe().model().double(), data=Motorcycle64)
    if "RANK" in os.environ:  # one of the two ranks that the launch below starts
        run(job, ff.Strategy(width=2), options.steps, options.folder)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failed = launch(2, [__file__, *sys.argv[1:], "--folder", str(folder / "two")])
        if failed:
            return failed
        two = [
            Numbers(record["loss"], record["grad_norm"])
            for record in map(json.loads, (folder / "two" / "metrics.jsonl").read_text().splitlines())
        ]
        one = run(job, ff.Strategy(), options.steps, folder / "one")
        if options.float64:
            return report(one, two, [Numbers(FLOAT64, FLOAT64)] * options.steps)
        moved = [run(nudged(job, draw), ff.Strategy(), options.steps, folder / f"{draw}") for draw in range(DRAWS)]
    return report(one, two, allowed(one, moved))


class Numbers(NamedTuple):
    """What is compared of one step, or how far each may be off."""

    loss: float
    grad_norm: float


def run(job: ff.Recipe, strategy: ff.Strategy, steps: int, folder: Path) -> list[Numbers]:
    """The first steps' numbers."""
    numbers: list[Numbers] = []
    ff.fit(
        job,
        strategy,
        folder,
        steps=steps,
        on_record=lambda record: numbers.append(Numbers(record["loss"], record["grad_norm"])),
    )
    return numbers


def allowed(one: list[Numbers], moved: list[list[Numbers]]) -> list[Numbers]:
    """For each step, how far rounding may take the loss and the gradient norm: at least as far as a step before."""
    bounds: list[Numbers] = []
    reached = Numbers(0.0, 0.0)
    for step, reference in enumerate(one):
        for other in moved:
            reached = Numbers(*map(max, reached, relative(reference, other[step])))
        bounds.append(Numbers(ALLOWANCE * reached.loss if step else FIRST, ALLOWANCE * reached.grad_norm))
    return bounds


def nudged(job: ff.Recipe, draw: int) -> ff.Recipe:
    """The job from initial weights that are each moved by up to one unit in the last place of float32."""

    def model() -> nn.Module:
        network, generator = job.model(), torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter *= 1 + (2 * torch.rand(parameter.shape, generator=generator) - 1) * 2**-23
        return network

    return dataclasses.replace(job, model=model)


class Motorcycle64(Dataset[dict[str, Tensor]]):
    """The same samples in float64."""

    def __init__(self) -> None:
        self.samples = Motorcycle()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: t.double() if t.is_floating_point() else t for name, t in self.samples[index].items()}


def relative(a: Numbers, b: Numbers) -> Numbers:
    """How far two steps are apart."""
    return Numbers(abs(a.loss - b.loss) / abs(a.loss), abs(a.grad_norm - b.grad_norm) / abs(a.grad_norm))


def report(one: list[Numbers], two: list[Numbers], bounds: list[Numbers]) -> int:
    """Print the losses side by side; 1 when a difference is over its bound."""
    print(f"{'step':>4}{'loss, 1 process':>18}{'loss, 2 ranks':>18}{'difference':>22}{'of gradient norm':>22}")
    equal = True
    for step, (a, b, bound) in enumerate(zip(one, two, bounds, strict=True), start=1):
        apart = relative(a, b)
        equal &= apart.loss <= bound.loss and apart.grad_norm <= bound.grad_norm
        differences = "".join(f"{x:>12.1e} <= {y:.0e}" for x, y in zip(apart, bound, strict=True))
        print(f"{step:>4}{a.loss:>18.12f}{b.loss:>18.12f}  {differences}")
    print("equal to rounding" if equal else "NOT equal: more than rounding explains")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
