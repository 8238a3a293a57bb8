"""Losses: every reduction, ignored labels, weights, odd shapes, short floats."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process, one
from tests.spatial.values import SHAPE, as_in_torch, classes, found, inf, on_all_meshes, positive, rows, scores, signs


def labels(x: Tensor, ignore: bool = False) -> Tensor:
    """Class numbers (N, H, W) that follow from the values, whatever the split."""
    classes = (x[:, 0].detach().abs() * 7).long() % 4
    return torch.where(classes == 3, -100, classes) if ignore else classes


def of_rows(x: Tensor, weight: Tensor, bias: Tensor, two: Tensor) -> list[Tensor]:
    """Pixels as rows, to logits and their loss in one function."""
    rows, classes = x.permute(0, 2, 3, 1).flatten(0, 2), (x[:, 0] > 0).flatten().long() * 3
    of_two = torch.stack([classes, classes // 3], 1)
    return [
        F.linear_cross_entropy(rows, weight, classes, linear_bias=bias, label_smoothing=0.1),
        F.linear_cross_entropy(rows, weight, classes, ignore_index=3, weight=bias.detach().abs()),
        F.linear_cross_entropy(rows, two, of_two, linear_bias=two[..., 0], reduction="sum"),
        F.linear_cross_entropy(rows, weight, (rows @ weight.t()).detach().softmax(1), reduction="none"),
    ]


CASES: dict[str, Case] = {
    "labels split along another dim": one(
        lambda x: F.cross_entropy(x[..., : x.shape[2]], labels(x[..., : x.shape[2]].transpose(2, 3)))
    ),
    "cross_entropy": one(lambda x: F.cross_entropy(x, labels(x))),
    "cross_entropy ignore_index": one(lambda x: F.cross_entropy(x, labels(x, True))),
    "cross_entropy weights": Case(lambda x, w: F.cross_entropy(x, labels(x, True), w.abs().detach()), whole=((4,),)),
    "cross_entropy smoothing": one(lambda x: F.cross_entropy(x, labels(x, True), label_smoothing=0.1)),
    **{f"cross_entropy of split classes {n}": one(
        lambda x, n=n: F.cross_entropy(x[0].movedim(n, 1), (x[0].movedim(n, 1)[:, 0] > 0) * 3)
    ) for n in (1, 2)},
    "cross_entropy of split probabilities": one(
        lambda x: F.cross_entropy(x[0], x[0].detach().sin().softmax(1), label_smoothing=0.1, reduction="none")
    ),
    "nll_loss of rows": one(lambda x: F.nll_loss(x[0, 0].log_softmax(1), labels(x)[0, :, 0], reduction="sum")),
    "margins of split rows": one(lambda x: [
        F.multi_margin_loss(x[0, 0], labels(x)[0, :, 0], margin=0.5),
        F.multilabel_margin_loss(x[0, 0].sigmoid(), labels(x)[0] - 1, reduction="none"),
        F.cosine_embedding_loss(x[0, 0], x[0, 1], x[0, 2, :, 0].detach().sign(), reduction="sum"),
    ]),
    **({"linear_cross_entropy": Case(of_rows, whole=((5, 4), (5,), (5, 2, 4)))}
       if hasattr(F, "linear_cross_entropy") else {}),  # since torch 2.13
    "cross_entropy none, sum": one(
        lambda x: [F.cross_entropy(x, labels(x), reduction="none"), F.cross_entropy(x, labels(x), reduction="sum")]
    ),
    "cross_entropy probabilities": one(lambda x: F.cross_entropy(x, x.detach().sin().softmax(1))),
    "nll_loss": one(lambda x: F.nll_loss(F.log_softmax(x, 1), labels(x, True))),
    "mse_loss": one(lambda x: F.mse_loss(x, x.detach().sin())),
    "l1, smooth_l1, huber": one(
        lambda x: [f(x, x.detach().sin()) for f in (F.l1_loss, F.smooth_l1_loss, F.huber_loss)]
    ),
    "bce": one(lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0).double(), reduction="sum")),
    "bce with logits": Case(
        lambda x, w: F.binary_cross_entropy_with_logits(x, (x > 0).double(), pos_weight=w.detach()[:, None, None] ** 2),
        whole=((4,),),
    ),
    "margin losses": one(
        lambda x: [
            F.hinge_embedding_loss(x, x.detach().sign()),
            F.margin_ranking_loss(x, x.sin(), x.detach().sign(), 0.1),
            F.multilabel_soft_margin_loss(x.permute(0, 2, 3, 1), (x.detach() > 0).double().permute(0, 2, 3, 1)),
            F.gaussian_nll_loss(x, x.detach().sin(), x.detach().abs() + 0.1),
            F.poisson_nll_loss(x, x.detach().abs()),
        ]
    ),
    "kl_div": one(lambda x: F.kl_div(x.log_softmax(1), x.detach().sin().softmax(1), reduction="batchmean")),
    "mse with a whole target": Case(lambda x, y: F.mse_loss(x, y.expand(x.shape)), whole=((1, 4, 1, 1),)),
    "operands called x1 and x2": one(lambda x: F.cosine_similarity(x1=x, x2=x.sin(), dim=1)),
}  # fmt: skip
HALVES: dict[str, Op] = {
    "pointwise losses": lambda x: [F.mse_loss(x / 50, x / 99), F.l1_loss(x, x / 2), F.huber_loss(x, x / 2),
                                   F.smooth_l1_loss(x, x / 2), F.soft_margin_loss(x, x.detach().sign()),
                                   F.binary_cross_entropy_with_logits(x, x.sigmoid().detach())],
    "classification": lambda x: [F.cross_entropy(x / 50, classes(x)), F.nll_loss(x / 50, classes(x)),
                                 F.cross_entropy(x / 50, classes(x), label_smoothing=0.1)],
}  # fmt: skip
POINTWISE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": lambda x, w, **how: F.mse_loss(x, x.sin(), **how),
    "mse weighed": lambda x, w, **how: F.mse_loss(x, x.sin(), weight=positive(x), **how),
    "l1 weighed": lambda x, w, **how: F.l1_loss(x, x.sin(), weight=positive(x), **how),
    "l1 weighed by a whole tensor": lambda x, w, **how: F.l1_loss(
        x, x.sin(), weight=w.expand(x.shape).detach(), **how),
    "l1 of a split weight alone": lambda x, w, **how: F.l1_loss(
        w.expand(x.shape) * 2, w.expand(x.shape), weight=x, **how),
    "smooth l1 beta": lambda x, w, **how: F.smooth_l1_loss(x, x.sin(), beta=0.3, **how),
    "bce": lambda x, w, **how: F.binary_cross_entropy(x.sigmoid(), (x > 0).double(), w[0, 0].detach(), **how),
    "bce with logits": lambda x, w, **how: F.binary_cross_entropy_with_logits(
        x, (x > 0).double(), positive(x), pos_weight=w[0].detach() ** 2, **how),
    "kl_div": lambda x, w, **how: F.kl_div(x.log_softmax(1), x.detach().softmax(1), log_target=False, **how),
    "soft_margin": lambda x, w, **how: F.soft_margin_loss(x, signs(x), **how),
    "hinge_embedding": lambda x, w, **how: F.hinge_embedding_loss(x, signs(x), 0.7, **how),
    "margin_ranking": lambda x, w, **how: F.margin_ranking_loss(x, x.cos(), signs(x), 0.1, **how),
    "poisson_nll": lambda x, w, **how: F.poisson_nll_loss(x, positive(x), False, True, **how),
    "multilabel_soft_margin": lambda x, w, **how: F.multilabel_soft_margin_loss(
        rows(x), (rows(x.detach()) > 0).double(), w.flatten()[:3].detach(), **how),
    "multilabel_margin": lambda x, w, **how: F.multilabel_margin_loss(
        rows(x), rows((x.detach() > 0).long() * 3 - 1), **how),
    "multi_margin": lambda x, w, **how: F.multi_margin_loss(
        rows(x), rows(x.detach()).argmin(1), 2, 0.8, w.flatten()[:3].detach(), **how),
    "cosine_embedding": lambda x, w, **how: F.cosine_embedding_loss(
        rows(x), rows(x.cos()), signs(rows(x)[:, 0]), 0.1, **how),
    "triplet_margin": lambda x, w, **how: F.triplet_margin_loss(
        rows(x), rows(x.cos()), rows(x.sin()), 2.0, swap=True, **how),
    "cross_entropy": lambda x, w, **how: F.cross_entropy(x, classes(x) % 3, **how),
    "nll weighed": lambda x, w, **how: F.nll_loss(
        x.log_softmax(1), classes(x) % 3, w.flatten()[:3].detach(), ignore_index=1, **how),
}  # fmt: skip
HOW: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "size_average": {"size_average": False},
    "reduce": {"reduce": False, "reduction": "mean"},
    "both": {"size_average": True, "reduce": True, "reduction": "sum"},
}

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
        F.cross_entropy(x, classes(x) % 3, weight, ignore_index=ignored, reduction=how, label_smoothing=0.2)
        for weight in (None, torch.tensor([0.2, 3, 1]).double())
        for how in ("mean", "sum", "none")
        for ignored in (-100, 1)
    ],
    "rows": lambda x: [
        F.cross_entropy(rows(x), classes(rows(x)[:, :, None])[:, 0] % 3),
        F.cross_entropy(x.flatten(2), classes(x).flatten(1) % 3),
        F.cross_entropy(x[:, :, None], (classes(x) % 3)[:, None]),
        F.cross_entropy(x[0, :, 0].detach().mean(-1) * x.mean(), torch.tensor(1)),
    ],
    "no pixel is valid": lambda x: [
        F.cross_entropy(x, classes(x) * 0 - 100), F.cross_entropy(x, classes(x) * 0 - 100, label_smoothing=0.1),
        F.nll_loss(x, classes(x) * 0 + 2, ignore_index=2), F.cross_entropy(x, classes(x) * 0 - 100, reduction="sum"),
    ],
    "a weight of infinity that is ignored": lambda x: F.nll_loss(
        x, torch.where(classes(x) == 0, 1, classes(x)) % 3, torch.tensor([inf, 1, 2]).double(), ignore_index=0),
    "labels alone are split": lambda x: F.cross_entropy(
        torch.linspace(-1, 1, 105).double().view(1, 3, 5, 7).expand(2, -1, -1, -1), classes(x) % 3) * x.mean(),
    "empty batch": lambda x: [x[:0].mean(), x[:0].var(), x[:0].sum(), x[:0].norm(), F.mse_loss(x[:0], x[:0]),
                              x[:0].mean(0), x[:0].mean(3), x[:, :0].std(3), x[:0].softmax(3), x[:0].cumsum(2),
                              x[:0].logsumexp(3), F.cross_entropy(x[:0], classes(x)[:0]), x[:0].any(3)],
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
test_unusual_values_and_dtypes_as_in_torch = as_in_torch(__name__, {}, HALVES)


def _losses(name: str, world: int) -> list[str]:
    loss, x, w = POINTWISE_LOSSES[name], scores(*SHAPE), scores(1, 1, 1, 7).abs() + 0.5
    cases = {how: (lambda x, w, options=options: loss(x, w, **options), [x], [w]) for how, options in HOW.items()}
    return found(cases, 1e-12, world)


@pytest.mark.parametrize("name", POINTWISE_LOSSES)
def test_losses_take_every_reduction_as_torch_does(name: str) -> None:
    assert not on_all_meshes(_losses, name)


def _other_losses(name: str, world: int) -> list[str]:
    return found({name: (OTHER_LOSSES[name], [scores(*SHAPE)], [])}, 1e-12, world)


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_losses_of_odd_shapes_and_weights(name: str) -> None:
    assert not on_all_meshes(_other_losses, name)


def _variance() -> None:
    x = ff.shard(torch.randn(2, 3, 6, 9), mesh(1, 2))
    with pytest.raises(ValueError, match="incorrect size"):
        torch.nn.functional.gaussian_nll_loss(x, x, torch.ones(2, 3, 6, 3))


def test_a_variance_of_another_size_is_refused() -> None:
    rank_group(2).run(_variance)
