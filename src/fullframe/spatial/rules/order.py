"""Sorting and the k largest, along split dims.

Which of equal values comes first is torch's own choice, which follows from the whole row: its kernel gets whole rows
(see `whole_rows`). The k largest need them only where values are equal: else each rank sends its own k + 1 at most.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fullframe.ranks.collectives import all_gather_no_grad
from fullframe.ranks.exchange import joined
from fullframe.spatial.operands import has_values
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap
from fullframe.spatial.whole_rows import everywhere, numbered, picked, sent_home, sizes_held, whole_rows

_HEAP = 64  # torch's CPU kernel orders its result where k is no more than the size over this, asked or not


@rule(torch.sort, Tensor.sort)
def _sort(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
    """Values, and their numbers in the whole tensor, split as they were; whole rows are sorted."""
    spec = x.spec
    options = {"dim": -1, **dict(zip(("dim", "descending"), args, strict=False)), **kwargs}
    dim = options.pop("dim")
    if not spec.is_split(dim):
        found = func(local_of(x), dim=dim, **options)
        return type(found)([wrap(part, spec) for part in found])
    rows = whole_rows(local_of(x), spec, dim)
    one = len(spec.shape) == 1 and len(rows) == 1  # which torch sorts in another way
    found = func(rows[0] if one else rows, dim=-1, **options)
    return type(found)([wrap(sent_home(part[None] if one else part, spec, dim), spec) for part in found])


@rule(torch.argsort, Tensor.argsort)
def _argsort(func: Any, x: SpatialTensor, dim: Any = -1, descending: Any = False, *, stable: bool = False) -> Tensor:
    """The order of the rows of a dim, as numbers in the whole tensor."""
    return torch.sort(x.detach(), dim=dim, descending=descending, stable=stable).indices


@rule(torch.msort, Tensor.msort)
def _msort(func: Any, x: SpatialTensor) -> Tensor:
    """Sorted along dim 0."""
    return torch.sort(x, dim=0).values


@rule(torch.topk, Tensor.topk)
def _topk(func: Any, x: SpatialTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The k largest or smallest along a dim, with their numbers in the whole tensor; whole along that dim."""
    spec, local = x.spec, local_of(x)
    plan = spec.plans.get((_topk, k, dim))
    if plan is None:
        plan = spec.plans[_topk, k, dim] = _plan(spec, k, dim)
    result = plan.result
    if plan.axis is None or k == 0:
        found = func(local, k, dim, largest, sorted)
        return type(found)([wrap(part, result) for part in found])
    best, own = partial(func, largest=largest), local.detach()
    found = None
    if sorted or k * _HEAP <= spec.shape[dim]:
        found = _from_candidates(best, own, spec, k, plan)
    values, numbers = _from_rows(partial(best, sorted=sorted), own, spec, k, dim) if found is None else found
    values = picked(local, spec, dim, numbers, values)
    kind: Any = torch.return_types.topk
    return kind([wrap(values, result), wrap(numbers, result)])


class _Plan(NamedTuple):
    """The k largest along `dim`: what follows from a spec."""

    result: Spec
    axis: str | None  # over which the dim is split, several as one
    dim: int
    last: bool  # whether it is the last one
    counts: tuple[int, ...]  # how many candidates each rank sends


def _plan(spec: Spec, k: int, dim: int) -> _Plan:
    dim %= len(spec.shape)
    result = spec.with_(spec.shape, tuple(p for p in spec.placements if p.dim != dim)).resized(dim, k)
    axes = [p.axis for p in spec.cuts(dim)]
    counts = tuple(min(k + 1, size) for size in sizes_held(spec, dim))
    return _Plan(result, spec.spatial.joint(axes) if axes else None, dim, dim == len(spec.shape) - 1, counts)


def _from_candidates(best: Any, local: Tensor, spec: Spec, k: int, plan: _Plan) -> tuple[Tensor, Tensor] | None:
    """(..., k, ...) values and numbers from each rank's best; None where torch's choice among equals may decide."""
    assert plan.axis is not None
    dim, axis = plan.dim, spec.spatial.axis(plan.axis)
    values, numbers = best(local, plan.counts[axis.coordinate], dim, sorted=False)
    numbers = numbered(numbers, spec, dim)
    if not plan.last:
        values, numbers = values.movedim(dim, -1), numbers.movedim(dim, -1)
    values, numbers = _everyones(values, numbers, plan.counts, axis.group)
    most = min(k + 1, values.shape[-1])
    found, chosen = best(values, most, -1, sorted=True)
    top = found.narrow(-1, 0, k)
    if has_values(local):
        before, after = top if most > k else top.narrow(-1, 0, k - 1), found.narrow(-1, 1, most - 1)
        if not (before > after if best.keywords["largest"] else before < after).all():  # equal, or NaN
            return None
    if most > k:
        chosen = chosen.narrow(-1, 0, k)
    values = top.contiguous() if top.dtype is local.dtype else top.to(local.dtype)
    numbers = numbers.gather(-1, chosen).long()
    return (values, numbers) if plan.last else (values.movedim(-1, dim), numbers.movedim(-1, dim))


def _everyones(
    values: Tensor, numbers: Tensor, counts: tuple[int, ...], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(..., n) values and their numbers of all ranks, each with its own of `counts`, as (..., sum(counts)).

    They go in one message, as integers of one width; short values come out in 32 bits, numbers in the width of values.
    """
    if values.dtype.itemsize < 4:
        values = values.to(torch.float32 if values.is_floating_point() else torch.int32)
    carrier = torch.int64 if values.dtype.itemsize == 8 else torch.int32
    pair = torch.stack([values.view(carrier), numbers.to(carrier)])  # (2, ..., n)
    most = max(counts)
    alike = min(counts) == most
    if not alike:
        pair = F.pad(pair, (0, most - pair.shape[-1]))
    everyone = all_gather_no_grad(pair, group)  # (ranks, 2, ..., most)
    if alike:
        pair = everyone.movedim(0, -2).flatten(-2)
    else:
        pair = joined([own[..., :count] for own, count in zip(everyone.unbind(), counts, strict=True)], -1)
    values_, numbers = pair.unbind()
    return values_.view(values.dtype), numbers


def _from_rows(best: Any, local: Tensor, spec: Spec, k: int, dim: int) -> tuple[Tensor, Tensor]:
    """(..., k, ...) values and numbers as torch's kernel finds them in whole rows."""
    found = best(whole_rows(local, spec, dim), k, -1)
    values, numbers = (everywhere(part, spec, dim).movedim(-1, dim) for part in found)
    return values, numbers
