"""The exchange of all with all: a dim that is split becomes whole, and another is split in its place."""

from functools import partial

from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.route import Route, Transfer
from fullframe.ranks.adjoint import linear
from fullframe.ranks.exchange import joined, post
from fullframe.ranks.mesh import Axis


def transposed(local: Tensor, whole: int, rows: Extents, cut: int, pieces: Extents, axis: Axis) -> Tensor:
    """`local` (own of `rows` in dim `whole`, all in dim `cut`) becomes (all, own of `pieces`); differentiable.

    Each rank sends what others are to hold and nothing twice. All ranks of `axis` call this together.
    """
    if axis.size == 1:
        return local
    there = partial(_transposed, whole=whole, rows=rows, cut=cut, pieces=pieces, axis=axis)
    back = partial(_transposed, whole=cut, rows=pieces, cut=whole, pieces=rows, axis=axis)
    return linear(local, there, back)


def _transposed(local: Tensor, whole: int, rows: Extents, cut: int, pieces: Extents, axis: Axis) -> Tensor:
    mine, peers = axis.coordinate, [peer for peer in range(axis.size) if peer != axis.coordinate]
    parts = [local.narrow(cut, piece.start if piece else 0, len(piece)) for piece in pieces.ranges]
    shape = list(parts[mine].shape)
    plan = Route(
        tuple(Transfer(peer, rows.ranges[mine]) for peer in peers),
        tuple(Transfer(peer, rows.ranges[peer]) for peer in peers),
    )
    shapes = [[*shape[:whole], rows.sizes[peer], *shape[whole + 1 :]] for peer in peers]
    out = [parts[peer] for peer in peers]
    received = post(axis, plan, out, shapes, local, rows.size, "all with all", at_once=True).wait()
    return joined([*received[:mine], parts[mine], *received[mine:]], whole)
