"""What ranks send each other, held against NCCL's rules: every rank's calls, one rank after the other, are replayed.

NCCL compares nothing: ranks that call in another order wait for each other for ever, and a message of another size or
dtype than the receiver's is not refused. A communicator is made at its first call, in which all its ranks must take
part. Calls of one communicator queue up: gradient buckets must not share one with an exchange, which a step waits for.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

# What torch's NCCL process group sends: others it refuses, which gloo does not.
DTYPES = frozenset(map(str, (
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
)))  # fmt: skip
GRADIENTS = ("simulation/fake/data_parallel.py", "model/averaging.py", "techniques/update_in_backward.py")


class Sent(NamedTuple):
    """A tensor that is handed to a call."""

    shape: tuple[int, ...]
    dtype: str
    contiguous: bool


class Call(NamedTuple):
    """One call of a rank; `parts` are (what, peer, tensor): of a batch several messages, else one part a tensor."""

    group: str
    ranks: tuple[int, ...]  # the communicator's
    kind: str  # "batch", or that of the collective with what else all ranks must agree on
    parts: tuple[tuple[str, int, Sent], ...]
    line: str

    @property
    def communicator(self) -> tuple[str, tuple[int, ...]]:
        return self.group, self.ranks

    def messages(self, what: str, peer: int) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of what goes to, or comes from, a peer, in order."""
        return [(sent.shape, sent.dtype) for kind, other, sent in self.parts if (kind, other) == (what, peer)]


Log = Sequence[Call]


def faults(logs: Sequence[Log]) -> list[str]:
    """What NCCL's rules have against these calls, by rank."""
    return [*_of_tensors(logs), *_of_first_calls(logs), *_of_communicators(logs), *_of_order(logs)]


def _of_tensors(logs: Sequence[Log]) -> Iterator[str]:
    for rank, log in enumerate(logs):
        for call in log:
            for _, _, sent in call.parts:
                if not sent.contiguous:
                    yield f"rank {rank} sends a tensor {sent.shape} that is not contiguous, at {call.line}"
                if sent.dtype not in DTYPES:
                    yield f"rank {rank} sends {sent.dtype}, which NCCL does not know, at {call.line}"


def _of_first_calls(logs: Sequence[Log]) -> Iterator[str]:
    """A collective is made by all ranks, else the replay finds it; a batch may be made by some."""
    first: dict[tuple[str, tuple[int, ...]], dict[int, Call]] = {}
    for rank, log in enumerate(logs):
        for call in log:
            first.setdefault(call.communicator, {}).setdefault(rank, call)
    for (group, ranks), by_rank in first.items():
        batches = {rank for rank, call in by_rank.items() if call.kind == "batch"}
        if batches and batches != set(ranks):
            at = by_rank[min(batches)].line
            yield f"the first call of group {group} is made by {sorted(batches)} of {list(ranks)}, at {at}"


def _of_communicators(logs: Sequence[Log]) -> Iterator[str]:
    for rank, log in enumerate(logs):
        exchanges = {call.communicator for call in log if call.kind == "batch"}
        for call in log:
            if call.line.startswith(GRADIENTS) and call.communicator in exchanges:
                yield f"rank {rank} sends gradients by the communicator {call.group} of exchanges, at {call.line}"


def _of_order(logs: Sequence[Log]) -> Iterator[str]:
    """Go through all ranks' calls as long as any can be met by those it needs."""
    at = [0] * len(logs)

    def head(rank: int) -> Call | None:
        return logs[rank][at[rank]] if at[rank] < len(logs[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(logs)):
            while (call := head(rank)) is not None:
                together = _together(rank, call, head)
                if together is None:
                    break
                for other in together:
                    at[other] += 1
                moved = True
    for rank in range(len(logs)):
        call = head(rank)
        if call is not None:
            yield f"rank {rank} waits for ever in call {at[rank]} of {len(logs[rank])}: {_told(call)}"


def _told(call: Call) -> str:
    return f"{call.kind} of group {call.group} at {call.line}: {[(w, p, s.shape, s.dtype) for w, p, s in call.parts]}"


def _together(rank: int, call: Call, head: Callable[[int], Call | None]) -> set[int] | None:
    """The ranks whose next calls make up one with this rank's; None where one of them does something else."""
    if call.kind != "batch":
        heads = [head(other) for other in call.ranks]
        alike = all(other is not None and other[:4] == call[:4] for other in heads)
        return set(call.ranks) if alike else None
    found, waiting = {rank}, [rank]
    while waiting:
        one = waiting.pop()
        mine = head(one)
        assert mine is not None
        for other in {peer for _, peer, _ in mine.parts}:
            theirs = head(other)
            if theirs is None or theirs.kind != "batch" or theirs.communicator != mine.communicator:
                return None
            if mine.messages("send", other) != theirs.messages("receive", one):
                return None
            if mine.messages("receive", other) != theirs.messages("send", one):
                return None
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found
