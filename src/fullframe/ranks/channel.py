"""How this rank reaches the others of a process group, and how they notice that they do not run the same program.

CPU ranks of one machine send heads (see `tags`) through mailboxes, with every message; other gloo ranks send them by
gloo, ahead of the message. NCCL's messages wait in no program, so their heads are written down, and compared over the
ranks after each backward pass.
"""

import zlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from fullframe.errors import DivergenceError, FullframeError
from fullframe.processes.exit_reasons import is_machines_fault
from fullframe.ranks import shared_memory as mailbox
from fullframe.ranks.agreement import from_all_ranks, leave_word, word_left
from fullframe.ranks.device import accelerator, is_short_of_memory, place_of_numbers, sends_between_devices
from fullframe.ranks.recording import recorder
from fullframe.ranks.shared_memory import APART_RULE, Mailboxes, mailboxes_between
from fullframe.ranks.tags import HEAD_BYTES, Rows, head_of, line, padded, text_of
from fullframe.ranks.waiting import another_thread_calls, waiting_for_ranks

_KEPT_HEADS = 4096  # of those that NCCL's ranks compare: more than between two backward passes of most models
_FLYING = 64  # heads by gloo that are kept until they are through: more than ranks are ever ahead of each other

_OUT_OF_MEMORY = ("DefaultCPUAllocator", "STATUS_ALLOC_FAILED", "out of memory")  # in a plain RuntimeError
_THREADS_RULE = (
    "which of them is first is another matter on each rank, and one's messages would be taken for the other's; call "
    "models from one thread, or let a lock and the program's order decide whose turn it is"
)
_NO_KERNEL = "unable to find an engine to execute"  # cuDNN, which has none, or no memory for any to work in


class Record:
    """What this rank has sent to a group and received, where heads do not travel with the messages."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.digest, self.count = 0, 0
        self.last: deque[bytes] = deque(maxlen=_KEPT_HEADS)

    def note(self, head: bytes) -> None:
        """Take part in an exchange."""
        self.digest, self.count = zlib.crc32(head, self.digest), self.count + 1
        self.last.append(head)


def compare_records(channels: Sequence["Channel"], group: dist.ProcessGroup) -> None:
    """Raise DivergenceError on all ranks of `group` when some noted other heads than the rest of one of `channels`.

    All ranks call it, with as many channels, of ranks of the group, in one order. Forgets what was compared.
    """
    noted = [(channel.ranks, channel.record) for channel in channels if channel.record is not None]
    own = [number for ranks, record in noted for number in (ranks[0], record.digest, record.count)]
    facts = torch.tensor(own, device=place_of_numbers(group))
    everyone = [torch.empty_like(facts) for _ in range(dist.get_world_size(group))]
    with waiting_for_ranks():
        dist.all_gather(everyone, facts, group=group)
        found = torch.stack(everyone).view(len(everyone), -1, 3).tolist()  # (ranks, channels, 3)
    try:
        for number, (ranks, record) in enumerate(noted):
            alike = {tuple(of_rank[number]) for of_rank in found}
            if len(alike) > len({first for first, *_ in alike}):
                written = from_all_ranks((ranks, record.count, list(record.last)), group)
                said = difference(dict(zip(dist.get_process_group_ranks(group), written, strict=True)))
                raise DivergenceError(f"{said}. {APART_RULE}")
    finally:
        for _, record in noted:
            record.forget()


def difference(written: Mapping[int, tuple[tuple[int, ...], int, list[bytes]]]) -> str:
    """Where ranks of one channel noted other heads; "" where all are alike.

    `written` has of each rank its channel's ranks, how many heads it noted there and the last of them.
    """
    for ranks in sorted({ranks for ranks, *_ in written.values()}):
        heads = [written[rank][1:] for rank in ranks]
        if any(one != heads[0] for one in heads):
            return _first_difference(ranks, heads)
    return ""


def _first_difference(ranks: Sequence[int], heads: Sequence[tuple[int, list[bytes]]]) -> str:
    """The first line at which the ranks' programs differ, with each rank's."""
    begin = max(count - len(last) for count, last in heads)  # what all ranks still remember
    kept = [last[begin - (count - len(last)) :] for count, last in heads]
    number = next((n for n, several in enumerate(zip(*kept, strict=False)) if len(set(several)) > 1), None)
    at = min(map(len, kept)) if number is None else number
    where = "; ".join(
        f"rank {rank} is at: {text_of(own[at]) if at < len(own) else 'the end of backward'}"
        for rank, own in zip(ranks, kept, strict=True)
    )
    return f"the ranks do not run the same program: {where}"


class HeadsByGloo:
    """Heads between the ranks of a gloo group that have no mailboxes, in the order of the program."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = ref(group)
        self._sent: dict[int, int] = defaultdict(int)
        self._expected: dict[int, int] = defaultdict(int)
        self._flying: deque[tuple[Any, Tensor]] = deque(maxlen=_FLYING)

    def send(self, rank: int, head: bytes) -> None:
        """Send the next head to `rank`; does not wait."""
        raw = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._sent[rank] += 1
        self._flying.append((dist.isend(raw, rank, self._group(), tag=gloo_tag(self._sent[rank], True)), raw))

    def expect(self, rank: int) -> tuple[int, Any, Tensor]:
        """The next head from `rank`, for `receive`."""
        raw = torch.empty(HEAD_BYTES, dtype=torch.uint8, device="cpu")
        self._expected[rank] += 1
        return rank, dist.irecv(raw, rank, self._group(), tag=gloo_tag(self._expected[rank], True)), raw

    def receive(self, expected: tuple[int, Any, Tensor], mine: bytes) -> None:
        """Wait for a head; raises DivergenceError where it is another, having told the other ranks."""
        rank, work, raw = expected
        with waiting_for_ranks():
            work.wait()
        head = bytes(raw.tolist())
        if head == mine:
            return
        group = self._group()
        assert group is not None
        me = dist.get_rank()
        for other in dist.get_process_group_ranks(group):
            if other != me:
                end = f"the end, as it met rank {rank} elsewhere; before: {text_of(mine)}"
                self.send(other, padded(end, HEAD_BYTES))
        (a, first), (b, second) = sorted([(rank, text_of(head)), (me, text_of(mine))])
        raise DivergenceError(
            f"the ranks do not run the same program: rank {a} is at: {first}; rank {b} is at: {second}. {APART_RULE}"
        )


