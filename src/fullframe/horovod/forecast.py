"""Small allreduces that come again and again are done without asking first: the question travels with the numbers.

Every rank learns the same from what all have done, so all expect the same collective next. They reduce it at once, with
three numbers more: whether any rank wanted something else, and which of the unnamed ones each meant, or of a named one
its checksum. If all wanted it, it is done; if not, it is thrown away and the ranks ask each other as usual.
"""

import math
from collections.abc import Sequence

import torch

from fullframe.horovod.collectives import Collectives
from fullframe.horovod.execution import finish_reduction, scale, writing
from fullframe.horovod.request import ReduceOp, Request
from fullframe.horovod.submission import Submission
from fullframe.horovod.table import Due

_LARGEST_BYTES = 256 << 10  # what is thrown away in vain must not cost more than the question
_SURE = 2  # times that a collective followed another, before it is expected to
_KEPT = 64
_EXACT = 1 << 24  # up to which whole numbers are exact in float32


class _Known:
    """A small allreduce that was seen: its buffer, and what came next, how often."""

    def __init__(self, request: Request):
        count = torch.Size(request.shapes[0]).numel()
        self.request = request
        self.buffer = torch.zeros(count + 3, dtype=getattr(torch, request.dtypes[0]), device="cpu")
        self.data = self.buffer[:count].view(request.shapes[0])
        self.head = self.buffer[count:].numpy()  # whose numbers are read and written faster than a tensor's
        self.follower: _Known | None = None
        self.times = 0


class Forecast:
    """Which collective comes next, by what came before."""

    def __init__(self, collectives: Collectives):
        self._collectives = collectives
        self._cycle = math.isqrt(_EXACT // collectives.size)  # of the numbers: their squares' sum is exact
        self._known: dict[Request, _Known] = {}
        self._last: _Known | None = None
        self.expected: Request | None = None  # what all ranks expect next

    def learn(self, due: Sequence[Due]) -> None:
        """Take note of what the ranks have agreed to do in one round."""
        for item in due:
            one = self._find(item.request) if len(due) == 1 and _is_small(item) else None
            if one is not None and self._last is not None:
                last = self._last
                last.times = last.times + 1 if last.follower is one else 1
                last.follower = one
            self._follow(one)

    def expects(self, request: Request) -> bool:
        """Whether it is this one that all ranks expect next."""
        if self.expected is request:
            return True
        if self.expected != request or self._last is None or self._last.follower is None:
            return False
        self.expected = self._last.follower.request = request  # the same next time, which is found faster
        return True

    def attempt(self, submission: Submission | None) -> bool:
        """Reduce what is expected, which is `submission` unless this rank wants another; whether all wanted it."""
        assert self._last is not None and self._last.follower is not None
        known = self._last.follower
        request, data, head, size = known.request, known.data, known.head, self._collectives.size
        if submission is None:
            known.buffer.zero_()
            head[0] = 1
        else:
            data.copy_(submission.inputs[0])
            scale(data, request.prescale)
            number = submission.number % self._cycle
            head[0], head[1], head[2] = 0, number, number * number
        self._collectives.allreduce(known.buffer, ReduceOp.Sum)
        others, total, squares = head.tolist()
        if others or size * squares != total * total:
            self._last.times, self.expected = 0, None
            return False
        assert submission is not None
        target = torch.empty_like(data) if submission.targets is None else submission.targets[0]
        with writing(target):
            finish_reduction(target, data, request, size)
        self._follow(known)
        submission.finish([target])
        return True

    def _follow(self, known: _Known | None) -> None:
        self._last, follower = known, None if known is None or known.times < _SURE else known.follower
        self.expected = None if follower is None else follower.request

    def _find(self, request: Request) -> _Known | None:
        if request not in self._known and len(self._known) < _KEPT:
            with torch.inference_mode(False):  # that of the caller who is the first
                self._known[request] = _Known(request)
        return self._known.get(request)


def _is_small(due: Due) -> bool:
    request = due.request
    if due.error or request.kind != "allreduce" or len(request.shapes) != 1 or None in due.requests:
        return False
    if request.device != "cpu" or request.op not in (ReduceOp.Sum, ReduceOp.Average):
        return False
    size = {"float32": 4, "float64": 8}.get(request.dtypes[0], 0) * torch.Size(request.shapes[0]).numel()
    return 0 < size <= _LARGEST_BYTES
