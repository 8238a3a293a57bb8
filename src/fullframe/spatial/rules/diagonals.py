"""Diagonals: taken, each rank sends its piece of them; put into matrices, nothing is sent."""

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.ranks.collectives import all_gather
from fullframe.ranks.exchange import joined
from fullframe.spatial.rules.reduction import without
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@rule(torch.diagonal, Tensor.diagonal)
def _diagonal(func: Any, x: SpatialTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """(..., H, W) to (..., L) over two dims; whole along the mesh axes that split either of them."""
    spec, local = x.spec, local_of(x)
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    kept = without(spec, (dim1, dim2), False)
    length = _length(spec.shape[dim1], spec.shape[dim2], offset)
    goal = kept.with_((*kept.shape, length), kept.placements)
    cut = {p.axis: p for p in spec.placements if p.dim in (dim1, dim2)}
    if not cut:
        return wrap(func(local, offset, dim1, dim2), goal)
    rows, columns = spec.held(dim1), spec.held(dim2)
    piece = local.diagonal(offset + rows.start - columns.start, dim1, dim2)
    mine = _shared(rows, columns, offset, length)
    if not mine:
        piece = piece.narrow(-1, 0, 0)
    piece = F.pad(piece, (mine.start, length - mine.stop))
    everyone = all_gather(piece, spec.spatial.group(cut))
    held = []  # by rank of the group
    axes = [axis for axis in spec.spatial.axes if axis.name in cut]
    for coordinates in product(*(range(axis.size) for axis in axes)):
        at = [range(spec.shape[dim1]), range(spec.shape[dim2])]
        for axis, part in zip(axes, coordinates, strict=True):
            p = cut[axis.name]
            at[(dim1, dim2).index(p.dim)] = p.extents.ranges[part]
        held.append(_shared(at[0], at[1], offset, length))
    order = sorted((rows.start, number) for number, rows in enumerate(held) if rows)
    pieces = [everyone[number].narrow(-1, start, len(held[number])) for start, number in order]
    return wrap(joined(pieces, -1) if pieces else everyone[0], goal)


def _length(rows: int, columns: int, offset: int) -> int:
    """Elements of a diagonal."""
    return max(0, min(rows - max(0, -offset), columns - max(0, offset)))


def _shared(rows: range, columns: range, offset: int, length: int) -> range:
    """Which elements of the diagonal lie in these rows and columns."""
    above, left = max(0, -offset), max(0, offset)
    start = max(rows.start - above, columns.start - left, 0)
    return range(min(start, length), max(min(start, length), min(rows.stop - above, columns.stop - left, length)))


@rule(torch.linalg.diagonal)
def _last_diagonal(func: Any, A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """The diagonal of the last two dims, if no others are named."""
    return torch.diagonal(A, offset, dim1, dim2)


@rule(torch.diagonal_copy)
def _diagonal_copy(func: Any, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonal in memory of its own."""
    return torch.diagonal(x, offset, dim1, dim2).clone()


@rule(torch.trace, Tensor.trace)
def _trace(func: Any, x: Tensor) -> Tensor:
    """The sum of the diagonal."""
    return torch.diagonal(x).sum()


@rule(torch.diag_embed, Tensor.diag_embed)
def _diag_embed(func: Any, x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """(..., L) on a diagonal of zeros (..., L + |offset|, L + |offset|); a split of L becomes one of the rows."""
    size = x.shape[-1] + abs(offset)
    made = _on_diagonal(x, x.new_zeros(()), size, size, offset)
    return made.movedim((-2, -1), (dim1, dim2))


def _on_diagonal(x: Tensor, beside: Tensor, rows: int, columns: int, offset: int) -> Tensor:
    """(..., rows, columns): `x` on a diagonal, what `beside` has elsewhere."""
    above, left = max(0, -offset), max(0, offset)
    below = rows - x.shape[-1] - above
    x = F.pad(x, (above, below)) if above or below else x
    row, column = torch.arange(rows, device=x.device)[:, None], torch.arange(columns, device=x.device)
    return torch.where((row - above == column - left) & (row >= above) & (column >= left), x.unsqueeze(-1), beside)


@rule(torch.diag, Tensor.diag)
def _diag(func: Any, x: Tensor, diagonal: int = 0) -> Tensor:
    """The diagonal of a matrix, or the matrix of a diagonal."""
    return torch.diag_embed(x, diagonal) if x.dim() == 1 else torch.diagonal(x, diagonal).clone()


@rule(torch.diagflat, Tensor.diagflat)
def _diagflat(func: Any, x: Tensor, offset: int = 0) -> Tensor:
    """The matrix of the flattened tensor as a diagonal."""
    return torch.diag_embed(x.flatten(), offset)


@rule(torch.diagonal_scatter, Tensor.diagonal_scatter)
def _diagonal_scatter(func: Any, x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """`x` with another diagonal; refuses a split diagonal of a whole tensor."""
    if not isinstance(x, SpatialTensor):
        raise Unsupported("a split diagonal is written into a whole tensor")
    turned = x.movedim((dim1, dim2), (-2, -1))
    made = _on_diagonal(src, turned, turned.shape[-2], turned.shape[-1], offset)
    return made.movedim((-2, -1), (dim1, dim2))
