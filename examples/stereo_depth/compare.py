"""The first steps of the stereo job in one process and on two ranks, side by side, in float32 and in float64.

Exact means that nothing but rounding differs. In float32 that is 1e-7 at the first loss, and then it grows, because
AdamW divides every gradient by its own size: a gradient that is all rounding moves its weight as far as any other.
How far it may grow is measured here, not guessed: one process starts again from weights that are moved by their own
last bit. The two ranks must stay within `ALLOWANCE` of the furthest that this moves a number up to the same step.
A mistake could hide below that, so the same is done in float64, where rounding is 5e8 times smaller.
"""

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
from fullframe.processes.launch import launch

STEPS, STEPS_64 = 4, 2
ALLOWANCE = 10.0  # the yardstick rounds once, at the start; a run rounds in every operation
FIRST = 1e-6  # for the first loss, a forward pass: 8 times float32's spacing of 1.2e-7
FLOAT64 = 1e-11  # the widest that float32 may differ in these steps, about 1e-2, over 2**29, the ratio of spacings
DRAWS = 3


def main() -> int:
    """Print the tables; 1 when the two runs differ by more than rounding explains."""
    torch.set_num_threads(1)
    job = dataclasses.replace(recipe(), evaluate=None, evaluation_data=None, finish=None)
    job64 = dataclasses.replace(job, model=lambda: job.model().double(), data=Motorcycle64)
    if "RANK" in os.environ:  # one of the two ranks that the launch below starts
        folder = Path(sys.argv[1])
        run(job, ff.Strategy(width=2), STEPS, folder / "two")
        run(job64, ff.Strategy(width=2), STEPS_64, folder / "two64")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failed = launch(2, [__file__, name])
        if failed:
            return failed
        two, two64 = recorded(folder / "two"), recorded(folder / "two64")
        one = run(job, ff.Strategy(), STEPS, folder / "one")
        moved = [run(nudged(job, draw), ff.Strategy(), STEPS, folder / f"{draw}") for draw in range(DRAWS)]
        one64 = run(job64, ff.Strategy(), STEPS_64, folder / "one64")
    equal = report("float32", one, two, allowed(one, moved))
    equal &= report("float64", one64, two64, [Numbers(FLOAT64, FLOAT64)] * STEPS_64)
    print("equal to rounding" if equal else "NOT equal: more than rounding explains")
    return 0 if equal else 1


class Numbers(NamedTuple):
    """What is compared of one step, or how far each may be off."""

    loss: float
    grad_norm: float


def run(job: ff.Recipe, strategy: ff.Strategy, steps: int, folder: Path) -> list[Numbers]:
    """Train the first steps; their numbers."""
    ff.fit(job, strategy, folder, steps=steps)
    return recorded(folder)


def recorded(folder: Path) -> list[Numbers]:
    """The numbers of a run directory."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [Numbers(record["loss"], record["grad_norm"]) for record in records]


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


def report(title: str, one: list[Numbers], two: list[Numbers], bounds: list[Numbers]) -> bool:
    """Print the losses side by side; whether every difference is within its bound."""
    print(f"{title:<8}{'loss, 1 process':>20}{'loss, 2 ranks':>20}{'difference':>23}{'of gradient norm':>23}")
    equal = True
    for step, (a, b, bound) in enumerate(zip(one, two, bounds, strict=True), start=1):
        apart = relative(a, b)
        equal &= apart.loss <= bound.loss and apart.grad_norm <= bound.grad_norm
        differences = "".join(f"{x:>14.1e} <= {y:.0e}" for x, y in zip(apart, bound, strict=True))
        print(f"step {step:<3}{a.loss:>20.14f}{b.loss:>20.14f} {differences}")
    return equal


if __name__ == "__main__":
    sys.exit(main())
