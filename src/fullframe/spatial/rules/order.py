"""Sorting and the k largest, along split dims.

Which of equal values comes first is torch's own choice, which follows from the whole row: its kernel gets whole rows
(see `whole_rows`). The k largest need them only where values are equal: else each rank sends its own k + 1 at most.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullframe.ranks.collectives import all_gather_no_grad
from fullframe.ranks.exchange import joined
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap
from fullframe.spatial.whole_rows import everywhere, has_values, held_numbers, picked, sent_home, sizes_held, whole_rows

_HEAP = 64  # torch's CPU kernel orders its result where k is no more than the size over this, asked or not


@rule(torch.sort, Tensor.sort)
def _sort(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
    """Values, and their numbers in the whole tensor, split as they were; whole rows are sorted."""
    spec = x.spec
    names = ("dim", "descending") if "stable" not in kwargs else ("stable", "dim", "descending")
    options = {"dim": -1, **dict(zip(names, args, strict=False)), **kwargs}
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
    result = spec.with_(spec.shape, tuple(p for p in spec.placements if p.dim != dim % len(spec.shape)))
    result = result.resized(dim, k)
    if not spec.is_split(dim) or k == 0:
        found = func(local, k, dim, largest, sorted)
        return type(found)([wrap(part, result) for part in found])
    best = partial(func, largest=largest)
    found = None
    if sorted or k * _HEAP <= spec.shape[dim]:
        found = _from_candidates(best, local.detach(), spec, k, dim)
    values, numbers = _from_rows(partial(best, sorted=sorted), local.detach(), spec, k, dim) if found is None else found
    values = picked(local, spec, dim, numbers, values)
    kind: Any = torch.return_types.topk
    return kind([wrap(values, result), wrap(numbers, result)])


def _from_candidates(best: Any, local: Tensor, spec: Spec, k: int, dim: int) -> tuple[Tensor, Tensor] | None:
    """(..., k, ...) values and numbers from each rank's best; None where torch's choice among equals decides."""
    axes = [p.axis for p in spec.placements if p.dim == dim % len(spec.shape)]
    counts = [min(k + 1, size) for size in sizes_held(spec, dim)]
    mine = best(local, counts[spec.spatial.coordinate_along(axes)], dim, sorted=False)
    numbers = held_numbers(spec, dim, local.device)[mine.indices]
    # In one message: (..., candidates) bytes.
    packed = _bytes(mine.values.movedim(dim, -1), max(counts)), _bytes(numbers.movedim(dim, -1), max(counts))
    everyone = all_gather_no_grad(torch.cat(packed, -1), spec.spatial.group(axes))
    split = packed[0].shape[-1]
    values = _joined(everyone[..., :split], local.dtype, counts)
    numbers = _joined(everyone[..., split:], torch.int64, counts)
    found = best(values, min(k + 1, values.shape[-1]), -1, sorted=True)
    if has_values(local) and _any_equal(found.values):
        return None
    chosen = found.indices[..., :k]
    return found.values[..., :k].movedim(-1, dim), numbers.gather(-1, chosen).movedim(-1, dim)


def _bytes(tensor: Tensor, count: int) -> Tensor:
    """(..., n) as bytes of `count` elements a row, those behind the n-th zero."""
    full = tensor.new_zeros((*tensor.shape[:-1], count))
    full[..., : tensor.shape[-1]] = tensor
    return full.view(torch.uint8)


def _joined(everyone: Tensor, dtype: torch.dtype, counts: list[int]) -> Tensor:
    """(ranks, ..., bytes) of all ranks as (..., elements), each rank's first `counts` of them."""
    everyone = everyone.clone(memory_format=torch.contiguous_format).view(dtype)
    return joined([one[..., :n] for one, n in zip(everyone, counts, strict=True)], -1)


def _any_equal(ordered: Tensor) -> bool:
    """Whether a row (..., n) in order holds equal neighbours; NaNs are equal."""
    a, b = ordered[..., 1:], ordered[..., :-1]
    return bool(((a == b) | (a.isnan() & b.isnan())).any())


def _from_rows(best: Any, local: Tensor, spec: Spec, k: int, dim: int) -> tuple[Tensor, Tensor]:
    """(..., k, ...) values and numbers as torch's kernel finds them in whole rows."""
    found = best(whole_rows(local, spec, dim), k, -1)
    values, numbers = (everywhere(part, spec, dim).movedim(-1, dim) for part in found)
    return values, numbers
