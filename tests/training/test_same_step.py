"""A loss that each rank of a replica computes for itself is refused by all of them, and one that is rounded is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import DivergenceError
from fullframe.model.parallelize_for import parallelize_for
from fullframe.training.same_step import SameStep
from tests.rank_group import rank_group

KEPT: list[Tensor] = []
Loss = Callable[[nn.Module, Any], Any]


def layers() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 1, 1))
    made[0].register_forward_hook(lambda module, inputs, output: KEPT.append(output.detach().square().mean()))
    return made.double()


def sound(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def of_its_part(model: nn.Module, batch: Tensor) -> Tensor:
    loss = sound(model, batch)
    return loss * (1 + batch.local[..., 0].abs().sum())


def by_rank(model: nn.Module, batch: Tensor) -> Tensor:
    return sound(model, batch) * (1 + dist.get_rank())


def by_count(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return sound(model, batch), 1 + dist.get_rank() % 2


def of_a_hook(model: nn.Module, batch: Tensor) -> Tensor:
    KEPT.clear()
    loss = sound(model, batch)
    return loss * (1 + sum(kept.item() for kept in KEPT))


def rounded(model: nn.Module, batch: Tensor) -> Tensor:
    return sound(model, batch) * (1 + 1e-5 * dist.get_rank())


def left_of_large(model: nn.Module, batch: Tensor) -> Tensor:
    """Nothing, and what rounding makes of that on one rank."""
    loss = sound(model, batch)
    return loss - loss.detach() + 1e-9 * dist.get_rank()


def stepped(loss: Loss, strategy: ff.Strategy) -> str:
    mesh = ff.init_mesh(width=strategy.width, stages=strategy.stages)
    model = parallelize_for(strategy, layers(), mesh)
    step = ff.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    samples = torch.arange(2 * 9 * 11, dtype=torch.float64).view(2, 1, 9, 11).sin()
    replica = dist.get_rank() * strategy.data // strategy.ranks
    batch = samples[replica : replica + 1] if strategy.data > 1 else samples
    try:
        for _ in range(2):
            step(ff.shard(batch, mesh) if strategy.stages == 1 else batch)
    except DivergenceError as error:
        return str(error)
    return ""


SPLIT, REPLICAS, STAGES = ff.Strategy(width=2), ff.Strategy(data=2, width=2), ff.Strategy(stages=2)
REFUSED = [
    (of_its_part, SPLIT), (by_rank, SPLIT), (by_count, SPLIT), (of_its_part, REPLICAS), (by_count, REPLICAS),
    (by_rank, ff.Strategy(width=2, update_in_backward=True)), (of_a_hook, STAGES),
]  # fmt: skip
TAKEN = [(sound, SPLIT), (sound, REPLICAS), (sound, STAGES), (rounded, SPLIT), (left_of_large, SPLIT)]
TAKEN += [(by_rank, ff.Strategy(data=2))]  # each replica's loss is its own


def name(value: Any) -> str:
    return value.__name__ if callable(value) else " x ".join(f"{axis} {n}" for axis, n in value.mesh.items())


@pytest.mark.parametrize(("loss", "strategy"), REFUSED, ids=name)
def test_a_loss_of_ones_own_is_refused_on_all_ranks(loss: Loss, strategy: ff.Strategy) -> None:
    for said in rank_group(strategy.ranks).run(stepped, loss, strategy):
        assert said.startswith("the ranks of a replica do not compute one loss: (sum, count) is "), said


@pytest.mark.parametrize(("loss", "strategy"), TAKEN, ids=name)
def test_one_that_is_the_same_but_for_rounding_is_taken(loss: Loss, strategy: ff.Strategy) -> None:
    assert rank_group(strategy.ranks).run(stepped, loss, strategy) == [""] * strategy.ranks


def asked(losses: list[float], counts: list[float]) -> bool:
    """Whether it is refused where two ranks tell these."""
    strategy = ff.Strategy(width=2)
    same = SameStep(strategy, torch.optim.SGD([torch.ones(1)], lr=0.1))
    rank = dist.get_rank()
    told = same.told(torch.tensor(losses[rank]), torch.tensor(counts[rank]))
    dist.all_reduce(told)
    try:
        same.require(told.tolist(), strategy)
    except DivergenceError:
        return True
    return False


@pytest.mark.parametrize(
    ("losses", "counts", "refused"),
    [
        ([2.5, 2.5], [7, 7], False), ([2.5, 2.6], [7, 7], True), ([2.5, 2.501], [7, 7], False),
        ([-3e7, -3e7], [1e9, 1e9], False), ([3e7, 3e7], [1e9, 1.1e9], True), ([0.0, 0.0], [0, 0], False),
        ([0.0, 1e-5], [100, 100], False), ([0.0, 1e-2], [100, 100], True), ([float("nan"), 2.5], [7, 7], False),
        ([float("inf"), 2.5], [7, 7], False), ([1e300, 1e300], [7, 7], False), ([1e-300, 1e-300], [7, 7], False),
    ],
)  # fmt: skip
def test_what_ranks_tell(losses: list[float], counts: list[float], refused: bool) -> None:
    """What is not finite is no loss of another rank's: its step is skipped."""
    assert rank_group(2).run(asked, losses, counts) == [refused] * 2
