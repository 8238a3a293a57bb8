"""Functions that mix elements along one dim: local when that dim is whole; softmax also when it is split."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.reduction import by_rank
from fullframe.spatial.rules.registry import Refused, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


def _whole(x: SpatialTensor, dim: int) -> None:
    if x._layout.is_split(dim):
        raise Refused(f"it works along dim {dim}, which is split")


@rule(F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
def _softmax(func: Any, x: SpatialTensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    return _soft(func, x, dim, args, kwargs, lambda shifted, total: torch.exp(shifted) / total)


@rule(F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax)
def _log_softmax(func: Any, x: SpatialTensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    return _soft(func, x, dim, args, kwargs, lambda shifted, total: shifted - torch.log(total))


def _soft(func: Any, x: SpatialTensor, dim: int | None, args: Any, kwargs: Any, finish: Any) -> Tensor:
    if dim is None:
        raise Refused("the dim is not given", "Name the dim.")
    if not x._layout.is_split(dim):
        return wrap(func(local_of(x), dim, *args, **kwargs), x._layout)
    dtype = kwargs.get("dtype") or next((a for a in args if isinstance(a, torch.dtype)), None)
    values = x if dtype is None else x.to(dtype)
    shifted = values - torch.amax(values.detach(), (dim,), True)
    return finish(shifted, torch.sum(torch.exp(shifted), (dim,), True))  # type: ignore[no-any-return]


@rule(F.softmin)
def _softmin(func: Any, x: SpatialTensor, dim: int, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    return F.softmax(-x, dim, dtype=dtype)


@rule(torch.cumsum, Tensor.cumsum)
def _cumsum(func: Any, x: SpatialTensor, dim: int, *, dtype: Any = None) -> Tensor:
    layout = x._layout
    placement = layout.of(dim)
    local = func(local_of(x), dim, dtype=dtype)
    if placement is None:
        return wrap(local, layout)
    totals = by_rank(local.narrow(dim, local.shape[dim] - 1, 1), x, placement.axis)
    part = layout.spatial.axis(placement.axis).part
    return wrap(local + totals[:part].sum(0) if part else local + totals[0] * 0, layout)


@rule(torch.cumprod, Tensor.cumprod, torch.logcumsumexp, Tensor.logcumsumexp)
def _cumulative(func: Any, x: SpatialTensor, dim: int, *args: Any, **kwargs: Any) -> Tensor:
    _whole(x, dim)
    return wrap(func(local_of(x), dim, *args, **kwargs), x._layout)


@rule(F.glu)
def _glu(func: Any, x: SpatialTensor, dim: int = -1) -> Tensor:
    _whole(x, dim)
    shape = list(x._layout.shape)
    shape[dim] //= 2
    return wrap(func(local_of(x), dim), x._layout.with_(shape, x._layout.placements))


@rule(F.normalize)
def _normalize(
    func: Any, x: SpatialTensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> Tensor:
    if out is not None:
        raise Refused("out= is not split")
    return x / torch.linalg.vector_norm(x, p, dim, True).clamp_min(eps)  # type: ignore[no-any-return]


@rule(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(func: Any, x: SpatialTensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1:
        _whole(x, 1)
    return wrap(func(local_of(x), weight), x._layout)


@rule(F.local_response_norm)
def _local_response_norm(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    _whole(x, 1)
    return wrap(func(local_of(x), *args, **kwargs), x._layout)


@rule(torch.topk, Tensor.topk)
def _topk(func: Any, x: SpatialTensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    _whole(x, dim)
    shape = list(x._layout.shape)
    shape[dim] = k
    layout = x._layout.with_(shape, x._layout.placements)
    found = func(local_of(x), k, dim, *args, **kwargs)
    return type(found)([wrap(part, layout) for part in found])


@rule(torch.sort, Tensor.sort)
def _sort(func: Any, x: SpatialTensor, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    _whole(x, dim)
    found = func(local_of(x), dim, *args, **kwargs)
    return type(found)([wrap(part, x._layout) for part in found])


@rule(F.one_hot)
def _one_hot(func: Any, x: SpatialTensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise Refused("the number of classes would be read from one rank's part", "Give num_classes.")
    layout = x._layout
    return wrap(func(local_of(x), num_classes), layout.with_((*layout.shape, num_classes), layout.placements))


@rule(F.embedding)
def _embedding(func: Any, x: SpatialTensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    layout = x._layout
    found = func(local_of(x), weight, *args, **kwargs)
    return wrap(found, layout.with_((*layout.shape, weight.shape[1]), layout.placements))


@rule(torch.argsort, Tensor.argsort, torch.msort, Tensor.msort)
def _argsort(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    dim = 0 if func in (torch.msort, Tensor.msort) else kwargs.get("dim", args[0] if args else -1)
    _whole(x, dim)
    return wrap(func(local_of(x), *args, **kwargs), x._layout)


@rule(torch.diff, Tensor.diff)
def _diff(func: Any, x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    if prepend is not None or append is not None:
        raise Refused("prepend and append are not split", "Concatenate them with torch.cat first.")
    for _ in range(n):
        size = x.shape[dim]
        later, earlier = (torch.narrow(x, dim, start, size - 1) for start in (1, 0))
        x = later ^ earlier if x.dtype == torch.bool else later - earlier
    return x


@rule(F.pairwise_distance, torch.pairwise_distance)
def _pairwise_distance(
    func: Any, x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)  # type: ignore[no-any-return]
