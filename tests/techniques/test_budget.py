"""The blocks chosen for a budget: arithmetic against brute force, measured bytes against what really stays alive."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.ranks.randomness import seed_everything
from fullframe.techniques.budget import BlockCost, Costs, agreed, choose, measured
from fullframe.techniques.recompute import Recomputation
from tests.rank_group import rank_group
from tests.techniques.test_recompute import assert_same, on_ranks, steps
from tests.training import blocks

BLOCK = st.tuples(st.integers(-2, 9), st.integers(0, 9))  # bytes, seconds


def saved(costs: Costs, again: tuple[str, ...]) -> int:
    return costs.fixed_bytes + sum(block.bytes for block in costs.blocks if block.name not in again)


def seconds(costs: Costs, again: tuple[str, ...]) -> float:
    return sum(block.seconds for block in costs.blocks if block.name in again)


@settings(max_examples=300, deadline=None)
@given(st.lists(BLOCK, max_size=7), st.integers(0, 5), st.integers(0, 40))
def test_a_choice_fits_and_is_at_most_one_block_slower_than_the_best(
    drawn: list[tuple[int, int]], fixed: int, budget: int
) -> None:
    costs = Costs(fixed, tuple(BlockCost(f"b{n}", *block) for n, block in enumerate(drawn)))
    names = [block.name for block in costs.blocks]
    subsets = [s for count in range(len(names) + 1) for s in itertools.combinations(names, count)]
    fitting = [s for s in subsets if saved(costs, s) <= budget]
    if not fitting:
        least = min(saved(costs, s) for s in subsets)
        with pytest.raises(StrategyError, match=f"{least} bytes are saved, {least - budget} more"):
            choose(costs, budget)
        return
    chosen = choose(costs, budget)
    assert saved(costs, chosen) <= budget
    best = min(seconds(costs, s) for s in fitting)
    assert seconds(costs, chosen) <= best + max((block.seconds for block in costs.blocks), default=0)
    for name in chosen:  # none in vain
        assert saved(costs, tuple(other for other in chosen if other != name)) > budget


def test_cheap_bytes_first() -> None:
    costs = Costs(100, (BlockCost("slow", 50, 9.0), BlockCost("fast", 50, 1.0), BlockCost("large", 80, 2.0)))
    assert choose(costs, 280) == ()
    assert choose(costs, 260) == ("fast",)
    assert choose(costs, 200) == ("large",)
    assert choose(costs, 150) == ("fast", "large")
    assert choose(costs, 100) == ("slow", "fast", "large")


class Live(TorchDispatchMode):
    """Weak references to every storage that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        there = {t.untyped_storage() for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        new = {t.untyped_storage() for t in tree_iter(out) if isinstance(t, Tensor)} - there
        self.made += map(weakref.ref, new)
        return out

    def bytes(self) -> int:
        """What is alive of them."""
        return sum(storage.nbytes() for made in self.made if (storage := made()) is not None)


def alive(forward: Callable[[], Tensor]) -> int:
    """Bytes that the ops of `forward` made and that its result keeps alive."""
    with Live() as live:
        result = forward()
    alive = live.bytes()
    assert result.requires_grad
    return alive


class Waves(nn.Module):
    """A stage of blocks of different cost; one passes its input on to where it is saved again."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(8, large, 3, padding=1), nn.GELU(), nn.Conv2d(large, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.convs(x)).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.waves = nn.ModuleList(Waves(8 * n) for n in (1, 4, 2, 3))
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for wave in self.waves:
            x = wave(x).mul(1.5)
        return self.last(x.mean((2, 3)))


def net() -> tuple[Net, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model, image = Net(), torch.randn(2, 3, 32, 48)
    return model, lambda: model(image * 1).square().mean()


NAMES = tuple(f"waves.{n}" for n in range(4))


def test_what_is_measured_is_what_stays_alive() -> None:
    """The whole of it, and what each block adds, by the storages that live on after a real forward pass."""
    model, forward = net()
    costs = measured(model, NAMES, forward, iter(range(100)).__next__)
    ticks = {block.name: block.seconds for block in costs.blocks}
    assert ticks == dict.fromkeys(NAMES, 1)
    small = 1024  # scalars, and what the loss itself holds
    found = {}
    for again in [(), *((name,) for name in NAMES), NAMES[1:3], NAMES]:
        fresh, forward = net()
        step = Recomputation(fresh, ff.Strategy(recompute="blocks", recompute_modules=again or ("stem",)))
        assert step.names == (again or ("stem",))
        found[again] = alive(forward)
        assert saved(costs, again) + small >= found[again], "never more than what the choice counts on"
        assert saved(costs, again) == pytest.approx(found[again], abs=small)
    assert found[()] > 2 * found[NAMES]


class Noting(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.register_buffer("grid", torch.zeros(1))
        return x


def test_measuring_leaves_no_trace_and_holds_nothing() -> None:
    model = blocks.network(dropout=0.3, spectral=True)
    model.stem.append(Noting())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kept: list[int] = []

    def forward() -> None:
        with Live() as live:
            total, _ = blocks.loss(model, blocks.batch())
        kept.append(live.bytes())
        total.sin()

    costs = measured(model, [f"blocks.{n}" for n in range(3)], forward, lambda: 0.0)
    assert_same(dict(model.named_buffers()), before)
    assert all("forward" not in vars(module) for module in model.modules())
    assert model.stem[-1].calls == 0 and not hasattr(model.stem[-1], "grid")
    assert kept[0] < saved(costs, ()) / 4
    twice = {block.name: block.bytes for block in costs.blocks}
    assert twice["blocks.2"] > 1.9 * twice["blocks.1"], "the last block runs twice"


@contextmanager
def looked_at() -> Iterator[list[int]]:
    """The bytes alive at the end of each forward pass of `loss`."""
    found: list[int] = []
    original = blocks.loss

    def loss(model: nn.Module, batch: Any) -> Any:
        with Live() as live:
            output = original(model, batch)
        found.append(live.bytes())
        return output

    blocks.loss = loss
    try:
        yield found
    finally:
        blocks.loss = original


def within(strategy: ff.Strategy, rehearsed: bool, budget: int) -> tuple[Any, list[int], Any]:
    with looked_at() as found:
        result = steps(replace(strategy, recompute="budget", recompute_budget_bytes=budget), rehearsed, dropout=0.3)
    return result, found, steps(strategy, dropout=0.3)


@pytest.mark.parametrize(
    ("strategy", "rehearsed"),
    [
        (ff.Strategy(microbatches=2), True),
        (ff.Strategy(width=2), False),
        (ff.Strategy(data=2, microbatches=2, shard_parameters=True), False),
    ],
    ids=lambda s: s if isinstance(s, bool) else f"{s.data}x{s.height}x{s.width}",
)
def test_a_step_stays_within_its_budget_and_is_the_same(strategy: ff.Strategy, rehearsed: bool) -> None:
    """Two budgets: a little below what all takes, and a little above the least. Also after a rehearsal."""
    everything = max(max(seen) for _, seen, _ in rank_group(strategy.ranks).run(within, strategy, rehearsed, 1 << 40))
    for budget in (everything * 9 // 10, everything * 6 // 10):
        for found, seen, expected in rank_group(strategy.ranks).run(within, strategy, rehearsed, budget):
            assert_same(found, expected)
            assert len(seen) == 2 + (2 + rehearsed) * strategy.microbatches, "two passes to measure, then the steps'"
            assert 0.5 * budget < max(seen[2:]) <= budget + 4096


def unequal() -> tuple[Costs, tuple[str, ...]]:
    rank = torch.distributed.get_rank()
    mine = Costs(10 - rank, (BlockCost("a", 5 + rank, 1.0 + 5 * rank), BlockCost("b", 6, 2.0 + rank)))
    return agreed(mine), choose(agreed(mine), 16)


def test_ranks_agree_on_the_most_bytes_and_the_first_ranks_seconds() -> None:
    expected = Costs(10, (BlockCost("a", 6, 1.0), BlockCost("b", 6, 2.0)))
    assert rank_group(2).run(unequal) == [(expected, ("a",))] * 2


def too_small() -> str:
    seed_everything(0)
    mesh = ff.init_mesh(width=2)
    model = ff.parallelize(blocks.network(), mesh)
    strategy = ff.Strategy(width=2, recompute="budget", recompute_budget_bytes=1000)
    step = ff.TrainStep(model, blocks.loss, torch.optim.SGD(model.parameters()), strategy)
    with pytest.raises(StrategyError) as raised:
        step(on_ranks(blocks.batch(), mesh, ("image", "target")))
    return str(raised.value)


def test_a_budget_that_cannot_be_met_is_refused_alike_on_all_ranks() -> None:
    first, second = rank_group(2).run(too_small)
    assert first == second
    assert "is 1000, but with all blocks recomputed that save any by it (3 of 3)" in first
    assert "more microbatches or ranks" in first


def test_a_forward_pass_that_asks_for_gradients_cannot_be_measured() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1))

    def forward() -> None:
        torch.autograd.grad(model(torch.ones(1, 3, 2, 2)).square().sum(), model[0].weight)

    with pytest.raises(StrategyError, match=r"asks for gradients .torch.autograd.grad.; use recompute='blocks'"):
        measured(model, ["0"], forward, lambda: 0.0)
