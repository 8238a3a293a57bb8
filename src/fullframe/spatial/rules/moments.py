"""Variance, norms and logsumexp, with the formulas of torch's own gradients: of zero spread, zero norms, infinities."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.collectives import all_gather_no_grad, all_sum, all_sum_no_grad
from fullframe.ranks.exchange import joined
from fullframe.spatial.rules.reduction import Dims, count, dims_of, reduced_axes, wide, without
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

Dim = tuple[int, ...]


class _Variance(torch.autograd.Function):
    """Variance or its root, and mean, over `dims` (kept as 1) and ranks; `whole`: no dims were given.

    Each rank contributes its count, mean and variance, so that equal values have no spread at all.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, dims: Dim, elements: int, correction: float, root: bool, whole: bool, group: Any
    ) -> tuple[Tensor, Tensor]:
        values, own = local.to(wide(local.dtype)), count(local.shape, dims)
        if own:
            own_var, own_mean = torch.var_mean(values, dims, correction=0, keepdim=True)
        else:  # a mask has picked nothing here
            own_var = own_mean = values.sum(dims, True)
        own_count = torch.full_like(own_mean, own)
        everyone = all_gather_no_grad(
            joined([each[None] for each in (own_var.to(own_mean.dtype), own_mean, own_count)], 0), group
        )
        each_var, means, counts = everyone.unbind(1)  # (ranks, ...)
        first = means.gather(0, counts.real.sign().argmax(0, True))  # of the ranks that have elements
        # Torch goes from element to element, and from an infinite mean on to none: a last one alone stays infinite.
        mean = first[0] + (counts * (means - first)).sum(0) / elements + means[:-1].mul(0).sum(0)
        squares = (counts * (each_var + (means - mean).abs() ** 2)).sum(0).real
        var = squares / max(elements - correction, 0)
        found = (var.sqrt() if root else var).to(local.dtype.to_real())
        ctx.save_for_backward(local, *([found] if root else []))  # a variance may be written over, as torch's
        ctx.where = dims, elements, correction, root, whole, group
        ctx.set_materialize_grads(False)
        return found, mean.to(local.dtype)

    @staticmethod
    def backward(ctx: Any, of_spread: Tensor | None, of_mean: Tensor | None) -> tuple[Any, ...]:
        (local, *found), (dims, elements, correction, root, whole, group) = ctx.saved_tensors, ctx.where
        result = None if of_mean is None else (all_sum(of_mean, group) / elements).expand_as(local)
        if of_spread is not None:
            slope = all_sum(of_spread, group)
            if root:
                slope = torch.where(found[0] == 0, 0, slope / (found[0] * 2))
            kind = wide(local.dtype)
            distance = local.to(kind) - all_sum(local.sum(dims, True, dtype=kind), group) / elements
            if whole and elements <= correction:
                distance = torch.where(distance == 0, math.nan, math.inf)
            else:
                distance = distance * (2 / (elements - correction) if elements != correction else math.inf)
            shares = (slope * distance).to(local.dtype)
            result = shares if result is None else result + shares
        return result, *(None,) * 6


