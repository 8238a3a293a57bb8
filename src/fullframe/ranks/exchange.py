"""The exchange: every rank owns one interval of a dim and wants another; both are known to all ranks.

Nothing else in the package sends activations; reductions over ranks are in `collectives`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.geometry.extents import Extents, overlap
from fullframe.geometry.route import Route, Transfer, Wanted, borrows, route
from fullframe.ranks.adjoint import linear
from fullframe.ranks.channel import gloo_tag
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import Axis
from fullframe.ranks.raw_bytes import KNOWN, in_bytes, plain
from fullframe.ranks.recording import recorder
from fullframe.ranks.shared_memory import Place, fits
from fullframe.ranks.tags import Rows, line
from fullframe.ranks.waiting import waiting_for_ranks


class Message(NamedTuple):
    """A tensor to send to, or to be filled by, the rank with coordinate `peer` on the axis; what `rows` it holds."""

    peer: int
    tensor: Tensor
    rows: Rows | None = None


message_of: Callable[[tuple[int, Tensor, Rows | None]], Message] = partial(tuple.__new__, Message)  # in half the time


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

    `kind` says in a word what for, `at` stands for the line where that is known already. Raises DivergenceError when
    the other ranks do something else.
    """

    def __init__(self, axis: Axis, sends: list[Message], receives: list[Message], kind: str = "rows", at: str = ""):
        self._axis, self._receives = axis, receives
        self._channel = axis.channel
        self._due: list[_Due] = []
        self._sent: list[_Sent] = []
        self._works: list[Any] = []
        self._staged: list[tuple[Tensor, Tensor]] = []
        # Both sides know the shapes, so a message without elements is sent by neither; gloo would wait for it for ever.
        if self._channel.carrier is None:
            self._post(sends, receives)
            return
        sends = [message for message in sends if message[1].numel()]
        full = [message for message in receives if message[1].numel()]
        at = at or line()
        for peer, tensor, rows in sends:
            self._send(axis.ranks[peer], tensor, self._channel.head(kind, at, tensor, rows))
        for peer, tensor, rows in full:
            self._expect(axis.ranks[peer], tensor, self._channel.head(kind, at, tensor, rows))

    def _post(self, sends: list[Message], receives: list[Message]) -> None:
        """Send and receive by NCCL, which compares no heads: as `dist.batch_isend_irecv` does, in a third of its time.

        A rank's coordinate on the axis is its number in the group.
        """
        blocks, to, targets, of = [], [], [], []
        channel, works = self._channel, self._works
        place = None if channel.device is None else channel.device.type
        for peer, tensor, _ in sends:
            if tensor.numel():
                blocks.append(tensor)
                to.append(peer)
        for peer, tensor, _ in receives:
            if tensor.numel():
                target = self._contiguous(tensor, place)
                targets.append(target if target.dtype in KNOWN else in_bytes(target))
                of.append(peer)
        if not blocks and not targets:
            return
        if blocks:
            blocks = _packed(blocks)
        if place is not None:
            blocks = list(map(channel.placed, blocks))
        blocks = [block if block.dtype in KNOWN else in_bytes(block) for block in blocks]  # stages send several dtypes
        group, device = self._axis.group, (blocks or targets)[0].device
        batched = channel.coalesces
        if batched is None:
            batched = channel.coalesces = group._get_backend(device).supports_coalescing
        if batched:
            group._start_coalescing(device)
        for block, peer in zip(blocks, to, strict=True):
            works.append(group.send([block], peer, 0))
        for target, peer in zip(targets, of, strict=True):
            works.append(group.recv([target], peer, 0))
        if batched:
            self._works = [group._end_coalescing(device)]

    def _send(self, rank: int, tensor: Tensor, head: bytes) -> None:
        """Send head and contents, through a mailbox where they fit, else the contents by gloo."""
        boxes = self._channel.boxes
        if boxes is not None and fits(tensor):
            boxes.send(rank, head, tensor)
            return
        number = self._channel.sent[rank] = self._channel.sent[rank] + 1
        place = self._channel.carrier.send(rank, head)  # type: ignore[union-attr]
        tensor = plain(tensor.cpu())
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
        buffer = self._contiguous(due.tensor, "cpu")
        self._works.append(dist.irecv(buffer, due.rank, self._axis.group, gloo_tag(due.number, False)))

    def _contiguous(self, target: Tensor, device: str | None = None) -> Tensor:
        """What a message for `target` is received into: itself, or a buffer that `wait` copies from."""
        if target.is_contiguous() and device in (None, target.device.type):
            return target
        buffer = torch.empty(target.shape, dtype=target.dtype, device=device or target.device)
        self._staged.append((target, buffer))
        return buffer

    def wait(self, after: Sequence[Tensor] = ()) -> list[Tensor]:
        """Block until all messages are through; a captured graph computes `after` meanwhile."""
        while self._due:
            self._meet(self._due.pop(0))
        if self._sent:
            for sent in self._sent:
                if sent.place is not None:
                    self._channel.boxes.was_read(sent.place, sent.head)  # type: ignore[union-attr]
                self._works.append(sent.work)
            self._sent.clear()
        if self._works:
            with waiting_for_ranks():
                for work in self._works:
                    work.wait()
            self._works.clear()
        if self._staged:
            for target, source in self._staged:
                target.copy_(source)
            self._staged.clear()
        return [message[1] for message in self._receives]

    def __del__(self) -> None:
        for due in getattr(self, "_due", ()):  # an error came between post and wait
            if self._channel.boxes is not None:
                self._channel.boxes.abandon(due.expected)


