"""Random functions: torch's distribution, other draws on each shard, equal whole values on all ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Op
from tests.spatial.values import found, infinite, on_all_meshes

DRAWS: dict[str, Op] = {
    "dropout in place": lambda x: F.dropout(x, 0.4, inplace=True),
    "dropout_": lambda x: torch.dropout_(x, 0.4, True),
    "bernoulli": lambda x: torch.bernoulli(x * 0, 0.6),
    "bernoulli_ of a map": lambda x: x.bernoulli_(torch.full(x.shape, 0.6, dtype=torch.float64)),
    "rand_like": lambda x: torch.rand_like(x, generator=torch.Generator().manual_seed(8)),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "uniform_": lambda x: x.uniform_(2, 3, generator=torch.Generator().manual_seed(8)),
    "exponential_": lambda x: x.exponential_(3),
    "geometric_": lambda x: x.geometric_(0.4),
    "random_": lambda x: x.random_(4),
}
UNBATCHED = {
    "dropout1d": F.dropout1d,
    "dropout3d": F.dropout3d,
    "alpha": F.feature_alpha_dropout,
}


def all_dropped(x: Tensor) -> list[Tensor]:
    return [
        F.dropout(x, 1.0),
        F.dropout(x * 1, 1.0, inplace=True),
        F.alpha_dropout(x, 1.0, True),
        F.alpha_dropout(x * 1, 1.0, True, True),
        F.dropout2d(x, 1.0),
        F.feature_alpha_dropout(x, 1.0, True),
        F.dropout3d(x * 1, 1.0, inplace=True),
    ]


def _random(name: str, height: int, width: int) -> tuple[float, float, float, bool]:
    """Mean and spread of what was drawn, over torch's; a later draw; whether the shards drew differently."""
    torch.manual_seed(0)
    plain = DRAWS[name](torch.ones(2, 3, 60, 84, dtype=torch.float64))
    torch.manual_seed(0)
    drawn = DRAWS[name](ff.shard(torch.ones(2, 3, 60, 84, dtype=torch.float64), mesh(height, width))).full()
    halves = drawn.chunk(2, 2 if height > 1 else 3)
    differ = not torch.equal(halves[0], halves[1])
    return float(drawn.mean() - plain.mean()), float(drawn.std() / plain.std()), float(torch.rand(())), differ


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_torchs_distribution_and_leave_all_ranks_alike(name: str) -> None:
    for height, width in ((1, 2), (2, 1)):
        answers = rank_group(2).run(_random, name, height, width)
        assert answers[0] == answers[1]
        shift, stretch, _, differ = answers[0]
        assert abs(shift) < 0.05 and abs(stretch - 1) < 0.05 and differ, answers


def _channels(name: str) -> tuple[list[float], bool]:
    torch.manual_seed(1)
    shape = {"dropout1d": (40, 6), "dropout3d": (40, 2, 4, 6), "alpha": (8, 5, 4, 6)}[name]
    split = ff.shard(torch.ones(shape, dtype=torch.float64).view((*shape[:-1], 1, 6) if name == "dropout1d" else shape),
                     mesh(1, 2))  # fmt: skip
    split = split.flatten(-2) if name == "dropout1d" else split
    dropped = UNBATCHED[name](split, 0.5, True).full()
    channels = dropped.flatten(2).flatten(0, 1) if len(shape) == 4 and name != "dropout3d" else dropped.flatten(1)
    return channels[:, 0].tolist(), bool((channels == channels[:, :1]).all())


@pytest.mark.parametrize("name", UNBATCHED)
def test_whole_channels_are_dropped_also_without_a_batch(name: str) -> None:
    answers = rank_group(2).run(_channels, name)
    assert answers[0] == answers[1]
    assert answers[0][1] and len(set(answers[0][0])) == 2


def _dropped(world: int) -> list[str]:
    return found({"dropped": (all_dropped, [infinite()], [])}, 1e-12, world)


def test_all_is_dropped_infinities_too() -> None:
    assert not on_all_meshes(_dropped)
