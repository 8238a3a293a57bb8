"""Reductions, losses and what works along a dim: torch's numbers with infinities, NaN, ties, zeros, in every dtype."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fullframe as ff
from tests.exactness import mesh, unlike
from tests.rank_group import rank_group

Op = Callable[..., Any]
MESHES = [(1, 2), (2, 1), (2, 2), (1, 3)]
SHAPE = (2, 3, 5, 7)
inf, nan = math.inf, math.nan


def drawn() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def infinite() -> Tensor:
    x = drawn()
    x[0, 0, 1, 1], x[0, 1, 4, 6], x[1, 0, 0, 0], x[1, 0, 4, 5], x[1, 1, 2, 3:5] = inf, -inf, inf, -inf, inf
    return x


def with_nan() -> Tensor:
    x = infinite()
    x[0, 2, 4, 6], x[0, 0, 0, 5], x[1, 2, 1, 2:4] = nan, nan, nan
    return x


def masked() -> Tensor:
    """Scores with -inf on one rank's columns and rows, and one row of nothing else."""
    x = drawn()
    x[:, :2, :, :4], x[0, :, 3:], x[1, 2, 1] = -inf, -inf, -inf
    return x


def tied() -> Tensor:
    x = torch.randint(-1, 2, SHAPE, generator=torch.Generator().manual_seed(4)).double()
    return torch.where(x == 0, -x, x)


def constant() -> Tensor:
    x = torch.full(SHAPE, 0.1, dtype=torch.float64)  # of which no sum is exact
    x[0, 0] = 0
    x[0, 1] = 2
    return x


FLOATS = {f.__name__: f for f in (drawn, infinite, with_nan, masked, tied, constant)}
ORDERS = (2, 1, 0, inf, -inf, 3, 1.5, 0.5, -1, -2)

OVER_FLOATS: dict[str, Op] = {
    "amax": lambda x: [x.amax((2, 3)), x.amax(3, True), x.amax(), x.amin((1, 2)), x.amin((0, 3)), x.amin()],
    "max": lambda x: [x.max(), x.min(), x.flatten(2).max(), x.relu().max(), x.relu().min()],
    "max along a dim": lambda x: [*x.max(3), *x.min(2, keepdim=True), *x.relu().max(3), *x.relu().min(2)],
    "aminmax": lambda x: [*x.aminmax(), *x.aminmax(dim=3), *x.aminmax(dim=2, keepdim=True)],
    "argmax": lambda x: [x.argmax(), x.argmin(), x.argmax(3), x.argmin(2, True), x.argmax(keepdim=True),
                         x.relu().argmax(), x.flatten(2).argmax(2), x.flatten(1).argmin()],
    "sum": lambda x: [x.sum(), x.sum((2, 3)), x.nansum(3), x.nansum(), x.sum(2, dtype=torch.float32)],
    "mean": lambda x: [x.mean(), x.mean((2, 3)), x.nanmean(3), x.nanmean(), x.mean(2, dtype=torch.float32)],
    "prod": lambda x: [x.prod(3), x.prod(2, keepdim=True), x.prod(), x.prod(1)],
    "var": lambda x: [x.var((2, 3)), x.var(), x.var(3, correction=0), x.var(2, correction=7), x.var(correction=900)],
    "std": lambda x: [x.std((2, 3)), x.std(), x.std(3, correction=0), x.std(1), x.std(2, keepdim=True)],
    "written over": lambda x: [x.var(3, True).add_(1e-5).sqrt_(), x.mean(2).mul_(2), x.cumsum(3).neg_(),
                               x.sum(2).add_(1), torch.var_mean(x, 3)[1].mul_(3), x.max(3).values.mul_(2)],
    "var_mean": lambda x: [*torch.var_mean(x, (2, 3)), *torch.std_mean(x, 3, keepdim=True), *torch.std_mean(x)],
    "norms over a dim": lambda x: [torch.linalg.vector_norm(x, p, 3) for p in ORDERS],
    "norms over the plane": lambda x: [torch.linalg.vector_norm(x, p, (2, 3), True) for p in ORDERS],
    "norms": lambda x: [x.norm(), x.norm(p=1, dim=2), x.norm(3), x.norm(inf), x.dist(x * 0.5), x.dist(x, 1)],
    "logsumexp": lambda x: [x.logsumexp((2, 3)), x.logsumexp(3, True), x.logsumexp(1)],
    "softmax": lambda x: [x.softmax(3), x.softmax(2), x.flatten(2).softmax(2), F.softmin(x, 3)],
    "log_softmax": lambda x: [x.log_softmax(3), F.log_softmax(x, 2), torch.log_softmax(x.flatten(2), 2)],
    "cumsum": lambda x: [x.cumsum(3), x.cumsum(2), x.cumsum(1), x.cumsum(3, dtype=torch.float32)],
    "along whole dims": lambda x: [x.cumprod(1), x.logcumsumexp(1), *x.sort(1), *torch.sort(x, dim=1, stable=True),
                                   *x.sort(1, True), *x.sort(descending=True, dim=0, stable=True), x.argsort(1),
                                   torch.argsort(x, stable=True, dim=1), x.msort(), *x.topk(2, 1), F.glu(x, 0)],
    "comparisons": lambda x: [x * torch.equal(x, x), x * torch.allclose(x, x), x * torch.allclose(x, x[:1]),
                              x * torch.allclose(x * 0, x[:, :1] * 0), x * torch.equal(x, x[:1]),
                              x * torch.allclose(x, x, equal_nan=True)],
}  # fmt: skip


