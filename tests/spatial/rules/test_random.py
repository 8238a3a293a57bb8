"""Random functions: one process's noise; for dropout torch's distribution; equal whole values on all ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Op, raised
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
    "normal": lambda x: torch.normal(x * 2, x),
    "normal around numbers": lambda x: torch.normal(2.0, x, generator=torch.Generator().manual_seed(8)),
    "normal of one spread": lambda x: torch.normal(mean=x, std=2.0),
    "normal around a whole tensor": lambda x: torch.normal(torch.full(x.shape[-1:], 3.0, dtype=torch.float64), std=x),
    "poisson": lambda x: torch.poisson(x * 3),
    "binomial": lambda x: torch.binomial(x * 5, x * 0.3),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "rrelu_": lambda x: F.rrelu(-x, 0.1, 0.5, True, inplace=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.7, dim=1),
    "gumbel_softmax along split dims": lambda x: F.gumbel_softmax(x, dim=2) * 60,
}
OF_EACH_SHARD = ("dropout in place", "dropout_", "rrelu", "rrelu_")
LIES: dict[str, Op] = {
    "as it is": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "every other row": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:1, :1].expand(2, 3, -1, -1),
    "flattened": lambda x: x.flatten(2),
    "a mask's pick": lambda x: x[x > 0.7],
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
    """Mean and spread of what was drawn, over torch's; a later draw; whether the parts differ."""
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


def _as_one(name: str, height: int, width: int) -> list[str]:
    """Ways to lie in memory whose draws, or those after them, are not one process's."""
    whole = torch.rand(2, 3, 13, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wrong = []
    for lies, view in LIES.items():
        if lies == "expanded" and name.endswith("_"):  # torch refuses to write there
            continue
        if lies != "as it is" and name == "bernoulli_ of a map":  # the map's own order
            continue
        if lies not in ("as it is", "channels last") and ("whole tensor" in name or "gumbel" in name):
            continue
        drawn = []
        for x in (whole, ff.shard(whole, mesh(height, width))):
            torch.manual_seed(3)
            made = DRAWS[name](view(x * 1))
            drawn += [made.full() if isinstance(made, ff.SpatialTensor) else made, torch.rand(()), made.stride()]
        (plain, after, lain), (got, later, lies_so) = drawn[:3], drawn[3:]
        strides = name.endswith("_like")  # torch without values does not know how `normal` and `poisson` lay theirs
        if not torch.allclose(plain, got, rtol=1e-12, atol=0) or after != later or (strides and lain != lies_so):
            wrong.append(lies)
    return wrong


@pytest.mark.parametrize("name", [name for name in DRAWS if name not in OF_EACH_SHARD])
def test_noise_is_that_of_one_process(name: str) -> None:
    for height, width in ((1, 2), (2, 2)):
        assert rank_group(height * width).run(_as_one, name, height, width) == [[]] * (height * width)


def _of_leaf() -> tuple[bool, bool]:
    whole = torch.rand(2, 3, 5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = []
    for x in (whole, ff.shard(whole, mesh(1, 2))):
        torch.manual_seed(3)
        noise = torch.randn_like(x, requires_grad=True)
        (noise.square() * x).sum().backward()
        assert noise.grad is not None
        gradients.append(noise.grad)
    split = gradients[1]
    assert isinstance(split, ff.SpatialTensor)
    return noise.is_leaf, torch.allclose(gradients[0], split.full(), rtol=1e-12, atol=0)


def test_noise_may_be_a_leaf() -> None:
    assert rank_group(2).run(_of_leaf) == [(True, True)] * 2


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


def _drawn_by_weights(height: int, width: int) -> list[bool]:
    weights = torch.rand(3, 1, 6, 10, generator=torch.Generator().manual_seed(2))
    split = ff.shard(weights, mesh(height, width)).requires_grad_()
    answers = []
    for repeat in (False, True):
        drawn = []
        for given in (weights, split):
            torch.manual_seed(5)
            rows = given.flatten(1)
            drawn.append([torch.multinomial(rows, 7, repeat), rows[0].multinomial(3, repeat), torch.rand(())])
        answers += map(torch.equal, *drawn)
    return answers


def test_numbers_are_drawn_by_weights_as_in_one_process() -> None:
    for height, width in ((1, 2), (2, 1), (2, 2)):
        answers = rank_group(height * width).run(_drawn_by_weights, height, width)
        assert answers == [[True] * 6] * (height * width)


def _one_hot() -> list[bool]:
    x = torch.randn(2, 3, 6, 10, dtype=torch.float64, requires_grad=True)
    split = ff.shard(x, mesh(2, 2))
    answers: list[bool] = []
    for dim in (1, 2, 3):
        hard = F.gumbel_softmax(split, hard=True, dim=dim).full()
        answers.append(torch.equal(hard.round().sum(dim), torch.ones_like(hard.sum(dim))))
        answers.append(bool((hard.max(dim).values > 0.999).all()))
        (F.gumbel_softmax(split, hard=True, dim=dim) * split.detach()).sum().backward()
        assert x.grad is not None
        answers.append(bool(x.grad.sum(dim).abs().max() < 1e-9) and bool(x.grad.abs().max() > 0))
        x.grad = None
    return answers


def test_a_hard_choice_is_one_along_the_dim_with_the_soft_ones_gradient() -> None:
    assert rank_group(4).run(_one_hot) == [[True] * 9] * 4


def _rectified(x: Tensor) -> list[Tensor]:
    return [
        F.rrelu(x),
        F.rrelu(x.abs() + 1, training=True),
        F.rrelu(x * 1, 0.1, 0.2, inplace=True),
        F.rrelu(x.abs() * 1, training=True, inplace=True),
    ]


def _evaluated(world: int) -> list[str]:
    return found({"rrelu": (_rectified, [infinite()], [])}, 1e-12, world)


def test_slopes_are_drawn_in_training_alone() -> None:
    assert not on_all_meshes(_evaluated)


def _refused(split: bool) -> list[str]:
    x = torch.ones(2, 3, 6, 10)
    x[0, 0, 0, 0] = -1  # on one rank alone
    x = ff.shard(x, mesh(1, 2)) if split else x
    return raised((
        lambda: torch.normal(0.0, x), lambda: torch.poisson(x), lambda: F.rrelu(x, 2, 1, True),
        lambda: torch.multinomial(x.flatten(1), 3), lambda: torch.poisson(x.long()), lambda: torch.normal(x, -1.0),
    ))  # fmt: skip


def test_what_torch_refuses_is_refused_on_all_ranks() -> None:
    assert rank_group(2).run(_refused, True) == [_refused(False)] * 2


def _slopes() -> list[bool]:
    x = torch.randn(2, 3, 6, 10, dtype=torch.float64, requires_grad=True)
    made = F.rrelu(ff.shard(x, mesh(1, 2)), 0.2, 0.4, training=True)
    made.sum().backward()
    slopes = x.grad
    assert slopes is not None
    drawn = slopes[x < 0]
    inside = bool(((drawn > 0.2) & (drawn < 0.4)).all()) and len(drawn.unique()) > 50
    return [torch.allclose(slopes * x, made.full()), inside, bool((slopes[x > 0] == 1).all())]


def test_the_gradient_is_the_slope_that_was_drawn() -> None:
    assert rank_group(2).run(_slopes) == [[True] * 3] * 2