@rule(torch.var, Tensor.var, torch.std, Tensor.std, torch.var_mean, torch.std_mean)
def _variance(
    func: Any, x: SpatialTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    """Variance, or its root, over dims and ranks, and the mean where asked for."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    spec, dims = x.spec, dims_of(x.spec, dim)
    axes, result = reduced_axes(spec, dims), without(spec, dims, keepdim)
    if not axes:
        found = func(local_of(x), dims, correction=correction, keepdim=keepdim)
        return tuple(wrap(f, result) for f in found) if isinstance(found, tuple) else wrap(found, result)
    root, group = func in (torch.std, Tensor.std, torch.std_mean), spec.spatial.group(axes)
    elements = count(spec.shape, dims)
    both = _Variance.apply(local_of(x), dims, elements, correction, root, dim is None, group)  # type: ignore[no-untyped-call]
    spread, mean = (wrap(t if keepdim else t.squeeze(dims), result) for t in both)
    return (spread, mean) if func in (torch.var_mean, torch.std_mean) else spread


class _VectorNorm(torch.autograd.Function):
    """`torch.linalg.vector_norm` over `dims` (kept as 1) and ranks: the norm of the ranks' norms."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, order: float, dims: Dim, group: dist.ProcessGroup) -> Tensor:
        norm, real = torch.linalg.vector_norm, local.dtype.to_real()
        each = all_gather_no_grad(norm(local, order, dims, True, dtype=wide(local.dtype)), group)
        found: Tensor = (each.sum(0) if order == 0 else norm(each, order, 0)).to(real)
        ctx.save_for_backward(local, found)
        ctx.where = order, dims, group
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (local, found), (order, dims, group) = ctx.saved_tensors, ctx.where
        if order == 0:
            return None, None, None, None
        gradient = all_sum(gradient, group)
        return _slope(local, found, gradient, order, dims, group), None, None, None


def _slope(x: Tensor, norm: Tensor, gradient: Tensor, p: float, dims: Dim, group: dist.ProcessGroup) -> Tensor:
    """The gradient of the p-norm `norm` of `x` and the other ranks' parts; 0 where the norm has none."""
    if p == 1:
        return x.sgn() * gradient
    if math.isinf(p):
        size = x.abs()
        hits = (size == norm) | size.isnan()
        return x.sgn() * (gradient / all_sum(hits.sum(dims, True), group) * hits)
    if p == 2:
        return gradient * torch.where(norm == 0, 0, x / norm)
    if p < 1:
        return x.sgn() * torch.where(x == 0, 0, x.abs() ** (p - 1)) * gradient * norm ** (1 - p)
    steep = x.sgn() * x.abs() ** (p - 1) if p < 2 else x * x.abs() ** (p - 2)
    return steep * torch.where(norm == 0, 0, gradient / norm ** (p - 1))


@rule(torch.linalg.vector_norm)
def _vector_norm(
    func: Any, x: SpatialTensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The p-norm over dims and ranks."""
    spec, dims = x.spec, dims_of(x.spec, dim)
    axes, result = reduced_axes(spec, dims), without(spec, dims, keepdim)
    if not axes:
        return wrap(func(local_of(x), ord, dims, keepdim, dtype=dtype), result)
    if not 0 <= ord < math.inf:
        spec.require_filled()
    local = local_of(x) if dtype is None else local_of(x).to(dtype)
    found = _VectorNorm.apply(local, float(ord), dims, spec.spatial.group(axes))  # type: ignore[no-untyped-call]
    return wrap(found if keepdim else found.squeeze(dims), result)


@rule(torch.norm, Tensor.norm)
def _norm(
    func: Any, x: SpatialTensor, p: Any = "fro", dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """The p-norm by the old name; refuses the nuclear norm."""
    if p == "nuc":
        raise Unsupported(f"norm with p={p!r} is not split")
    order = 2.0 if p in ("fro", None) else float(p)
    return torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]


@rule(torch.dist, Tensor.dist)
def _dist(func: Any, x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """The p-norm of a difference."""
    return torch.linalg.vector_norm(x - other, p)  # type: ignore[no-any-return]


class _LogSumExp(torch.autograd.Function):
    """`torch.logsumexp` over `dims` (kept as 1) and ranks."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dims: Dim, group: dist.ProcessGroup) -> Tensor:
        top = torch.amax(all_gather_no_grad(torch.amax(local, dims, True), group), 0)
        top = torch.where(top.isinf(), 0, top)
        total = all_sum_no_grad(torch.exp(local - top).sum(dims, True, dtype=wide(local.dtype)), group)
        found = total.to(local.dtype).log_().add_(top)
        ctx.save_for_backward(local, found)
        ctx.group = group
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        local, found = ctx.saved_tensors
        return all_sum(gradient, ctx.group) * torch.exp(local - found), None, None


@rule(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)
def _logsumexp(func: Any, x: SpatialTensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """The logarithm of the summed exponentials over dims and ranks; refuses complex numbers where a dim is split."""
    spec, dims = x.spec, dims_of(x.spec, dim)
    axes, result = reduced_axes(spec, dims), without(spec, dims, keepdim)
    if not axes:
        return wrap(func(local_of(x), dims, keepdim), result)
    if x.is_complex():
        raise Unsupported("complex numbers have no largest one to scale by")
    spec.require_filled()
    local = local_of(x) if x.is_floating_point() else local_of(x).to(torch.get_default_dtype())
    found = _LogSumExp.apply(local, dims, spec.spatial.group(axes))  # type: ignore[no-untyped-call]
    return wrap(found if keepdim else found.squeeze(dims), result)