def _told(op: Op) -> Op:
    """The op's results, and whether each requires a gradient."""

    def told(*operands: Tensor) -> Any:
        results = [t for t in tree_leaves(op(*operands)) if isinstance(t, Tensor)]
        return [*results, *(torch.tensor(t.requires_grad) for t in results)]

    return told


def _found(cases: dict[str, tuple[Op, list[Tensor], list[Tensor]]], tolerance: float, world: int) -> list[str]:
    found = []
    for height, width in (pair for pair in MESHES if pair[0] * pair[1] == world):
        for name, (op, split, whole) in cases.items():
            wrong = unlike(_told(op), split, whole, height, width, tolerance)
            found += [f"{name} on {height}x{width}: {what}" for what in wrong]
    return found


def _on_all_meshes(function: Callable[..., list[str]], *args: Any) -> list[str]:
    answers = [rank_group(world).run(function, *args, world) for world in (2, 3, 4)]
    return [wrong for ranks in answers for found in ranks for wrong in found]


def _floats(name: str, world: int) -> list[str]:
    cases = {data: (OVER_FLOATS[name], [FLOATS[data]()], []) for data in FLOATS}
    return _found(cases, 1e-6 if name in ("sum", "mean", "cumsum") else 1e-12, world)


@pytest.mark.parametrize("name", OVER_FLOATS)
def test_non_finite_values_ties_and_zeros_go_through_as_in_torch(name: str) -> None:
    assert not _on_all_meshes(_floats, name)


HALVES: dict[str, Op] = {
    "sums": lambda x: [x.sum((2, 3)), x.nansum(3), x.sum(), x.sum(2, dtype=torch.float32), x.cumsum(3), x.cumsum(2)],
    "means": lambda x: [x.mean(), x.mean((2, 3)), x.mean(3, dtype=torch.float64), x.nanmean(3)],
    "spread": lambda x: [x.var((2, 3)), x.std(3), *torch.var_mean(x, 2), *torch.std_mean(x)],
    "norms": lambda x: [x.norm(), x.norm(3, 3), x.norm(1, 2), x.norm(inf), x.norm(0), x.dist(x * 0.5),
                        torch.linalg.vector_norm(x, 2, (2, 3), dtype=torch.float32)],
    "distances": lambda x: [F.normalize(x, dim=3), F.pairwise_distance(x, x * 0.5)],
    "extremes": lambda x: [x.amax(3), *x.max(2), x.max(), *x.aminmax(), x.argmin(), x.argmax(3)],
    "exponentials": lambda x: [x.softmax(3), x.log_softmax(2), x.logsumexp(3), x.softmax(3, dtype=torch.float32)],
    "prod": lambda x: [(x / 100).prod(3), (x / 100).prod()],
    "pointwise losses": lambda x: [F.mse_loss(x / 50, x / 99), F.l1_loss(x, x / 2), F.huber_loss(x, x / 2),
                                   F.smooth_l1_loss(x, x / 2), F.soft_margin_loss(x, x.detach().sign()),
                                   F.binary_cross_entropy_with_logits(x, x.sigmoid().detach())],
    "classification": lambda x: [F.cross_entropy(x / 50, _classes(x)), F.nll_loss(x / 50, _classes(x)),
                                 F.cross_entropy(x / 50, _classes(x), label_smoothing=0.1)],
}  # fmt: skip
INTEGERS: dict[str, Op] = {
    "extremes": lambda x: [x.amax((2, 3)), x.amin(3), x.amin(), x.max(), x.min(), *x.aminmax(), *x.max(3), *x.min(2)],
    "sums": lambda x: [x.sum(), x.sum(3), x.cumsum(3), *_cumulated(x), x.prod(3), x.count_nonzero(), x.nansum(3)],
    "sums of a dtype": lambda x: [x.sum(3, dtype=torch.int32), x.sum(2, dtype=torch.float16),
                                  x.sum(3, dtype=torch.bool), x.mean(3, dtype=torch.float32),
                                  x.sum((2, 3), dtype=torch.uint8), x.prod(2, dtype=torch.bool)],
    "any, all": lambda x: [x.any(), x.all(), x.any(3), x.all(2, keepdim=True), (x * 0).any(), x.any(1),
                           (x * 0 + 1).all()],
    "positions": lambda x: [x.argmax(), x.argmin(3), x.argmax(keepdim=True)] if x.dtype != torch.bool else [],
    "exponentials": lambda x: [x.logsumexp(3)] if x.dtype != torch.bool else [],
}  # fmt: skip


