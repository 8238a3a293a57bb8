"""A strategy says what the `ff.unroll` inside a model keep; five steps are those of the plain loop."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.techniques.unrolling.models import keep_states, most_iterations, require_one_device, unrolled_in
from fullframe.techniques.unrolling.schedules import extra_runs
from tests.rank_group import rank_group

ITERATIONS = 9


class Block(nn.Module):
    """A learned step with batch norm and dropout of whole channels, which are one process's when split, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout2d(0.2)
        self.runs = [0]  # not in an attribute, which recompute puts back

    def forward(self, state: Tensor, measured: Tensor) -> Tensor:
        self.runs[0] += 1
        return state + 0.3 * self.drop(torch.tanh(self.norm(self.conv(state - measured))))


class Model(nn.Module):
    def __init__(self, own: bool = False, **options: Any):
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 1, 1)
        self.run = ff.unroll([Block() for _ in range(ITERATIONS)] if own else Block(), ITERATIONS, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem(x), x))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def trained(model: nn.Module, strategy: ff.Strategy, split: bool = False) -> list[Tensor]:
    """Loss and gradient norm of each step, then parameters and buffers."""
    mesh = ff.init_mesh(strategy.height, strategy.width, stages=strategy.stages)
    plain = model.double()
    model = ff.parallelize(plain, mesh) if strategy.ranks > 1 else plain
    step = ff.TrainStep(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), strategy)
    found = []
    for number in range(3):
        torch.manual_seed(10 + number)
        batch = torch.randn(2, 3, 6, 10, dtype=torch.float64)
        record = step(ff.shard(batch, mesh) if split else batch)
        found += [*torch.tensor([record.loss, record.grad_norm], dtype=torch.float64)]
    return [*found, *(t.detach() for t in (*plain.parameters(), *plain.buffers()))]


def apart(some: list[Tensor], others: list[Tensor]) -> float:
    assert len(some) == len(others)
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


WAYS: tuple[dict[str, Any], ...] = (
    {"recompute": "blocks"},
    {"recompute": "nested"},
    {"recompute": "nested", "recompute_states": 4},
    {"recompute": "nested", "recompute_states": 1},
)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_steps_are_those_of_the_plain_loop(own: bool) -> None:
    wanted = trained(Model(own), ff.Strategy())
    for way in WAYS:
        assert apart(trained(Model(own), ff.Strategy(**way)), wanted) < 1e-12, way


def several(axes: dict[str, int], way: dict[str, Any]) -> float:
    wanted = trained_alone()
    return apart(trained(Model(), ff.Strategy(**axes, **way), split="width" in axes), wanted)


def trained_alone() -> list[Tensor]:
    """One process's steps, in a plain loop, as a rank of a group has no strategy of one rank."""
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for number in range(3):
        torch.manual_seed(10 + number)
        batch = torch.randn(2, 3, 6, 10, dtype=torch.float64)
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        found += [value.detach(), norm]
    return [*found, *(t.detach() for t in (*model.parameters(), *model.buffers()))]


@pytest.mark.parametrize("axes", [{"width": 2}, {"stages": 2}, {"stages": 2, "width": 2}], ids=str)
def test_on_several_ranks(axes: dict[str, int]) -> None:
    for way in ({"recompute": "nested"}, {"recompute": "nested", "recompute_states": 2}):
        assert max(rank_group(ff.Strategy(**axes).ranks).run(several, axes, way)) < 1e-10, way


def sharded(way: dict[str, Any]) -> list[float]:
    mesh = ff.init_mesh()
    strategy = ff.Strategy(data=2, shard_parameters=True, **way)
    model = ff.parallelize(Model().double(), mesh, shard_parameters=True)
    step = ff.TrainStep(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), strategy)
    found = []
    for number in range(3):
        torch.manual_seed(10 + number)
        record = step(torch.randn(2, 3, 6, 10, dtype=torch.float64))
        found += [record.loss, record.grad_norm]
    return found


def test_with_sharded_parameters() -> None:
    wanted = rank_group(2).run(sharded, {})
    for way in WAYS[1:3]:
        for found, other in zip(rank_group(2).run(sharded, way), wanted, strict=True):
            assert found == pytest.approx(other, rel=1e-10), way


@pytest.mark.parametrize("states", [1, 3, 20])
def test_so_many_states_are_kept(states: int) -> None:
    model = Model()
    keep_states(model, ff.Strategy(recompute="nested", recompute_states=states))
    model(torch.randn(1, 3, 4, 4)).sum().backward()
    block: Any = model.run.block
    assert block.runs[0] == ITERATIONS + extra_runs(ITERATIONS, min(states, ITERATIONS))


def calls(model: Model, strategy: ff.Strategy) -> int:
    torch.manual_seed(0)
    ff.TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1), strategy)(torch.randn(2, 3, 6, 10))
    return int(model.run.block.runs[0])


def test_the_recipe_s_own_is_what_none_means_and_is_not_done_twice() -> None:
    model = Model(recompute="nested")
    assert calls(copy.deepcopy(model), ff.Strategy(recompute="blocks")) == 2 * ITERATIONS
    own = calls(copy.deepcopy(model), ff.Strategy())
    assert ITERATIONS < own <= 3 * ITERATIONS
    assert calls(copy.deepcopy(model), ff.Strategy(recompute="blocks", recompute_modules=("head",))) == own
    model = Model()
    assert calls(model, ff.Strategy(recompute="nested")) == own  # and a later strategy undoes it
    model.run.block.runs[0] = 0
    assert calls(model, ff.Strategy()) == ITERATIONS


def test_there_must_be_iterations_to_nest() -> None:
    with pytest.raises(StrategyError, match="recompute is 'nested', but Sequential has no"):
        keep_states(nn.Sequential(nn.Conv2d(1, 1, 1)), ff.Strategy(recompute="nested"))
    assert list(unrolled_in(Model())) == ["run"] and unrolled_in(nn.Linear(1, 1)) == {}
    assert most_iterations(Model()) == ITERATIONS and most_iterations(Model(return_all=True)) == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"recompute_states": 2}, "recompute_states is 2, but recompute is 'none'; use 'nested'"),
        ({"recompute": "nested", "recompute_states": 0}, "recompute_states must be a whole number >= 1, got 0"),
        ({"recompute": "nested", "recompute_modules": ("a",)}, "recompute is 'nested'; use 'blocks'"),
    ],
)
def test_strategies_that_do_not_hold(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        ff.Strategy(**fields)


def test_several_devices_of_one_process_are_no_rank_s() -> None:
    require_one_device(Model(placement=["cpu", "cpu"]))
    with pytest.raises(StrategyError, match=r"iterations of run are on cpu, meta of one process.*stages"):
        require_one_device(Model(placement=["cpu", "meta"]))
