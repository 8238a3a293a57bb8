"""Losses: the loss of each element or row on its rank, then the sum or mean of the whole, as in torch's kernels."""

import inspect
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction  # what torch itself makes of size_average, reduce and reduction

from fullframe.errors import ShapeError
from fullframe.ranks.collectives import all_sum
from fullframe.spatial.operands import aligned, merged
from fullframe.spatial.rules.reduction import total_of, without
from fullframe.spatial.rules.registry import COMPOSED, Unsupported, kept_back, rule
from fullframe.spatial.rules.transposing import moved_from
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, wrap

_POINTWISE = (
    F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.soft_margin_loss, F.poisson_nll_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
)  # fmt: skip


def _reduction_of(options: dict[str, Any]) -> str:
    """Take `reduction` and the two old names for it out of a loss's options; ValueError for any other word."""
    average, reduce, reduction = (options.pop(name, None) for name in ("size_average", "reduce", "reduction"))
    if average is not None or reduce is not None:
        return _reduction.legacy_get_string(average, reduce)
    return ("none", "mean", "sum")[_reduction.get_enum(reduction or "mean")]


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    if type(each) is SpatialTensor and each._local.is_floating_point() and not torch._C._is_any_autocast_enabled():
        return total_of(each, reduction == "mean")  # what a call of torch's would come to
    return each.sum() if reduction == "sum" else each.mean()


def _each(func: Any, options: dict[str, Any], *operands: Tensor) -> Tensor:
    """The loss of each element of operands (and of tensors among the options) that broadcast to one shape."""
    tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    spec = merged([*operands, *tensors.values()])
    options = options | {name: aligned(value, spec) for name, value in tensors.items()}
    return wrap(func(*(aligned(t, spec) for t in operands), reduction="none", **options), spec)


