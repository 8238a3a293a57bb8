"""The exchange: every rank owns one interval of a dim and wants another; both are known to all ranks.

Nothing else in the package sends activations; reductions over ranks are in `collectives`.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.geometry.extents import Extents, overlap
from fullframe.geometry.route import Route, Transfer, Wanted, borrows, route
from fullframe.ranks.adjoint import linear
from fullframe.ranks.channel import gloo_tag
from fullframe.ranks.mesh import Axis
from fullframe.ranks.shared_memory import Place, fits
from fullframe.ranks.tags import Rows, line
from fullframe.ranks.waiting import waiting_for_ranks


class Message(NamedTuple):
    """A tensor to send to, or to be filled by, the rank with coordinate `peer` on the axis; what `rows` it holds."""

    peer: int
    tensor: Tensor
    rows: Rows | None = None


class _Sent(NamedTuple):
    """A message by gloo whose head the receiver first compares; `place` is where the head lies, in a mailbox."""

    head: bytes
    place: Place | None
    work: Any
    tensor: Tensor  # which must live until it is through


class _Due(NamedTuple):
    """A message to come; `number` counts gloo's messages of this pair, None where it comes through the mailbox."""

    rank: int
    tensor: Tensor
    head: bytes
    expected: Any  # the head, for the channel's carrier
    number: int | None


class InFlight:
    """Messages that were posted; `wait` returns what was received, in the order of `receives`.

    `kind` says in a word what for. Raises DivergenceError when the other ranks do something else.
    """

    def __init__(self, axis: Axis, sends: list[Message], receives: list[Message], kind: str = "rows"):
        self._axis, self._receives = axis, receives
        self._channel = axis.channel
        self._due: list[_Due] = []
        self._sent: list[_Sent] = []
        self._works: list[Any] = []
        self._staged: list[tuple[Tensor, Tensor]] = []
        # Both sides know the shapes, so a message without elements is sent by neither; gloo would wait for it for ever.
        sends = [message for message in sends if message.tensor.numel()]
        full = [message for message in receives if message.tensor.numel()]
        if self._channel.carrier is None:
            self._post(sends, full)
            return
        at = line()
        for peer, tensor, rows in sends:
            self._send(axis.ranks[peer], tensor, self._channel.head(kind, at, tensor, rows))
        for peer, tensor, rows in full:
            self._expect(axis.ranks[peer], tensor, self._channel.head(kind, at, tensor, rows))

    def _post(self, sends: list[Message], receives: list[Message]) -> None:
        """Send and receive by NCCL, which compares no heads."""
        ranks, group = self._axis.ranks, self._axis.group
        ops = [dist.P2POp(dist.isend, tensor.contiguous(), ranks[peer], group) for peer, tensor, _ in sends]
        ops += [dist.P2POp(dist.irecv, tensor, ranks[peer], group) for peer, tensor, _ in receives]
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def _send(self, rank: int, tensor: Tensor, head: bytes) -> None:
        """Send head and contents, through a mailbox where they fit, else the contents by gloo."""
        boxes = self._channel.boxes
        if boxes is not None and fits(tensor):
            boxes.send(rank, head, tensor)
            return
        number = self._channel.sent[rank] = self._channel.sent[rank] + 1
        place = self._channel.carrier.send(rank, head)  # type: ignore[union-attr]
        tensor = tensor.cpu().contiguous()
        work = dist.isend(tensor, rank, self._axis.group, gloo_tag(number, False))
        self._sent.append(_Sent(head, place, work, tensor))

    def _expect(self, rank: int, tensor: Tensor, head: bytes) -> None:
        """Note what is to come from `rank` into `tensor`; take it at once where its head is there already."""
        boxes = self._channel.boxes
        expected: Any = self._channel.carrier.expect(rank)  # type: ignore[union-attr]
        if boxes is not None and fits(tensor):
            self._due.append(_Due(rank, tensor, head, expected, None))
            return
        number = self._channel.expected[rank] = self._channel.expected[rank] + 1
        due = _Due(rank, tensor, head, expected, number)
        if boxes is not None and boxes.is_there(expected):
            self._meet(due)  # so that the contents are on their way at once
        else:
            self._due.append(due)

    def _meet(self, due: _Due) -> None:
        """Compare the head; only then let the contents come: gloo ends a process that gets more than it expects."""
        if due.number is None:
            self._channel.boxes.receive(due.expected, due.head, due.tensor)  # type: ignore[union-attr]
            return
        self._channel.carrier.receive(due.expected, due.head)  # type: ignore[union-attr]
        buffer = due.tensor if due.tensor.device.type == "cpu" else torch.empty_like(due.tensor, device="cpu")
        if buffer is not due.tensor:
            self._staged.append((due.tensor, buffer))
        self._works.append(dist.irecv(buffer, due.rank, self._axis.group, gloo_tag(due.number, False)))

    def wait(self) -> list[Tensor]:
        """Block until all messages are through."""
        while self._due:
            self._meet(self._due.pop(0))
        for sent in self._sent:
            if sent.place is not None:
                self._channel.boxes.was_read(sent.place, sent.head)  # type: ignore[union-attr]
        self._works += [sent.work for sent in self._sent]
        if self._works:
            with waiting_for_ranks():
                for work in self._works:
                    work.wait()
        for target, source in self._staged:
            target.copy_(source)
        self._sent, self._works, self._staged = [], [], []
        return [message.tensor for message in self._receives]

    def __del__(self) -> None:
        for due in getattr(self, "_due", ()):  # an error came between post and wait
            if self._channel.boxes is not None:
                self._channel.boxes.abandon(due.expected)


