"""Functions that mix elements along one dim: local when that dim is whole; softmax and cumsum also when it is split."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fullframe.ranks.collectives import all_gather, all_gather_no_grad, all_sum, all_sum_no_grad
from fullframe.spatial.rules.reduction import wide
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

_SOFTMAX = F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax
_LOG_SOFTMAX = F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax


def _whole(x: SpatialTensor, dim: int) -> None:
    if x.spec.is_split(dim):
        raise Unsupported(f"it works along dim {dim}, which is split")


class _Softmax(torch.autograd.Function):
    """Softmax, or its logarithm, along a dim that is spread over the ranks of `group`; keeps its result alone."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, group: dist.ProcessGroup, log: bool) -> Tensor:
        top = torch.amax(all_gather_no_grad(torch.amax(local, dim, True), group), 0)
        shifted = local.to(wide(local.dtype)) - top
        powers = shifted.exp()
        total = all_sum_no_grad(powers.sum(dim, True), group)
        result = (shifted.sub_(total.log_()) if log else powers.div_(total)).to(local.dtype)
        ctx.save_for_backward(result)
        ctx.where = dim, group, log
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (result,), (dim, group, log) = ctx.saved_tensors, ctx.where
        kind = wide(result.dtype)
        given, result = gradient.to(kind), result.to(kind)
        total = all_sum((given if log else given * result).sum(dim, True), group)
        slope = given - result.exp() * total if log else result * (given - total)
        return slope.to(gradient.dtype), None, None, None


@rule(*_SOFTMAX, *_LOG_SOFTMAX)
def _softmax(func: Any, x: SpatialTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    if isinstance(_stacklevel, torch.dtype):  # torch.softmax has it in third place, F.softmax in fourth
        dtype = _stacklevel
    if dim is None:
        dim = 0 if x.dim() in (0, 1, 3) else 1  # as torch does, which advises to name it
    spec, local = x.spec, local_of(x)
    if not spec.is_split(dim):
        return wrap(func(local, dim, dtype=dtype), spec)
    axes = [p.axis for p in spec.placements if p.dim == dim % len(spec.shape)]
    local = local if dtype is None else local.to(dtype)
    return wrap(_Softmax.apply(local, dim, spec.spatial.group(axes), func in _LOG_SOFTMAX), spec)  # type: ignore[no-untyped-call]


@rule(F.softmin)
def _softmin(func: Any, x: SpatialTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    return F.softmax(-x, dim, dtype=dtype)


@rule(torch.cumsum, Tensor.cumsum)
def _cumsum(func: Any, x: SpatialTensor, dim: int, *, dtype: Any = None) -> Tensor:
    spec = x.spec
    placement = spec.of(dim)
    if placement is None:
        return wrap(func(local_of(x), dim, dtype=dtype), spec)
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    axis = spec.spatial.axis(placement.axis)
    local = func(local_of(x).to(wide(dtype)), dim, dtype=wide(dtype))  # so that its backward adds up as widely
    totals = all_gather(local.narrow(dim, local.shape[dim] - 1, 1), axis.group)
    before = totals[: axis.coordinate].sum(
        0, dtype=local.dtype
    )  # of none on the first, which so takes part in backward
    return wrap((local + before).to(dtype), spec)


@rule(torch.cumprod, Tensor.cumprod, torch.logcumsumexp, Tensor.logcumsumexp)
def _cumulative(func: Any, x: SpatialTensor, dim: int, *args: Any, **kwargs: Any) -> Tensor:
    _whole(x, dim)
    return wrap(func(local_of(x), dim, *args, **kwargs), x.spec)


@rule(F.glu)
def _glu(func: Any, x: SpatialTensor, dim: int = -1) -> Tensor:
    _whole(x, dim)
    return wrap(func(local_of(x), dim), x.spec.resized(dim, x.shape[dim] // 2))


@rule(F.normalize)
def _normalize(func: Any, x: SpatialTensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    return x / torch.linalg.vector_norm(x, p, dim, True).clamp_min(eps)  # type: ignore[no-any-return]


@rule(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(func: Any, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(weight, SpatialTensor) or not isinstance(x, SpatialTensor):
        raise Unsupported("the weight is split")
    if weight.numel() > 1:
        _whole(x, 1)
    return wrap(func(local_of(x), weight), x.spec)


@rule(F.local_response_norm)
def _local_response_norm(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    _whole(x, 1)
    return wrap(func(local_of(x), *args, **kwargs), x.spec)


@rule(torch.topk, Tensor.topk)
def _topk(func: Any, x: SpatialTensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    _whole(x, dim)
    spec = x.spec.resized(dim, k)
    found = func(local_of(x), k, dim, *args, **kwargs)
    return type(found)([wrap(part, spec) for part in found])


@rule(torch.sort, Tensor.sort)
def _sort(func: Any, x: SpatialTensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
    _whole(x, dim)
    found = func(local_of(x), dim=dim, descending=descending, stable=stable)
    return type(found)([wrap(part, x.spec) for part in found])


@rule(torch.argsort, Tensor.argsort)
def _argsort(func: Any, x: SpatialTensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Tensor:
    return torch.sort(x, dim=dim, descending=descending, stable=stable).indices


@rule(torch.msort, Tensor.msort)
def _msort(func: Any, x: SpatialTensor) -> Tensor:
    return torch.sort(x, dim=0).values


@rule(F.one_hot)
def _one_hot(func: Any, x: SpatialTensor, num_classes: int = -1) -> Tensor:
    """Of as many classes as there are in the whole tensor, where their number is not given."""
    spec = x.spec
    if num_classes == -1:
        num_classes = int(torch.amax(x)) + 1
    return wrap(func(local_of(x), num_classes), spec.with_((*spec.shape, num_classes), spec.placements))


@rule(F.embedding)
def _embedding(
    func: Any,
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if isinstance(weight, SpatialTensor) or not isinstance(x, SpatialTensor):
        raise Unsupported("the table is split")
    spec, local = x.spec, local_of(x)
    everywhere = x.full() if max_norm is not None or scale_grad_by_freq else local
    if max_norm is not None:  # every rank shortens all rows that are used
        torch.embedding_renorm_(weight.detach(), everywhere, max_norm, norm_type)
    found = func(local, weight, padding_idx, sparse=sparse)
    if scale_grad_by_freq and found.requires_grad:
        uses = torch.bincount(everywhere.flatten(), minlength=weight.shape[0])[local].unsqueeze(-1)
        found.register_hook(lambda gradient: gradient / uses)
    return wrap(found, spec.with_((*spec.shape, weight.shape[1]), spec.placements))


@rule(torch.diff, Tensor.diff)
def _diff(func: Any, x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    if prepend is not None or append is not None:
        raise Unsupported("prepend and append are not split", "Concatenate them with torch.cat first.")
    for _ in range(min(n, x.shape[dim])):
        size = x.shape[dim]
        later, earlier = (torch.narrow(x, dim, start, size - 1) for start in (1, 0))
        x = later ^ earlier if x.dtype == torch.bool else later - earlier
    return x


@rule(F.pairwise_distance, torch.pairwise_distance)
def _pairwise_distance(
    func: Any, x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)  # type: ignore[no-any-return]
