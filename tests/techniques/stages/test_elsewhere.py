"""What a part leaves in attributes, read by the loss: one process's value on all stages, or refused by name on all."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.ranks.collectives import all_sum
from fullframe.techniques.stages.elsewhere import not_here
from tests.rank_group import RankFailure, rank_group


class Meter:
    """Keeps a sum."""

    def __init__(self) -> None:
        self.total = 0.0


class Part(nn.Module):
    """Leaves what it has seen, the way it is told to."""

    def __init__(self, way: str, shared: list[float]):
        super().__init__()
        self.conv, self.way = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64), way
        self.left: Any = {"list": [], "dict": {}, "object": Meter(), "shared": shared}.get(way, 0.0)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.conv(x).relu()
        mean, self.calls = y.detach().mean(), self.calls + 1
        if self.way in ("list", "shared"):
            self.left.append(float(mean))
        elif self.way == "dict":
            self.left["mean"] = mean
        elif self.way == "object":
            self.left.total += float(mean)
        elif self.way == "hook":
            self.left = float(mean)
            y.register_hook(lambda gradient: gradient * self.left)
        else:
            self.left = {"number": float(mean), "tensor": mean, "graph": y.mean(), "large": y.detach()}[self.way]
        return y

    def read(self) -> Any:
        if self.way == "dict":
            return self.left["mean"]
        if self.way == "object":
            return self.left.total
        if self.way in ("list", "shared"):
            return sum(self.left)
        return self.left.detach().mean() if isinstance(self.left, Tensor) else self.left


def losses(way: str, where: int, ranks: int, microbatches: int = 1, reads: bool = True) -> list[float]:
    torch.manual_seed(0)
    shared: list[float] = []
    parts = nn.Sequential(*(Part(way, shared) for _ in range(4)))
    model = ff.parallelize(parts, ff.init_mesh(stages=ranks)) if ranks > 1 else parts

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        result = model(batch).square().mean()
        return result * (1 + parts[where].read()) if reads else result  # type: ignore[operator]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ff.TrainStep(model, loss, optimizer, ff.Strategy(stages=ranks, microbatches=microbatches))
    batches = torch.randn(3, 2, 2, 60, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = [step(batch).loss for batch in batches]
    return [*found, *(pickle.loads(pickle.dumps(part.calls)) for part in parts)]


@pytest.mark.parametrize("way", ["number", "tensor", "list", "dict", "graph", "hook"])
@pytest.mark.parametrize("where", [0, 3])
def test_the_loss_reads_what_a_part_has_left(way: str, where: int) -> None:
    alone = losses(way, where, 1)
    for found in rank_group(2).run(losses, way, where, 2):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("way", "microbatches", "words"),
    [
        ("large", 1, r"Part sets 3\.left in forward on stage 1 alone, to what is not sent"),
        ("object", 1, r"Part sets 3\.left in forward on stage 1 alone, to what is not sent"),
        ("shared", 1, r"Part changes \d\.left in forward, an object that \d on another stage holds, too"),
        ("number", 2, r"Part sets 3\.left in forward for each microbatch anew"),
        ("list", 2, r"Part sets 3\.left in forward for each microbatch anew"),
        ("hook", 2, r"Part sets 3\.left in forward for each microbatch anew"),  # read in backward
    ],
)
def test_what_is_not_known_on_all_stages_is_refused_on_all(way: str, microbatches: int, words: str) -> None:
    with pytest.raises(RankFailure, match=words) as raised:
        rank_group(2).run(losses, way, 3, 2, microbatches, way != "hook")
    assert len(raised.value.errors) == 2


def gone_back_at_once(where: int, ranks: int) -> list[Tensor]:
    """Gradients of parts of which one has a hook that reads what forward sets, by `loss()` of two microbatches."""
    torch.manual_seed(0)
    parts = [Part("hook" if number == where else "large", []) for number in range(4)]
    spread = {"placement": "stages", "mesh": ff.init_mesh(stages=ranks), "microbatches": 2} if ranks > 1 else {}
    run = ff.unroll(parts, 4, **spread)  # type: ignore[arg-type]
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for each in [x] if ranks > 1 else x.split(1):
        run.loss(Tensor.sum, (), each).backward()
    values = [parameter.grad if parameter.grad is not None else 0 * parameter for parameter in run.parameters()]
    return [all_sum(value, dist.group.WORLD) / ranks if ranks > 1 else value for value in values]


def test_a_hook_of_a_microbatch_that_goes_back_at_once_reads_its_own_value() -> None:
    for found in rank_group(2).run(gone_back_at_once, 3, 2):
        torch.testing.assert_close(found, gone_back_at_once(3, 1), rtol=1e-12, atol=0)
    with pytest.raises(RankFailure, match=r"Part sets 0\.left in forward for each microbatch anew") as raised:
        rank_group(2).run(gone_back_at_once, 0, 2)  # where another has gone forward since
    assert len(raised.value.errors) == 2


@pytest.mark.parametrize("way", ["large", "object", "number", "list"])
def test_nobody_is_hindered_who_does_not_read_it(way: str) -> None:
    alone = losses(way, 3, 1, 2, reads=False)
    for found in rank_group(2).run(losses, way, 3, 2, 2, False):
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)


def evaluated(ranks: int) -> float:
    torch.manual_seed(0)
    parts = nn.Sequential(*(Part("number", []) for _ in range(4)))
    model = ff.parallelize(parts, ff.init_mesh(stages=ranks)) if ranks > 1 else parts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ff.TrainStep(model, lambda model, batch: model(batch).mean(), optimizer, ff.Strategy(stages=ranks))
    with torch.no_grad():
        model(torch.ones(2, 2, 5, 6, dtype=torch.float64))
    return float(parts[0].read()) + float(parts[3].read())  # type: ignore[operator]


def test_an_evaluation_reads_it() -> None:
    assert rank_group(2).run(evaluated, 2) == pytest.approx([evaluated(1)] * 2, rel=1e-12)


READS: dict[str, Callable[[Any], Any]] = {
    "a method": lambda one: one.mean(),
    "an operator": lambda one: one + 1,
    "from the right": lambda one: torch.ones(2) * one,
    "in a list": lambda one: torch.stack([one, one]),
    "a comparison": lambda one: one == 1.0,
    "its truth": bool,
    "as a number": float,
    "in words": "{:.3f}".format,
}


@pytest.mark.parametrize("way", READS)
def test_what_is_not_here_cannot_be_read(way: str) -> None:
    for kind in (Tensor, float):
        one: Any = not_here("it is not here", kind)
        assert isinstance(one, kind) and one is not None and "it is not here" in repr(one)
        for each in (one, copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            with pytest.raises(StrategyError, match="it is not here"):
                READS[way](each)
