"""Losses: each rank sums over its pixels; the mean divides by the count of the whole image."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.placement import Placements
from fullframe.spatial.exchange import sum_over_ranks
from fullframe.spatial.rules.reduction import count
from fullframe.spatial.rules.registry import Refused, rule
from fullframe.spatial.tensor import Layout, SpatialTensor, aligned, merged, wrap

_POINTWISE = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.soft_margin_loss, F.poisson_nll_loss,
)  # fmt: skip


@rule(*_POINTWISE)
def _pointwise_loss(func: Any, input: Tensor, target: Tensor, *args: Any, reduction: str = "mean", **kw: Any) -> Tensor:
    if args:
        raise Refused("positional options of losses are not read", "Pass the loss's options by keyword.")
    _no_legacy(kw)
    tensors = {name: value for name, value in kw.items() if isinstance(value, Tensor)}
    layout = merged([input, target, *tensors.values()])
    kw = {name: aligned(value, layout) if name in tensors else value for name, value in kw.items()}
    operands = torch.broadcast_tensors(aligned(input, layout), aligned(target, layout))
    if reduction == "none":
        return wrap(func(*operands, reduction="none", **kw), layout)
    if reduction == "sum":
        return _total(func(*operands, reduction="sum", **kw), layout)
    if reduction == "batchmean":
        return _total(func(*operands, reduction="sum", **kw), layout) / layout.shape[0]
    share = operands[0].numel() / count(layout.shape, range(len(layout.shape)))
    return _total(func(*operands, reduction="mean", **kw) * share, layout)


def _total(local: Tensor, layout: Layout) -> Tensor:
    return sum_over_ranks(local, layout.spatial.group([p.axis for p in layout.placements]))


def _no_legacy(options: dict[str, Any]) -> None:
    for name in ("size_average", "reduce"):
        if options.pop(name, None) is not None:
            raise Refused(f"the old option {name} is not read", "Use reduction=.")


@rule(F.cross_entropy, F.nll_loss)
def _classification_loss(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    _no_legacy({"size_average": size_average, "reduce": reduce})
    if isinstance(weight, SpatialTensor):
        raise Refused("the class weights are split")
    smoothing = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
    logits, labels, layout = _matched(input, target)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, **smoothing}
    if reduction == "none":
        return wrap(func(logits, labels, reduction="none", **options), layout)
    total = func(logits, labels, reduction="sum", **options)
    if reduction == "sum":
        return _total(total, layout)
    both = _total(torch.stack([total, _counted(labels, layout, weight, ignore_index, total)]), layout)
    return both[0] / both[1]


def _matched(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Layout]:
    """Local logits (N, C, ...) and local labels cut alike, and the layout of the labels (N, ...)."""
    class_dim = 0 if input.dim() == 1 else 1
    probabilities = target.is_floating_point()
    if isinstance(input, SpatialTensor):
        layout = input._layout
    elif isinstance(target, SpatialTensor):
        layout = _spread(target._layout, tuple(input.shape), () if probabilities else (class_dim,))
    else:
        raise Refused("neither logits nor labels are split")
    if layout.is_split(class_dim):
        raise Refused("the classes are split")
    shape = tuple(n for d, n in enumerate(layout.shape) if d != class_dim)
    placements: Placements = tuple(p if p.dim < class_dim else p.at(p.dim - 1) for p in layout.placements)
    labels_layout = layout.with_(shape, placements)
    labels = aligned(target, layout if probabilities else labels_layout)
    return aligned(input, layout), labels, labels_layout


def _spread(layout: Layout, shape: tuple[int, ...], new_dims: tuple[int, ...]) -> Layout:
    """`layout` for a tensor that has the class dim besides."""
    shift = len(new_dims)
    return layout.with_(shape, tuple(p.at(p.dim + shift) if shift else p for p in layout.placements))


def _counted(labels: Tensor, layout: Layout, weight: Tensor | None, ignore_index: int, like: Tensor) -> Tensor:
    """What the mean divides by, this rank's share: valid pixels, or the weights of their classes."""
    if labels.is_floating_point():
        return like.new_tensor(labels.numel() / labels.shape[1 if labels.dim() > 1 else 0])
    valid = labels != ignore_index
    if weight is None:
        return valid.sum().to(like.dtype)
    return (weight[torch.where(valid, labels, 0)] * valid).sum().to(like.dtype)


@rule(F.gaussian_nll_loss)
def _gaussian_nll(
    func: Any, input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    layout = merged([t for t in (input, target, var) if isinstance(t, Tensor)])
    parts = [aligned(t, layout) if isinstance(t, Tensor) else t for t in (input, target, var)]
    each = wrap(func(*parts, full=full, eps=eps, reduction="none"), layout)
    return _reduced(each, reduction)


@rule(F.cosine_similarity)
def _cosine_similarity(func: Any, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    layout = merged([x1, x2])
    if layout.is_split(dim):
        raise Refused(f"it works along dim {dim}, which is split")
    dim %= len(layout.shape)
    result = func(aligned(x1, layout), aligned(x2, layout), dim, eps)
    shape = (*layout.shape[:dim], *layout.shape[dim + 1 :])
    return wrap(result, layout.with_(shape, tuple(p if p.dim < dim else p.at(p.dim - 1) for p in layout.placements)))


@rule(F.hinge_embedding_loss)
def _hinge_embedding(func: Any, input: Tensor, target: Tensor, margin: float = 1.0, **kw: Any) -> Tensor:
    reduction = kw.pop("reduction", "mean")
    _no_legacy(kw)
    layout = merged([input, target])
    each = wrap(func(aligned(input, layout), aligned(target, layout), margin, reduction="none"), layout)
    return _reduced(each, reduction)


@rule(F.margin_ranking_loss)
def _margin_ranking(func: Any, input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, **kw: Any) -> Tensor:
    reduction = kw.pop("reduction", "mean")
    _no_legacy(kw)
    return _reduced(torch.clamp_min(-target * (input1 - input2) + margin, 0), reduction)


@rule(F.multilabel_soft_margin_loss)
def _multilabel_soft_margin(
    func: Any, input: Tensor, target: Tensor, weight: Tensor | None = None, **kw: Any
) -> Tensor:
    reduction = kw.pop("reduction", "mean")
    _no_legacy(kw)
    each = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    return _reduced((each if weight is None else each * weight).mean(-1), reduction)


def _reduced(each: Tensor, reduction: str) -> Tensor:
    return each if reduction == "none" else each.sum() if reduction == "sum" else each.mean()
