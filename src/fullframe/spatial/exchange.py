"""The exchange: every rank owns one interval of a dim and wants another; both are known to all ranks.

Nothing else in the package sends activations. Reductions over ranks are at the end of this file.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.geometry.extents import Extents, overlap
from fullframe.geometry.route import Route, Wanted, borrows, route
from fullframe.spatial.mailbox import Place, fits, mailboxes_of
from fullframe.spatial.mesh import Axis


class Message(NamedTuple):
    """A tensor to send to, or to be filled by, the rank with coordinate `peer` on the axis."""

    peer: int
    tensor: Tensor


class InFlight:
    """Messages that were posted; `wait` returns what was received, in the order of `receives`."""

    def __init__(self, axis: Axis, sends: list[Message], receives: list[Message]):
        self._receives = receives
        # Both sides know the shapes, so a message without elements is sent by neither; gloo would wait for it for ever.
        sends = [message for message in sends if message.tensor.numel()]
        full = [message for message in receives if message.tensor.numel()]
        self._boxes, self._expected = axis.boxes, list[tuple[Place, Tensor]]()
        if axis.boxes is not None:
            for peer, tensor in sends:
                if fits(tensor):
                    axis.boxes.send(axis.ranks[peer], tensor)
            self._expected = [(axis.boxes.expect(axis.ranks[peer]), t) for peer, t in full if fits(t)]
            sends = [message for message in sends if not fits(message.tensor)]
            full = [message for message in full if not fits(message.tensor)]
        self._keep = [Message(peer, tensor.contiguous()) for peer, tensor in sends]  # until the messages are through
        self._staged: list[tuple[Tensor, Tensor]] = []
        if axis.staged:
            self._keep = [Message(peer, tensor.cpu()) for peer, tensor in self._keep]
            buffers = [Message(peer, torch.empty_like(tensor, device="cpu")) for peer, tensor in full]
            self._staged = [(m.tensor, buffer.tensor) for m, buffer in zip(full, buffers, strict=True)]
            full = buffers
        ops = [dist.P2POp(dist.isend, t, axis.ranks[peer], axis.group) for peer, t in self._keep]
        ops += [dist.P2POp(dist.irecv, t, axis.ranks[peer], axis.group) for peer, t in full]
        self._works: list[Any] = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> list[Tensor]:
        """Block until all messages are through."""
        while self._expected:
            place, tensor = self._expected.pop(0)
            self._boxes.receive(place, tensor)  # type: ignore[union-attr]
        for work in self._works:
            work.wait()
        for target, source in self._staged:
            target.copy_(source)
        return [tensor for _, tensor in self._receives]

    def __del__(self) -> None:
        for place, _ in self._expected:  # an error came between post and wait
            self._boxes.abandon(place)  # type: ignore[union-attr]


def post_borrow(
    axis: Axis, plan: Route, block: Callable[[range], Tensor], shape_of: Callable[[range], list[int]], like: Tensor
) -> InFlight:
    """Send the rows `plan` names, each cut out by `block(rows)`, and receive those that others own."""
    sends = [Message(peer, block(rows)) for peer, rows in plan.sends]
    receives = [Message(peer, like.new_empty(shape_of(rows))) for peer, rows in plan.receives]
    return InFlight(axis, sends, receives)


def post_return(
    axis: Axis, plan: Route, gradients: list[Tensor], shape_of: Callable[[range], list[int]], like: Tensor
) -> InFlight:
    """The adjoint of `post_borrow`: the gradients of what was received go back to the owners."""
    sends = [Message(t.peer, gradient) for t, gradient in zip(plan.receives, gradients, strict=True)]
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Return.apply(gradient, *ctx.where), None, None, None, None  # type: ignore[no-untyped-call]


class _Return(torch.autograd.Function):
    """The adjoint of `fetch`, which is its own."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, dim: int, extents: Extents, wanted: Wanted, axis: Axis) -> Tensor:
        ctx.where = dim, extents, wanted, axis
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
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Fetch.apply(gradient, *ctx.where), None, None, None, None  # type: ignore[no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    """All-reduce; the adjoint of a sum whose result every rank holds is the sum of what every rank's copy gets."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _SumOverRanks.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


def sum_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `value` over the ranks of `group`, on all of them; differentiable."""
    if dist.get_world_size(group) == 1:
        return value
    return _SumOverRanks.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `value` over the ranks of `group`; outside autograd, in a new tensor."""
    if value.device.type == "cpu" and value.numel() and fits(value) and mailboxes_of(group) is not None:
        return gathered(value, group).sum(0, dtype=value.dtype)  # in rank order, so equal to the last bit on all ranks
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if total.numel():
        dist.all_reduce(total, group=group)
    return total


class _GatherOverRanks(torch.autograd.Function):
    """All-gather; every rank holds all the values, so what a rank's own gets is the sum over the copies of its slot."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return sum_over_ranks(gradient, ctx.group)[dist.get_rank(ctx.group)], None


def gather_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`value` of every rank of `group`, stacked in rank order along a new first dim; differentiable."""
    if dist.get_world_size(group) == 1:
        return value[None]
    return _GatherOverRanks.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def gathered(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`value` of every rank of `group`, stacked in rank order along a new first dim; outside autograd."""
    value = value.detach().contiguous()
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or not value.numel():
        return value.expand(len(ranks), *value.shape).clone()
    everyone = [torch.empty_like(value) for _ in ranks]
    boxes = mailboxes_of(group) if value.device.type == "cpu" and fits(value) and value.numel() else None
    if boxes is None:
        # As bytes: gloo knows no int16, no complex numbers.
        plain = [t.view(-1).view(torch.uint8) for t in (value, *everyone)]
        dist.all_gather(plain[1:], plain[0], group=group)
        return torch.stack(everyone)
    me = dist.get_rank()
    for rank in ranks:
        if rank != me:
            boxes.send(rank, value)
    for rank, target in zip(ranks, everyone, strict=True):
        if rank == me:
            target.copy_(value)
        else:
            boxes.receive(boxes.expect(rank), target)
    return torch.stack(everyone)
