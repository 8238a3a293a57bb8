"""The exchange: every rank owns one interval of a dim and wants another; both are known to all ranks.

Nothing else in the package sends activations. Reductions over ranks are at the end of this file.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fullframe.geometry.extents import Extents, overlap
from fullframe.geometry.route import Route, Wanted, borrows, route
from fullframe.spatial.mesh import Axis


class Message(NamedTuple):
    """A contiguous tensor to send to, or to be filled by, the rank with coordinate `peer` on the axis."""

    peer: int
    tensor: Tensor


class InFlight:
    """Messages that were posted; `wait` returns what was received, in the order of `receives`."""

    def __init__(self, axis: Axis, sends: list[Message], receives: list[Message]):
        self._receives = receives
        self._keep = sends  # a send buffer must outlive its message
        self._works: list[Any] = []
        if axis.staged:
            self._keep = [Message(peer, tensor.cpu()) for peer, tensor in sends]
            self._buffers = [Message(peer, torch.empty_like(tensor, device="cpu")) for peer, tensor in receives]
        else:
            self._buffers = receives
        # Both sides know the shapes, so a message without elements is sent by neither; gloo would wait for it for ever.
        ops = [dist.P2POp(dist.isend, t, axis.ranks[peer], axis.group) for peer, t in self._keep if t.numel()]
        ops += [dist.P2POp(dist.irecv, t, axis.ranks[peer], axis.group) for peer, t in self._buffers if t.numel()]
        if ops:
            self._works = dist.batch_isend_irecv(ops)

    def wait(self) -> list[Tensor]:
        """Block until all messages are through."""
        for work in self._works:
            work.wait()
        if self._buffers is not self._receives:
            for (_, target), (_, source) in zip(self._receives, self._buffers, strict=True):
                target.copy_(source)
        return [tensor for _, tensor in self._receives]


def post_borrow(
    axis: Axis, plan: Route, block: Callable[[range], Tensor], shape_of: Callable[[range], list[int]], like: Tensor
) -> InFlight:
    """Send the rows `plan` names, each cut out by `block(rows)`, and receive those that others own."""
    sends = [Message(peer, block(rows).contiguous()) for peer, rows in plan.sends]
    receives = [Message(peer, like.new_empty(shape_of(rows))) for peer, rows in plan.receives]
    return InFlight(axis, sends, receives)


def post_return(
    axis: Axis, plan: Route, gradients: list[Tensor], shape_of: Callable[[range], list[int]], like: Tensor
) -> InFlight:
    """The adjoint of `post_borrow`: the gradients of what was received go back to the owners."""
    sends = [Message(t.peer, gradient.contiguous()) for t, gradient in zip(plan.receives, gradients, strict=True)]
    receives = [Message(peer, like.new_empty(shape_of(rows))) for peer, rows in plan.sends]
    return InFlight(axis, sends, receives)


def fetch(local: Tensor, dim: int, extents: Extents, wanted: Wanted, axis: Axis) -> Tensor:
    """Rows `wanted[part]` of a dim that is split at `extents`; differentiable.

    `local` holds this rank's rows along `dim`. The gradient of a borrowed row is sent back and added.
    """
    if wanted == extents.ranges:
        return local
    if not borrows(extents, wanted):
        own, rows = extents.ranges[axis.part], wanted[axis.part]
        return local.narrow(dim, rows.start - own.start if rows else 0, len(rows))
    if torch.is_grad_enabled() and local.requires_grad:
        return _Fetch.apply(local, dim, extents, wanted, axis)  # type: ignore[no-any-return, no-untyped-call]
    return _fetch(local, dim, extents, wanted, axis)


def _fetch(local: Tensor, dim: int, extents: Extents, wanted: Wanted, axis: Axis) -> Tensor:
    own, rows = extents.ranges[axis.part], wanted[axis.part]
    plan = route(extents, wanted, axis.part)
    shape = list(local.shape)

    def cut(piece: range) -> Tensor:
        return local.narrow(dim, piece.start - own.start, len(piece))

    def shape_of(piece: range) -> list[int]:
        return [*shape[:dim], len(piece), *shape[dim + 1 :]]

    received = post_borrow(axis, plan, cut, shape_of, local).wait()
    pieces = [(t.rows.start, tensor) for t, tensor in zip(plan.receives, received, strict=True)]
    kept = overlap(own, rows)
    if kept or not pieces:
        pieces.append((kept.start, cut(kept) if kept else local.narrow(dim, 0, 0)))
    return torch.cat([tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])], dim)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, extents: Extents, wanted: Wanted, axis: Axis) -> Tensor:
        ctx.where = dim, extents, wanted, axis
        return _fetch(local, dim, extents, wanted, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        dim, extents, wanted, axis = ctx.where
        own, rows = extents.ranges[axis.part], wanted[axis.part]
        plan = route(extents, wanted, axis.part)
        shape = list(gradient.shape)

        def shape_of(piece: range) -> list[int]:
            return [*shape[:dim], len(piece), *shape[dim + 1 :]]

        borrowed = [gradient.narrow(dim, t.rows.start - rows.start, len(t.rows)) for t in plan.receives]
        flight = post_return(axis, plan, borrowed, shape_of, gradient)
        result = gradient.new_zeros(shape_of(own))
        kept = overlap(own, rows)
        if kept:
            target = result.narrow(dim, kept.start - own.start, len(kept))
            target.copy_(gradient.narrow(dim, kept.start - rows.start, len(kept)))
        for transfer, returned in zip(plan.sends, flight.wait(), strict=True):
            result.narrow(dim, transfer.rows.start - own.start, len(transfer.rows)).add_(returned)
        return result, None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce; the adjoint of a sum whose result every rank holds is the sum of what every rank's copy gets."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(value, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return summed(gradient, ctx.group), None


def sum_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `value` over the ranks of `group`, on all of them; differentiable."""
    if dist.get_world_size(group) == 1:
        return value
    return _SumOverRanks.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `value` over the ranks of `group`; outside autograd, in a new tensor."""
    total = value.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def maximum(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest `value` over the ranks of `group`; outside autograd, in a new tensor."""
    largest = value.detach().clone(memory_format=torch.contiguous_format)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def gathered(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`value` of every rank of `group`, stacked in rank order along a new first dim; outside autograd."""
    value = value.detach().contiguous()
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return value[None]
    everyone = [torch.empty_like(value) for _ in range(ranks)]
    dist.all_gather(everyone, value, group=group)
    return torch.stack(everyone)