def post(
    axis: Axis, plan: Route, blocks: list[Tensor], shapes: list[list[int]], like: Tensor, size: int,
    kind: str = "rows", at_once: bool = False,
) -> InFlight:  # fmt: skip
    """Send and receive what `plan` names; returns at once. All ranks of the axis call this together.

    `blocks` are what is sent, `shapes` those of what comes, in the dtype of `like`; `size` is the number of rows of the
    whole dim. Gradients go home by `plan.back`. `at_once`: it is waited for before anything long is computed.
    """
    sends = [Message(t.peer, block, _rows(t, size)) for t, block in zip(plan.sends, blocks, strict=True)]
    due = zip(plan.receives, shapes, strict=True)
    receives = [Message(t.peer, like.new_empty(shape), _rows(t, size)) for t, shape in due]
    return _posted(axis, sends, receives, like, kind, at_once)


def _packed(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, contiguous; on a GPU those of one shape and dtype are copied by one kernel."""
    first = tensors[0]
    by_one = len(tensors) > 1 and not (first.is_cpu or first.is_contiguous())
    if by_one and len({(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        packed = first.new_empty((len(tensors), *first.shape))  # left to itself `stack` keeps channels_last
        return list(torch.stack(tensors, out=packed).unbind())
    return [plain(tensor) for tensor in tensors]


def _rows(transfer: Transfer, size: int) -> Rows:
    return Rows(transfer.rows.start, transfer.rows.stop, size)


def _posted(
    axis: Axis, sends: list[Message], receives: list[Message], like: Tensor, kind: str, at_once: bool = False
) -> InFlight:
    """`at_once`: nothing is computed meanwhile that is worth two operators in a graph."""
    by = recorder()
    if by is not None:
        return by.post(axis, sends, receives, like, kind, at_once)  # type: ignore[no-any-return]
    if axis.channel.record is not None:
        noted(axis, like, kind)
    return InFlight(axis, sends, receives, kind)


def noted(axis: Axis, like: Tensor, kind: str, at: str = "") -> None:
    """Where heads are written down: a rank that neither sends nor receives takes part too."""
    if axis.channel.record is not None:
        axis.channel.record.note(axis.channel.head(kind, at or line(), like.new_empty((0,) * like.dim())))


class Lot(NamedTuple):
    """Rows to or from `peer`: `length` from row `start` of what this rank holds; `rows` says which of the whole dim."""

    peer: int
    start: int
    length: int
    rows: Rows


class Trip(NamedTuple):
    """What one rank sends, keeps and receives when it owns one interval of a dim and wants another."""

    sends: tuple[Lot, ...]  # counted in its own rows
    receives: tuple[Lot, ...]  # counted in the wanted rows
    kept: tuple[int, int, int]  # first own row, how many, first wanted row
    before: int  # how many receives lie before what is kept
    own: int  # rows
    wanted: int


@lru_cache(maxsize=65536)
def trip(extents: Extents, wanted: Wanted, rank: int) -> Trip:
    """The trip of `rank` when rank `r` owns `extents.ranges[r]` and wants `wanted[r]`."""
    own, rows, plan = extents.ranges[rank], wanted[rank], route(extents, wanted, rank)

    def lots(transfers: tuple[Transfer, ...], first: int) -> tuple[Lot, ...]:
        return tuple(Lot(t.peer, t.rows.start - first, len(t.rows), _rows(t, extents.size)) for t in transfers)

    here = overlap(own, rows)
    kept = (here.start - own.start, len(here), here.start - rows.start) if here else (0, 0, 0)
    before = sum(t.rows.start < here.start for t in plan.receives) if here else 0
    return Trip(lots(plan.sends, own.start), lots(plan.receives, rows.start), kept, before, len(own), len(rows))


def fetch(local: Tensor, dim: int, extents: Extents, wanted: Wanted, axis: Axis) -> Tensor:
    """The rows `wanted[coordinate]` of a dim that is split at `extents`; differentiable.

    `local` (..., own rows, ...) becomes (..., wanted rows, ...), of any global rows: near, far, none or all. The
    gradient of a borrowed row is sent back and added. All ranks of `axis` call this together.
    """
    if wanted == extents.ranges:
        return local
    way = trip(extents, wanted, axis.coordinate)
    if not borrows(extents, wanted):
        return local.narrow(dim, *way.kept[:2])

    def there(local: Tensor) -> Tensor:
        return assembled(local, borrowed(local, dim, way, axis), dim, way)

    return linear(local, there, partial(brought_back, dim=dim, way=way, axis=axis))


def borrowed(local: Tensor, dim: int, way: Trip, axis: Axis) -> list[Tensor]:
    """The rows that other ranks lend, one tensor a message, in the memory format of `local`; without a gradient."""
    return _lots(local, dim, way.sends, way.receives, axis, "rows").wait()


def _lots(
    tensor: Tensor, dim: int, sends: tuple[Lot, ...], receives: tuple[Lot, ...], axis: Axis, kind: str
) -> InFlight:
    """In flight: cut from `tensor` and due in its memory format; whoever calls waits before anything long."""
    out, due = [], []
    for peer, start, length, rows in sends:
        out.append(message_of((peer, tensor.narrow(dim, start, length), rows)))
    for peer, _, length, rows in receives:
        due.append(message_of((peer, _rows_like(tensor, dim, length), rows)))
    return _posted(axis, out, due, tensor, kind, at_once=True)


def _rows_like(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """An empty tensor like this one, with so many rows in `dim`."""
    shape = list(tensor.shape)
    shape[dim] = rows
    if tensor.is_contiguous():
        return tensor.new_empty(*shape)  # in two thirds of the time that it takes with a list
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format_of(tensor))


def assembled(local: Tensor, strips: Sequence[Tensor], dim: int, way: Trip, around: tuple[int, int] = (0, 0)) -> Tensor:
    """The wanted rows, joined in a new tensor from what is kept of `local` and the `strips` that were borrowed.

    `around`: so many rows of zeros come before and behind.
    """
    start, count, _ = way.kept
    kept = local if count == local.shape[dim] else local.narrow(dim, start, count)
    parts = [*strips[: way.before], kept, *strips[way.before :]] if count or not strips else list(strips)
    before, behind = around
    if before:
        parts.insert(0, _rows_like(local, dim, before).zero_())
    if behind:
        parts.append(_rows_like(local, dim, behind).zero_())
    return joined(parts, dim)


def brought_back(gradient: Tensor, dim: int, way: Trip, axis: Axis, borrows: bool = True) -> Tensor:
    """The adjoint of `fetch`: (..., wanted rows, ...) to (..., own rows, ...); what was borrowed goes home."""
    flight = _lots(gradient, dim, way.receives, way.sends, axis, "gradient of rows") if borrows else None
    start, count, first = way.kept
    kept = gradient.narrow(dim, first, count)
    if count == way.own:
        result = kept.clone()
    else:
        result = _rows_like(gradient, dim, way.own).zero_()
        result.narrow(dim, start, count).copy_(kept)
    for lot, returned in zip(way.sends, flight.wait() if flight is not None else (), strict=True):
        result.narrow(dim, lot.start, lot.length).add_(returned)
    return result


def joined(tensors: list[Tensor], dim: int) -> Tensor:
    """`torch.cat`, whatever autocast is on: the CPU's would refuse tensors of the other 16-bit dtype.

    An empty part stays in the graph: torch drops one that has a single dim, and then the ranks' backward passes differ.
    """
    if tensors[0].dim() == 1 and torch.is_grad_enabled():
        return joined([tensor[:, None] for tensor in tensors], 0).squeeze(1)
    if not torch._C._is_any_autocast_enabled():
        return torch.cat(tensors, dim)
    with torch._C._DisableAutocast():
        return torch.cat(tensors, dim)