def _cumulated(x: Tensor) -> list[Tensor]:
    return [] if x.dtype == torch.bool else [x.cumsum(2, dtype=x.dtype)]


def _classes(x: Tensor) -> Tensor:
    classes = (x[:, 0].detach().abs().float() * 7).long() % 4
    return torch.where(classes == 3, -100, classes)


def _dtypes(name: str, kind: str, world: int) -> list[str]:
    dtype: torch.dtype = getattr(torch, kind)
    x = torch.randn((2, 4, 9, 301), generator=torch.Generator().manual_seed(5))
    if dtype.is_floating_point:
        return _found({kind: (HALVES[name], [(x * 100).to(dtype)], [])}, max(4 * torch.finfo(dtype).eps, 3e-6), world)
    x = (x[:, :, :5, :7] * 99).to(torch.int64).to(dtype)
    x[0, 1], x[1, 0, :, 5:], x[1, 1] = 0, 0, 1
    return _found({kind: (INTEGERS[name], [x], [])}, 1e-6, world)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", HALVES)
def test_short_floats_are_added_up_as_widely_as_in_torch(name: str, kind: str) -> None:
    assert not _on_all_meshes(_dtypes, name, kind)


@pytest.mark.parametrize("kind", ["uint8", "int16", "bool"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_give_torchs_numbers_and_dtypes(name: str, kind: str) -> None:
    assert not _on_all_meshes(_dtypes, name, kind)


def _signs(x: Tensor) -> Tensor:
    return x.detach().sign() + (x.detach() == 0)


def _rows(x: Tensor) -> Tensor:
    """(N * H * W, C)."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def _positive(x: Tensor) -> Tensor:
    return x.detach().abs() + 0.1


POINTWISE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": lambda x, w, **how: F.mse_loss(x, x.sin(), **how),
    "mse weighed": lambda x, w, **how: F.mse_loss(x, x.sin(), weight=_positive(x), **how),
    "l1 weighed": lambda x, w, **how: F.l1_loss(x, x.sin(), weight=_positive(x), **how),
    "l1 weighed by a whole tensor": lambda x, w, **how: F.l1_loss(
        x, x.sin(), weight=w.expand(x.shape).detach(), **how),
    "l1 of a split weight alone": lambda x, w, **how: F.l1_loss(
        w.expand(x.shape) * 2, w.expand(x.shape), weight=x, **how),
    "smooth l1 beta": lambda x, w, **how: F.smooth_l1_loss(x, x.sin(), beta=0.3, **how),
    "bce": lambda x, w, **how: F.binary_cross_entropy(x.sigmoid(), (x > 0).double(), w[0, 0].detach(), **how),
    "bce with logits": lambda x, w, **how: F.binary_cross_entropy_with_logits(
        x, (x > 0).double(), _positive(x), pos_weight=w[0].detach() ** 2, **how),
    "kl_div": lambda x, w, **how: F.kl_div(x.log_softmax(1), x.detach().softmax(1), log_target=False, **how),
    "soft_margin": lambda x, w, **how: F.soft_margin_loss(x, _signs(x), **how),
    "hinge_embedding": lambda x, w, **how: F.hinge_embedding_loss(x, _signs(x), 0.7, **how),
    "margin_ranking": lambda x, w, **how: F.margin_ranking_loss(x, x.cos(), _signs(x), 0.1, **how),
    "poisson_nll": lambda x, w, **how: F.poisson_nll_loss(x, _positive(x), False, True, **how),
    "multilabel_soft_margin": lambda x, w, **how: F.multilabel_soft_margin_loss(
        _rows(x), (_rows(x.detach()) > 0).double(), w.flatten()[:3].detach(), **how),
    "multilabel_margin": lambda x, w, **how: F.multilabel_margin_loss(
        _rows(x), _rows((x.detach() > 0).long() * 3 - 1), **how),
    "multi_margin": lambda x, w, **how: F.multi_margin_loss(
        _rows(x), _rows(x.detach()).argmin(1), 2, 0.8, w.flatten()[:3].detach(), **how),
    "cosine_embedding": lambda x, w, **how: F.cosine_embedding_loss(
        _rows(x), _rows(x.cos()), _signs(_rows(x)[:, 0]), 0.1, **how),
    "triplet_margin": lambda x, w, **how: F.triplet_margin_loss(
        _rows(x), _rows(x.cos()), _rows(x.sin()), 2.0, swap=True, **how),
    "cross_entropy": lambda x, w, **how: F.cross_entropy(x, _classes(x) % 3, **how),
    "nll weighed": lambda x, w, **how: F.nll_loss(
        x.log_softmax(1), _classes(x) % 3, w.flatten()[:3].detach(), ignore_index=1, **how),
}  # fmt: skip
HOW: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "size_average": {"size_average": False},
    "reduce": {"reduce": False, "reduction": "mean"},
    "both": {"size_average": True, "reduce": True, "reduction": "sum"},
}


def _scores(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def _losses(name: str, world: int) -> list[str]:
    loss, x, w = POINTWISE_LOSSES[name], _scores(*SHAPE), _scores(1, 1, 1, 7).abs() + 0.5
    cases = {how: (lambda x, w, options=options: loss(x, w, **options), [x], [w]) for how, options in HOW.items()}
    return _found(cases, 1e-12, world)


@pytest.mark.parametrize("name", POINTWISE_LOSSES)
def test_losses_take_every_reduction_as_torch_does(name: str) -> None:
    assert not _on_all_meshes(_losses, name)


OTHER_LOSSES: dict[str, Op] = {
    "gaussian": lambda x: [
        F.gaussian_nll_loss(x, x.sin(), var, full, reduction=how)
        for var in (x.exp(), x[:, :, :, :1].detach().exp(), x[:, :1].exp(), x[..., 0].exp(), 0.3)
        for full, how in ((False, "mean"), (True, "sum"), (True, "none"))
    ],
    "kl_div batchmean": lambda x: F.kl_div(x.log_softmax(1), x.log_softmax(3), reduction="batchmean", log_target=True),
    "triplet with distance": lambda x: [
        F.triplet_margin_with_distance_loss(x, x.sin(), x.cos(), distance_function=distance, swap=True)
        for distance in (None, lambda a, b: (a - b).abs().amax(1))
    ],
    "probabilities": lambda x: [
        F.cross_entropy(x, x.detach().sin().softmax(1), weight, reduction=how, label_smoothing=smoothing)
        for weight in (None, torch.tensor([0.2, 3, 1]).double())
        for how, smoothing in (("mean", 0.0), ("sum", 0.1), ("none", 0.3), ("mean", 0.2))
    ],
    "smoothing": lambda x: [
        F.cross_entropy(x, _classes(x) % 3, weight, ignore_index=ignored, reduction=how, label_smoothing=0.2)
        for weight in (None, torch.tensor([0.2, 3, 1]).double())
        for how in ("mean", "sum", "none")
        for ignored in (-100, 1)
    ],
    "rows": lambda x: [
        F.cross_entropy(_rows(x), _classes(_rows(x)[:, :, None])[:, 0] % 3),
        F.cross_entropy(x.flatten(2), _classes(x).flatten(1) % 3),
        F.cross_entropy(x[:, :, None], (_classes(x) % 3)[:, None]),
        F.cross_entropy(x[0, :, 0].detach().mean(-1) * x.mean(), torch.tensor(1)),
    ],
    "no pixel is valid": lambda x: [
        F.cross_entropy(x, _classes(x) * 0 - 100), F.cross_entropy(x, _classes(x) * 0 - 100, label_smoothing=0.1),
        F.nll_loss(x, _classes(x) * 0 + 2, ignore_index=2), F.cross_entropy(x, _classes(x) * 0 - 100, reduction="sum"),
    ],
    "a weight of infinity that is ignored": lambda x: F.nll_loss(
        x, torch.where(_classes(x) == 0, 1, _classes(x)) % 3, torch.tensor([inf, 1, 2]).double(), ignore_index=0),
    "labels alone are split": lambda x: F.cross_entropy(
        torch.linspace(-1, 1, 105).double().view(1, 3, 5, 7).expand(2, -1, -1, -1), _classes(x) % 3) * x.mean(),
    "empty batch": lambda x: [x[:0].mean(), x[:0].var(), x[:0].sum(), x[:0].norm(), F.mse_loss(x[:0], x[:0]),
                              x[:0].mean(0), x[:0].mean(3), x[:, :0].std(3), x[:0].softmax(3), x[:0].cumsum(2),
                              x[:0].logsumexp(3), F.cross_entropy(x[:0], _classes(x)[:0]), x[:0].any(3)],
}  # fmt: skip


def _other_losses(name: str, world: int) -> list[str]:
    return _found({name: (OTHER_LOSSES[name], [_scores(*SHAPE)], [])}, 1e-12, world)


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_losses_of_odd_shapes_and_weights(name: str) -> None:
    assert not _on_all_meshes(_other_losses, name)


def _indices(x: Tensor) -> Tensor:
    return (x[:, 0].detach().abs() * 7).long() % 5


def _shortened(indices: Tensor, table: Tensor) -> list[Tensor]:
    return [F.embedding(indices, table, max_norm=0.5, norm_type=3), table]


ALONG: dict[str, Op] = {
    "one_hot": lambda x, w: [F.one_hot(_indices(x), 6), F.one_hot(_indices(x))],
    "embedding by frequency": lambda x, w: F.embedding(_indices(x), w, padding_idx=-2, scale_grad_by_freq=True),
    "embedding of a largest norm": lambda x, w: _shortened(_indices(x), w.detach().clone()),
    "softmax without a dim": lambda x, w: [F.softmax(x, None), F.log_softmax(x[0], None), F.softmin(x[0])],
    "all dropped": lambda x, w: [F.dropout(x, 1.0), F.dropout(x * 1, 1.0, inplace=True), F.alpha_dropout(x, 1.0, True),
                                 F.alpha_dropout(x * 1, 1.0, True, True), F.dropout2d(x, 1.0),
                                 F.feature_alpha_dropout(x, 1.0, True), F.dropout3d(x * 1, 1.0, inplace=True)],
}  # fmt: skip


def _along(name: str, world: int) -> list[str]:
    x = infinite() if name == "all dropped" else _scores(*SHAPE)
    return _found({name: (ALONG[name], [x], [_scores(5, 4)])}, 1e-12, world)


@pytest.mark.parametrize("name", ALONG)
def test_functions_along_a_dim(name: str) -> None:
    assert not _on_all_meshes(_along, name)


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


UNBATCHED = {
    "dropout1d": F.dropout1d,
    "dropout3d": F.dropout3d,
    "alpha": F.feature_alpha_dropout,
}


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


def _refused() -> int:
    split = ff.shard(torch.ones(1, 1, 3, 4), mesh(1, 2))
    calls = [
        lambda: F.prelu(torch.ones(1, 4), split.view(3, 4)[0]),
        lambda: F.embedding(torch.ones(2).long(), split[0, 0]),
    ]
    for call in calls:
        with pytest.raises(ff.UnsupportedOp):
            call()
    return len(calls)


def test_a_split_weight_or_table_of_a_whole_operand_is_refused_by_name() -> None:
    assert rank_group(2).run(_refused) == [2, 2]


def _large(world: int) -> list[str]:
    """Of which each rank's share is too large for a mailbox."""
    x = torch.randn(4, 64, 512, 6, generator=torch.Generator().manual_seed(9))
    ops: dict[str, Op] = {
        "values": lambda x: [x.amax(3), *(x * 99).short().max(3), x.logsumexp(3), x.softmax(3), x.cumsum(3)],
    }
    return _found({name: (op, [x], []) for name, op in ops.items()}, 3e-6, world)


def test_large_messages_of_any_dtype() -> None:
    assert not [wrong for found in rank_group(2).run(_large, 2) for wrong in found]