def post(
    axis: Axis, plan: Route, blocks: list[Tensor], shapes: list[list[int]], like: Tensor, size: int, kind: str = "rows"
) -> InFlight:
    """Send and receive what `plan` names; returns at once. All ranks of the axis call this together.

    `blocks` are what is sent, `shapes` those of what comes, in the dtype of `like`; `size` is the number of rows of the
    whole dim. Gradients go home by `plan.back`.
    """
    sends = [_message(t, block, size) for t, block in zip(plan.sends, blocks, strict=True)]
    receives = [_message(t, like.new_empty(shape), size) for t, shape in zip(plan.receives, shapes, strict=True)]
    if axis.channel.record is not None:  # a rank that neither sends nor receives takes part too
        axis.channel.record.note(axis.channel.head(kind, line(), like.new_empty((0,) * like.dim())))
    return InFlight(axis, sends, receives, kind)


def _message(transfer: Transfer, tensor: Tensor, size: int) -> Message:
    return Message(transfer.peer, tensor, Rows(transfer.rows.start, transfer.rows.stop, size))


def _shape(tensor: Tensor, dim: int, rows: range) -> list[int]:
    """The shape of `tensor` with so many rows in `dim`."""
    return [*tensor.shape[:dim], len(rows), *tensor.shape[dim + 1 :]]


def fetch(local: Tensor, dim: int, extents: Extents, wanted: Wanted, axis: Axis) -> Tensor:
    """The rows `wanted[coordinate]` of a dim that is split at `extents`; differentiable.

    `local` (..., own rows, ...) becomes (..., wanted rows, ...), of any global rows: near, far, none or all. The
    gradient of a borrowed row is sent back and added. All ranks of `axis` call this together.
    """
    if wanted == extents.ranges:
        return local
    if not borrows(extents, wanted):
        own, rows = extents.ranges[axis.coordinate], wanted[axis.coordinate]
        return local.narrow(dim, rows.start - own.start if rows else 0, len(rows))
    where: Any = {"dim": dim, "extents": extents, "wanted": wanted, "axis": axis}
    return linear(local, partial(_fetch, **where), partial(_return, **where))


def _fetch(local: Tensor, dim: int, extents: Extents, wanted: Wanted, axis: Axis) -> Tensor:
    """`fetch` without a gradient: what is received and what is kept, joined in the order of rows."""
    own, rows = extents.ranges[axis.coordinate], wanted[axis.coordinate]
    plan = route(extents, wanted, axis.coordinate)

    def cut(piece: range) -> Tensor:
        return local.narrow(dim, piece.start - own.start, len(piece))

    shapes = [_shape(local, dim, t.rows) for t in plan.receives]
    received = post(axis, plan, [cut(t.rows) for t in plan.sends], shapes, local, extents.size).wait()
    pieces = [(t.rows.start, tensor) for t, tensor in zip(plan.receives, received, strict=True)]
    kept = overlap(own, rows)
    if kept or not pieces:
        pieces.append((kept.start, cut(kept) if kept else local.narrow(dim, 0, 0)))
    return joined([tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])], dim)


def joined(tensors: list[Tensor], dim: int) -> Tensor:
    """`torch.cat`, whatever autocast is on: the CPU's would refuse tensors of the other 16-bit dtype.

    An empty part stays in the graph: torch drops one that has a single dim, and then the ranks' backward passes differ.
    """
    with torch._C._DisableAutocast():
        if tensors[0].dim() == 1 and torch.is_grad_enabled():
            return torch.cat([tensor[:, None] for tensor in tensors]).squeeze(1)
        return torch.cat(tensors, dim)


def _return(gradient: Tensor, dim: int, extents: Extents, wanted: Wanted, axis: Axis) -> Tensor:
    """The adjoint of `_fetch`: (..., wanted rows, ...) to (..., own rows, ...); what was borrowed goes home."""
    own, rows = extents.ranges[axis.coordinate], wanted[axis.coordinate]
    plan = route(extents, wanted, axis.coordinate)
    borrowed = [gradient.narrow(dim, t.rows.start - rows.start, len(t.rows)) for t in plan.receives]
    shapes = [_shape(gradient, dim, t.rows) for t in plan.sends]
    flight = post(axis, plan.back, borrowed, shapes, gradient, extents.size, "gradient of rows")
    result = gradient.new_zeros(_shape(gradient, dim, own))
    kept = overlap(own, rows)
    if kept:
        target = result.narrow(dim, kept.start - own.start, len(kept))
        target.copy_(gradient.narrow(dim, kept.start - rows.start, len(kept)))
    for transfer, returned in zip(plan.sends, flight.wait(), strict=True):
        result.narrow(dim, transfer.rows.start - own.start, len(transfer.rows)).add_(returned)
    return result
