"""Five optimizer steps with compiled blocks are those of one process, whatever else the strategy asks for."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.model.compiled import blocks
from fullframe.model.parallelize_for import parallelize_for
from fullframe.model.sharding.values import whole_value
from fullframe.strategy import describe
from tests.rank_group import rank_group

BATCH, STEPS = 4, 5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.norm(self.first(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 1, 1)
        self.layers = nn.Sequential(Residual(), Residual(), Residual())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)))  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    kept = batch["weight"] > 0.3
    return (model(batch["image"]).square() * kept[:, :, ::2, ::2]).sum(), kept[:, :, ::2, ::2].sum()


def batches() -> list[dict[str, Tensor]]:
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [{"image": draw((BATCH, 2, 14, 22)), "weight": draw((BATCH, 1, 14, 22))} for _ in range(STEPS)]


def trained(strategy: ff.Strategy, backend: str = "aot_eager") -> tuple[list[float], list[Tensor], list[str]]:
    """Losses and final parameters, and why blocks were not compiled."""
    torch.manual_seed(0)
    net, model = Model().double(), None
    why: list[str] = []
    with mock.patch.object(blocks, "Programs", partial(blocks.Programs, backend)):
        mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
        model = parallelize_for(strategy, net, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        step = ff.TrainStep(model, loss, optimizer, strategy)
    share = BATCH // strategy.data
    first = mesh.get_local_rank("data") * share
    losses = []
    for batch in batches():
        mine = {name: value[first : first + share] for name, value in batch.items()}
        if strategy.parts > 1:
            mine = {name: ff.shard(value, mesh) for name, value in mine.items()}
        losses.append(step(mine).loss)
    if model.compiled is not None:
        said = model.compiled.programs.said
        why = [one.why_not for one in said]
        assert {one.block for one in said} == COMPILED[strategy.compile]
    return losses, [whole_value(p.detach()) for p in net.parameters()], why


COMPILED: dict[object, set[str]] = {True: {"layers.0"}, "all": {""}, ("layers.1", "st*"): {"layers.1", "stem"}}
STRATEGIES = [
    ff.Strategy(compile=True, width=2),
    ff.Strategy(compile="all", width=2),
    ff.Strategy(compile=("layers.1", "st*"), width=2, microbatches=2),
    ff.Strategy(compile=True, data=2, width=2, microbatches=2, recompute="blocks"),
    ff.Strategy(compile=True, width=2, update_in_backward=True),
    ff.Strategy(compile=True, data=2, width=2, microbatches=2, shard_parameters=True),
]
LONGER = [
    ff.Strategy(compile=True, width=2, recompute="blocks", shard_parameters=True),
    ff.Strategy(compile="all", width=2, update_in_backward=True),
]


@pytest.mark.parametrize(
    "strategy",
    [*STRATEGIES, *(pytest.param(s, marks=pytest.mark.slow) for s in LONGER)],
    ids=lambda s: f"{describe(s)}, {s.compile}",
)
def test_five_steps_are_those_of_one_process(strategy: ff.Strategy) -> None:
    expected, parameters, _ = rank_group(1).run(trained, ff.Strategy())[0]
    for losses, found, why in rank_group(strategy.ranks).run(trained, strategy, timeout_seconds=280):
        assert why and not any(why), why
        assert losses == pytest.approx(expected, rel=1e-11)
        torch.testing.assert_close(found, parameters, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_inductor_takes_gathered_parameters() -> None:
    strategy = ff.Strategy(compile=True, width=2, recompute="blocks", shard_parameters=True)
    expected, parameters, _ = rank_group(1).run(trained, ff.Strategy())[0]
    for losses, found, why in rank_group(2).run(trained, strategy, "inductor", timeout_seconds=500):
        assert why and not any(why), why
        assert losses == pytest.approx(expected, rel=1e-11)
        torch.testing.assert_close(found, parameters, rtol=1e-9, atol=1e-12)


def test_what_compile_was_not_made_for_is_refused_by_name() -> None:
    for compile, options, named in (
        (True, {"stages": 2}, "stages > 1"),
        (True, {"recompute": "nested"}, "recompute 'nested'"),
        ("all", {"shard_parameters": True}, "shard_parameters with 'all'"),
    ):
        with pytest.raises(StrategyError, match=f"compile was not made for {named}; leave one out"):
            ff.Strategy(compile=compile, **options)


def refused() -> str:
    try:
        ff.parallelize(Model(), ff.init_mesh(), shard_parameters=True, compile="all")
    except ValueError as error:
        return str(error)
    return ""


def test_sharded_parameters_and_one_program_are_refused() -> None:
    assert "use compile=True, or leave out shard_parameters" in rank_group(1).run(refused)[0]
