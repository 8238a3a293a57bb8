"""Runs that move: each goes on twice under another random strategy, and ends as one process would have.

`pytest -m slow tests/whole/test_moves.py --seed N` draws others; the failing run's strategies are in the message.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.strategy import describe
from tests.rank_group import rank_group
from tests.training.test_combinations import Block
from tests.training.test_resume import contents, numbers
from tests.training.tiny import Frames, evaluate, recipe

RUNS = 12
STEPS = 2  # of each strategy
MESHES = [
    *({}, {"height": 2}, {"width": 2}, {"width": 3}, {"height": 2, "width": 2}),
    *({"data": 2}, {"data": 4}, {"data": 2, "width": 2}),
    *({"stages": 2}, {"stages": 3}, {"stages": 2, "width": 2}, {"stages": 2, "data": 2}),
]
OPTIMIZERS = {
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01),
    "AMSGrad": lambda parameters: AdamW(parameters, lr=0.01, amsgrad=True),
}


class Blocks(nn.Module):
    """Something to recompute, and to cut into stages."""

    def __init__(self, norms: bool):
        super().__init__()
        ends = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        blocks = [nn.Sequential(Block(), nn.BatchNorm2d(6)) if norms else Block() for _ in range(3)]
        self.layers = nn.Sequential(ends[0], *blocks, ends[1]).double()

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)  # type: ignore[no-any-return]


def drawn(draw: random.Random, norms: bool, always: dict[str, Any]) -> ff.Strategy:
    """A strategy with the options in `always`; batch norm, if there is any, sees the whole batch."""
    while True:
        options: dict[str, Any] = {**draw.choice(MESHES), **always}
        most = 4 // options.get("data", 1)  # samples of a replica
        options["microbatches"] = 1 if norms else draw.choice([n for n in (1, 2, 4) if n <= most])
        options["sync_batchnorm"] = norms and "data" in options
        options["recompute"] = draw.choice(["none", "blocks"])
        for name in ("shard_optimizer", "shard_parameters", "update_in_backward"):
            options[name] = draw.random() < 0.3
        if norms and "stages" in options:
            continue
        try:
            return ff.Strategy(**options)
        except StrategyError:  # some do not go together
            continue


def trained(strategy: ff.Strategy, folder: Path, steps: int, norms: bool, optimizer: str, measured: bool) -> None:
    """Goes on to so many steps, from what is in the folder."""
    torch.manual_seed(0)
    changes: dict[str, Any] = {"model": partial(Blocks, norms), "optimizer": OPTIMIZERS[optimizer]}
    if measured:
        data = {"evaluation_data": lambda: Frames(7, augment=False), "evaluate_every": 1}
        changes |= {"evaluate": evaluate, "best": "-entropy", **data}
    ff.fit(recipe(**changes), strategy, folder, steps=steps, resume=folder.exists())


@pytest.mark.further
def test_a_run_ends_as_in_one_process(tmp_path: Path, seed: int) -> None:
    for run in range(RUNS):
        draw = random.Random(f"{seed}, {run}")
        norms, optimizer, measured = draw.random() < 0.25, draw.choice([*OPTIMIZERS]), draw.random() < 0.5
        always = {"ema_decay": draw.choice([None, 0.9]), "clip_norm": draw.choice([None, 0.3])}
        strategies = [drawn(draw, norms, always) for _ in range(3)]
        moved, alone = tmp_path / f"{run} moved", tmp_path / f"{run} alone"
        for number, strategy in enumerate(strategies, start=1):
            how = strategy, moved, number * STEPS, norms, optimizer, measured
            rank_group(strategy.ranks).run(trained, *how, timeout_seconds=200)
        trained(ff.Strategy(**always), alone, len(strategies) * STEPS, norms, optimizer, measured)
        said = f"{optimizer}: {'; '.join(map(describe, strategies))}"
        for line, wanted in zip(numbers(moved), numbers(alone), strict=True):
            measures = {name: value for name, value in wanted.items() if isinstance(value, float)}
            assert {name: line.get(name) for name in measures} == pytest.approx(measures, rel=1e-9), said
        found, expected = contents(moved), contents(alone)
        assert found.keys() == expected.keys(), said
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-9, msg=f"{name}: {said}")
