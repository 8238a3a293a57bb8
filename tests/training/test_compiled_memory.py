"""Compiled blocks hold what they are asked to hold: a budget in bytes stays one, and what is offloaded is let go."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.model.compiled import blocks
from fullframe.model.parallelize_for import parallelize_for
from fullframe.training import host
from tests.rank_group import rank_group
from tests.techniques.test_offload import Watched
from tests.training.test_compiled import Model, batches, loss

Result = tuple[list[float], list[Tensor]]


def stepped(strategy: ff.Strategy, of_batch: Any = loss) -> tuple[Result, str]:
    """Losses and parameters of five steps, and which blocks were compiled."""
    torch.manual_seed(0)
    net, mesh = Model().double(), ff.init_mesh(width=strategy.width)
    with mock.patch.object(blocks, "Programs", partial(blocks.Programs, "aot_eager")):
        model = parallelize_for(strategy, net, mesh)
        step = ff.TrainStep(model, of_batch, torch.optim.SGD(model.parameters(), lr=0.05), strategy)
    losses = [step({key: ff.shard(value, mesh) for key, value in batch.items()}).loss for batch in batches()]
    said = model.compiled.summary if model.compiled is not None else ""
    return (losses, [p.detach() for p in net.parameters()]), said


def within(strategy: ff.Strategy, passes: int) -> tuple[Result, str, list[int]]:
    """And the bytes that are saved when each forward pass ends, the first `passes` aside."""
    found: list[int] = []
    calls = 0

    def watched(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= passes:
            return loss(model, batch)
        saved: dict[int, weakref.ref[Any]] = {}

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                saved[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = loss(model, batch)
        alive = [storage for one in saved.values() if (storage := one()) is not None]
        found.append(sum(storage.nbytes() for storage in alive))
        return result

    return *stepped(strategy, watched), found


def test_a_budget_in_bytes_is_kept_to() -> None:
    compiled, ranks = ff.Strategy(compile=True, width=2), rank_group(2)
    (expected, _, _), _ = ranks.run(within, replace(compiled, compile=False), 0)
    everything = max(max(seen) for _, _, seen in ranks.run(within, compiled, 0))
    budget = everything * 7 // 10
    strategy = replace(compiled, recompute="budget", recompute_budget_bytes=budget)
    for (losses, parameters), said, seen in ranks.run(within, strategy, 2):
        assert said.startswith("3 of 3 blocks are compiled (1 programs")
        assert losses == pytest.approx(expected[0], rel=1e-11)
        torch.testing.assert_close(parameters, expected[1], rtol=1e-9, atol=1e-12)
        assert len(seen) == 5 and 0.5 * budget < max(seen) <= budget + 1024, (seen, budget)


def offloaded(strategy: ff.Strategy) -> tuple[Result, str, int, int, bool]:
    """With what was sent away, what of it is still there after the forward pass, and whether parameters were sent."""
    offload, left, weights = Watched(), [], False

    def watched(model: nn.Module, batch: Any) -> Any:
        result = loss(model, batch)
        gc.collect()
        kept = [storage for parked in offload.all if (storage := parked.source()) is not None]
        left.append(sum(storage.nbytes() for storage in kept))
        nonlocal weights
        weights = weights or not {p.untyped_storage()._cdata for p in model.parameters()}.isdisjoint(
            storage._cdata for storage in kept
        )
        return result

    with mock.patch.object(host, "saving_to_host", lambda device: offload.saving):
        result, said = stepped(strategy, watched)
    return result, said, sum(offload.sent), sum(left), weights


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_what_is_offloaded_is_let_go(recompute: Any) -> None:
    strategy = ff.Strategy(compile=True, width=2, offload=True, recompute=recompute)
    expected, _ = rank_group(2).run(stepped, ff.Strategy(width=2))[0]
    for (losses, parameters), said, sent, left, weights in rank_group(2).run(offloaded, strategy):
        assert said.startswith("3 of 3 blocks are compiled (1 programs")
        assert losses == pytest.approx(expected[0], rel=1e-11)
        torch.testing.assert_close(parameters, expected[1], rtol=1e-9, atol=1e-12)
        assert sent > 0 and left < 0.4 * sent and not weights, (sent, left, weights)


def test_one_program_recomputes_nothing() -> None:
    for options in ({"recompute": "blocks"}, {"recompute": "budget", "recompute_budget_bytes": 1 << 30}):
        with pytest.raises(StrategyError, match="compile was not made for recompute with 'all'; leave one out"):
            ff.Strategy(compile="all", **options)