@lru_cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _options(func: Any, operands: int, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first `operands` arguments of a loss, and the others by name."""
    if len(args) == operands:  # as torch's own functions call it
        return args, dict(kwargs)
    bound = _signature(func).bind(*args, **kwargs).arguments
    names = list(_signature(func).parameters)[:operands]
    return tuple(bound.pop(name) for name in names), dict(bound)


@rule(*_POINTWISE)
def _pointwise_loss(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The loss of each element, then the sum or mean over the whole tensor."""
    operands, options = _options(func, 2, args, kwargs)
    if func is F.kl_div and options.get("reduction") == "batchmean":
        options["reduction"] = "sum"
        return _pointwise_loss(func, *operands, **options) / operands[0].shape[0]  # type: ignore[no-any-return]
    reduction = _reduction_of(options)
    return _reduced(_each(func, options, *operands), reduction)


@rule(F.mse_loss, F.l1_loss)
def _weighted_loss(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Squared or absolute differences, weighted where asked for, then the sum or mean over the whole tensor."""
    operands, options = _options(func, 2, args, kwargs)
    weight = options.pop("weight", None)
    reduction = _reduction_of(options)
    if weight is None and func is F.l1_loss:
        weight = kept_back(F.l1_loss, "weight")
    each = _each(func, options, *operands)
    if weight is None:
        return _reduced(each, reduction)
    if weight.shape != operands[0].shape:
        raise ValueError("Weights and input must have the same size.")
    each = each * weight
    return each.sum() / weight.sum() if reduction == "mean" else _reduced(each, reduction)


@rule(F.cross_entropy, F.nll_loss)
def _classification_loss(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Logits (N, C, ...), labels (N, ...): the mean is over all valid pixels; refuses split class weights.

    Split classes are made whole: the split moves to another dim.
    """
    (input, target), options = _options(func, 2, args, kwargs)
    classes = 0 if input.dim() == 1 else 1
    given = [t for t in (input, target) if isinstance(t, SpatialTensor) and t.dim() == input.dim()]
    if any(t.spec.is_split(classes) for t in given):
        moved = [moved_from(t, classes) if any(t is shell for shell in given) else t for t in (input, target)]
        return func(*moved, **options)  # type: ignore[no-any-return]
    reduction, weight = _reduction_of(options), options.get("weight")
    if isinstance(weight, SpatialTensor):
        raise Unsupported("the class weights are split")
    logits, labels, spec = _matched(input, target)
    each = func(logits, labels, reduction="none", **options)
    if reduction != "mean":
        return _reduced(wrap(each, spec), reduction)
    counted = _counted(labels, weight, options.get("ignore_index", -100), each)
    # Both in one message, of a precision that counts the pixels of any image.
    both = torch.stack([each.sum(dtype=torch.float64), counted])
    both = all_sum(both, spec.group)
    return (both[0] / both[1]).to(each.dtype)


def _linear_cross_entropy(
    func: Any, input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    ignore_index: int | None = None, options: Any = None, **others: Any
) -> Tensor:  # fmt: skip
    """Rows (N, C) by a weight (K, ..., C) to logits (N, K, ...), in one piece; refuses to go by chunks."""
    if options is not None:
        raise Unsupported("the chunks that options ask for are not split", "Leave options out: each rank has few rows.")
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias).unflatten(-1, linear_weight.shape[:-1])
    return F.cross_entropy(logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **others)


_of_logits = getattr(F, "linear_cross_entropy", None)  # since torch 2.13
if _of_logits is not None:
    rule(_of_logits)(_linear_cross_entropy)
    COMPOSED.add(_of_logits)


def _matched(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Spec]:
    """Local logits (N, C, ...) and local labels cut alike, and the spec of the labels (N, ...); C is whole."""
    probabilities = target.is_floating_point()
    if isinstance(input, SpatialTensor):
        spec = input.spec
    else:
        assert isinstance(target, SpatialTensor)
        cuts = target.spec.placements
        if not probabilities:  # the labels have no class dim
            cuts = tuple(p if p.dim < 1 else p.at(p.dim + 1) for p in cuts)
        spec = target.spec.with_(input.shape, cuts)
    labels_spec = without(spec, (1,), False)
    if not probabilities and target.shape != labels_spec.shape:  # torch without values takes them
        raise ShapeError(
            f"labels of shape {tuple(target.shape)} do not lie along logits of shape {tuple(spec.shape)}, which take "
            f"{tuple(labels_spec.shape)}: resize the logits by F.interpolate, or the labels by its mode nearest"
        )
    labels = aligned(target, spec if probabilities else labels_spec)
    return aligned(input, spec), labels, labels_spec


def _counted(labels: Tensor, weight: Tensor | None, ignore_index: int, each: Tensor) -> Tensor:
    """What the mean divides by, this rank's share: valid pixels, or the weights of their classes."""
    if labels.is_floating_point():
        return torch.full((), each.numel(), dtype=torch.float64, device=each.device)
    labels = labels.long()
    valid = labels != ignore_index
    if weight is None:
        return valid.sum().double()
    return torch.where(valid, weight[torch.where(valid, labels, 0)], 0).sum(dtype=torch.float64)


@rule(F.gaussian_nll_loss)
def _gaussian_nll(
    func: Any, input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Of a variance that broadcasts as torch allows."""
    reduction = _reduction_of({"reduction": reduction})
    if isinstance(var, Tensor):
        if torch.any(var < 0):  # on any rank, so all raise
            raise ValueError("var has negative entry/entries")
        if var.shape != input.shape and var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        apart = [theirs for mine, theirs in zip(input.shape, var.shape, strict=False) if mine != theirs]
        if var.dim() != input.dim() or sum(apart) > 1:  # torch wants one dim of size 1 that broadcasts, at most
            raise ValueError("var is of incorrect size")
    spec = merged([t for t in (input, target, var) if isinstance(t, Tensor)])
    operands = aligned(input, spec), aligned(target, spec)
    if isinstance(var, Tensor):
        var = aligned(var, spec).expand_as(operands[0])
    return _reduced(wrap(func(*operands, var, full=full, eps=eps, reduction="none"), spec), reduction)


@rule(F.multilabel_soft_margin_loss)
def _multilabel_soft_margin(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The mean over the classes (..., C) of each, then the sum or mean over the rest."""
    (input, target), options = _options(func, 2, args, kwargs)
    reduction, weight = _reduction_of(options), options.get("weight")
    each = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    each = each if weight is None else each * weight
    return _reduced(each.sum(-1) / input.shape[-1], reduction)


@rule(F.multi_margin_loss, F.multilabel_margin_loss, F.cosine_embedding_loss)
def _loss_of_rows(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Of rows (N, C), each whole on one rank; the targets are (N,), or (N, C) of the multilabel margin."""
    vectors = 2 if func is F.cosine_embedding_loss else 1
    operands, options = _options(func, vectors + 1, args, kwargs)
    if any(isinstance(t, SpatialTensor) and t.dim() == 2 and t.spec.is_split(1) for t in operands):
        moved = [moved_from(t, 1) if isinstance(t, SpatialTensor) and t.dim() == 2 else t for t in operands]
        return func(*moved, **options)  # type: ignore[no-any-return]
    reduction, weight = _reduction_of(options), options.get("weight")
    spec = merged(operands[:vectors]) if any(isinstance(t, SpatialTensor) for t in operands[:vectors]) else None
    if spec is None or len(spec.shape) != 2 or spec.is_split(1) or isinstance(weight, SpatialTensor):
        raise Unsupported("its rows are not whole on each rank")
    of_rows = spec.with_(spec.shape[:1], spec.placements)
    target = aligned(operands[-1], spec if func is F.multilabel_margin_loss else of_rows)
    local = [aligned(t, spec) for t in operands[:vectors]]
    return _reduced(wrap(func(*local, target, reduction="none", **options), of_rows), reduction)


@rule(F.triplet_margin_loss, F.triplet_margin_with_distance_loss)
def _triplet_margin(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The margin between the distances to a near and a far example, by any distance written in torch."""
    (anchor, positive, negative), options = _options(func, 3, args, kwargs)
    reduction, margin = _reduction_of(options), options.get("margin", 1.0)

    def between(x: Tensor, y: Tensor) -> Tensor:
        given = options.get("distance_function")
        return given(x, y) if given else F.pairwise_distance(x, y, options.get("p", 2), options.get("eps", 1e-6))

    far = between(anchor, negative)
    if options.get("swap"):
        far = torch.minimum(far, between(positive, negative))
    return _reduced(torch.clamp_min(margin + between(anchor, positive) - far, 0), reduction)