class Channel:
    """The ranks of a group as this rank reaches them.

    At most one of `boxes`, `heads` and `record` is there; none where the ranks are not real. `carrier` is the one of
    the first two that brings heads. `device` is the GPU, where messages go from one to another by NCCL, by which also
    what lies on the host is sent, as by `x.cpu().numpy()`.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        boxes: Mailboxes | None = None,
        heads: HeadsByGloo | None = None,
        record: Record | None = None,
        device: torch.device | None = None,
    ):
        self.ranks, self.boxes, self.heads, self.record = ranks, boxes, heads, record
        self.carrier: Mailboxes | HeadsByGloo | None = boxes if boxes is not None else heads
        self.device = device
        self.gathers = self.carrier is None  # equal parts by one collective; gloo's ranks send each part to each rank
        self.others = tuple(rank for rank in ranks if rank != dist.get_rank())
        self.tagged = self.carrier is not None or record is not None
        self.sent: dict[int, int] = defaultdict(int)  # contents by gloo, for their tags
        self.expected: dict[int, int] = defaultdict(int)
        self.coalesces: bool | None = None  # whether the backend makes one call of many messages; asked once

    def head(self, kind: str, at: str, like: Tensor, rows: Rows | None = None) -> bytes:
        """The head of a message like `like` that belongs to the exchange `kind` at line `at`.

        Raises DivergenceError where another thread is calling a parallel model.
        """
        if another_thread_calls():
            said = f"two threads use split tensors at once, at {at}: {_THREADS_RULE}"
            if self.boxes is not None:
                self.boxes.part(said)
            raise DivergenceError(said)
        return head_of(kind, at, like, self.boxes.errors if self.boxes is not None else _announced[0], rows)

    def placed(self, value: Tensor) -> Tensor:
        """`value` where the group's messages may begin: itself, or a copy on the GPU of a tensor of the host."""
        return value if self.device is None or not value.is_cpu else value.to(self.device)

    def agree(self, kind: str, like: Tensor, at: str | None = None) -> None:
        """All ranks are about to do `kind` with a tensor like this one; raises DivergenceError where one is not."""
        if not self.tagged or not self.others:
            return
        head = self.head(kind, at or line(), like)
        if self.carrier is not None:
            for rank in self.others:
                self.carrier.send(rank, head)
            expected: Any
            for expected in [self.carrier.expect(rank) for rank in self.others]:
                self.carrier.receive(expected, head)
        elif self.record is not None:
            self.record.note(head)


