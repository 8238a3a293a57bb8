"""A step on stages is held against one process, and the module is named where they part."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fullframe.strategy import Strategy
from fullframe.verification.stages import StagedCalls
from fullframe.verification.verdict import Place, Verdict
from tests.rank_group import rank_group
from tests.verification.forked import verified_by_a_fork

RECIPE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
import fullframe as ff

class Frames(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {{"image": torch.randn(3, 12, 14, generator=torch.Generator().manual_seed(index))}}

def off():
    return 1 + ({fault}) * 1e-6 * (dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1)

class Leak(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * off()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, state, measured):
        x = self.norm(self.mix(state - measured))
        x = self.last({scaled})
        return state + torch.tanh(self.mix(x))  # twice in an iteration

class Iterated(nn.Module):
    def __init__(self):
        super().__init__()
        block = [Block() for _ in range(5)] if {own} else Block()
        self.stem, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)
        self.run = ff.unroll(block, 5, return_all={every})

    def forward(self, x):
        states = self.run(self.stem(x), x)
        return sum(self.head(state) for state in (states if isinstance(states, list) else [states]))

def layered():
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Dropout()]
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

def recipe():
    return ff.Recipe(
        model={model},
        loss=lambda model, batch: model(batch["image"]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        data=Frames,
        batch_size=4,
    )
"""


def _verified(path: str, axes: dict[str, int]) -> str:
    torch.set_num_threads(1)
    return verified_by_a_fork(Path(path), Strategy(**axes)).to_json()


def verified(folder: Path, axes: dict[str, int], **changed: Any) -> Verdict:
    path = folder / "job.py"
    how = {"model": "Iterated", "own": False, "every": False, "fault": 0, "scaled": "x"} | changed
    path.write_text(RECIPE.format(**how))
    ranks = 1
    for size in axes.values():
        ranks *= size
    answers = rank_group(ranks).run(_verified, str(path), axes)
    verdicts = [json.loads(answer) for answer in answers]
    assert all(verdict | {"notes": 0} == verdicts[0] | {"notes": 0} for verdict in verdicts)
    return Verdict.from_json(answers[0])


# An iteration's block takes two tensors and gives one; its layers, called four times, take and give one each.
@pytest.mark.parametrize(
    ("axes", "changed", "values"),
    [
        ({"stages": 2, "width": 2}, {"own": True}, 5 * 11 + 9),
        ({"stages": 3}, {"every": True}, 5 * 11 + 21),  # the head is called five times
        ({"stages": 2}, {"model": "layered"}, 18),
    ],
    ids=str,
)
def test_stages_are_exact(tmp_path: Path, axes: dict[str, int], changed: dict[str, Any], values: int) -> None:
    verdict = verified(tmp_path, axes, **changed)
    assert verdict.exact and verdict.first_difference is None, verdict.first_difference
    assert verdict.values == values and verdict.gradients > 0.35 * values, verdict
    assert verdict.mesh["stage"] == axes["stages"]


WRONG = {  # on the last rank, in the shared block or in that of one iteration
    "forward": (True, "x * off()", "what it passes to 'run.block.3.last' (Conv2d)"),
    "backward": (False, "Leak.apply(x)", "gradient at the output of 'run.block.norm' (BatchNorm2d) is the first"),
}


@pytest.mark.parametrize("phase", WRONG)
def test_the_module_of_a_later_stage_is_named(tmp_path: Path, phase: str) -> None:
    own, scaled, said = WRONG[phase]
    first = verified(tmp_path, {"stages": 2}, own=own, fault=1, scaled=scaled).first_difference
    assert first is not None and (first.phase, first.rank) == (phase, 1), first
    assert said in first.message


def test_calls_go_on_where_one_process_would() -> None:
    places = [Place("input", "", 0, 0, "M", None, "")]
    for number in range(4):
        of_block = "block", number, 0, "B", "", "M"
        of_layer = "block.layer", number, 0, "L", "block", "B"
        places += [Place("input", *of_block), Place("input", *of_layer), Place("output", *of_layer)]  # type: ignore[arg-type]
        places += [Place("output", *of_block)]  # type: ignore[arg-type]
    places += [Place("output", "", 0, 0, "M", None, "")]
    staged = StagedCalls(places, lambda: {"": range(2, 4)})
    calls = Counter({"": 1})
    staged.entering("", calls)
    assert calls == {"": 1, "block": 2, "block.layer": 2}
    assert staged.begins_part(places[1]) and not staged.begins_part(places[2])
    calls["block"] = calls["block.layer"] = 3
    staged.entering("", calls)
    assert calls["block"] == 3 and not staged.leaving(places[4], calls)
    first = StagedCalls(places, lambda: {"": range(2)})
    calls = Counter({"": 1})
    first.entering("", calls)
    assert calls["block"] == 0
    assert first.leaving(places[-1], calls) and calls["block"] == calls["block.layer"] == 4
    assert not first.begins_part(places[1])
    assert first.leaving(places[-1], calls) and not first.leaving(places[0], calls)  # one more of its tensors; an input
    calls = Counter({"": 2})  # a call more than in one process has no place there
    staged = StagedCalls(places, lambda: {"": range(2, 4)})
    staged.entering("", calls)
    assert calls == {"": 2}