_channels: "WeakKeyDictionary[dist.ProcessGroup, Channel]" = WeakKeyDictionary()
_last: list[tuple[Any, Channel | None]] = [(None, None)]  # the group that was asked for last, and its channel
_announced = [0]  # errors, where no mailbox counts them
_generation = [0]  # of channels: what nobody received before they were forgotten must not meet what comes later
_MOST_MESSAGES = 2**20  # until a tag is used again


def channel_of(group: dist.ProcessGroup) -> Channel:
    """The channel of a group; all its ranks make the first call."""
    last, known = _last[0]
    if known is not None and last() is group:
        return known
    known = _channels.get(group)
    if known is None:
        known = _channels[group] = _channel(group)
    _last[0] = ref(group, _forget_last), known
    return known


def _forget_last(_: Any = None) -> None:
    _last[0] = None, None


def gloo_tag(number: int, is_head: bool) -> int:
    """The tag of a pair's message `number`, of its head or its contents, at gloo, where messages meet by their tag."""
    return 2 * (_generation[0] % 512 * _MOST_MESSAGES + number % _MOST_MESSAGES) + is_head


def share_channel(group: dist.ProcessGroup, within: Channel) -> Channel:
    """The channel of a group whose ranks are all `within` another: heads that travel are counted together.

    So ranks that wait for messages of different groups notice it. A record is the group's own: what other ranks send
    along the same axis may have other sizes, and hang on other values.
    """
    if group not in _channels:
        ranks = tuple(dist.get_process_group_ranks(group))
        record = None if within.record is None else Record()
        _channels[group] = Channel(ranks, within.boxes, within.heads, record, within.device)
    return _channels[group]


def generation() -> int:
    """How often channels were forgotten, alike on all ranks."""
    return _generation[0]


def forget_channels() -> None:
    """Make new ones from now on, on all ranks."""
    _channels.clear()
    _forget_last()
    _announced[0] = 0
    _generation[0] += 1


def _channel(group: dist.ProcessGroup) -> Channel:
    ranks = tuple(dist.get_process_group_ranks(group))
    backends = str(dist.get_backend_config(group))
    between_devices = sends_between_devices(group)
    boxes = mailboxes_between(ranks, group) if "gloo" in backends and not between_devices else None
    heads = HeadsByGloo(group) if boxes is None and "gloo" in backends and not between_devices else None
    record, place = (Record(), accelerator()) if between_devices else (None, None)
    return Channel(ranks, boxes, heads, record, place)


def announce(error: Exception, even_ours: bool = False, at: str | None = None) -> None:
    """This rank has met `error`, at line `at`, which the other ranks may not meet: tell them, once.

    Not what is decided alike everywhere, but with `even_ours`, nor what the whole job is started again for: another
    rank's or memory's end. Nor that by which recompute ends when it has what it needs.
    """
    alike = DivergenceError if even_ours else FullframeError
    if recorder() is not None:  # this rank's block will run as it is
        return
    if isinstance(error, (alike, _StopRecomputationError)) or is_machines_fault(error) or is_out_of_memory(error):
        return
    if not getattr(error, "_fullframe_announced", False):
        error._fullframe_announced = True  # type: ignore[attr-defined]
        _announced[0] += 1
        text = f"{type(error).__name__}: {error} (at {at or line()})"
        mailbox.announce(text)
        if any(channel.device is not None for channel in _channels.values()):
            leave_word(_word(dist.get_rank(), _announced[0]), text)


def errors_announced() -> int:
    """How many errors this rank has announced."""
    return _announced[0]


def word_of_error(rank: int, number: int) -> str:
    """What another rank has said of its error of this number, where messages go between devices; "" for nothing."""
    return word_left(_word(rank, number))


def _word(rank: int, number: int) -> str:
    return f"error {number} of rank {rank}, generation {_generation[0]}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the GPU or the host, by whatever error torch, cuBLAS, cuDNN or NCCL say so."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    said = str(error) if isinstance(error, RuntimeError) else ""
    return any(sign in said for sign in _OUT_OF_MEMORY) or (_NO_KERNEL in said and is_short_of_memory())
