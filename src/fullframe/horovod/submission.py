"""A collective that this rank has asked for, until its result is there."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.horovod.exceptions import HorovodInternalError
from fullframe.horovod.request import Request
from fullframe.horovod.table import key_of


class _Mark:
    """A place in the present stream of a GPU, for which other streams wait."""

    def __init__(self, device: torch.device):
        self.device, self._stream = device, torch.cuda.current_stream(device)
        self.event = self._stream.record_event()

    def meet(self, tensors: Sequence[Tensor]) -> None:
        """The present stream uses the tensors from here on; before it is through their memory is not given out."""
        stream = torch.cuda.current_stream(self.device)
        if stream == self._stream:
            return
        stream.wait_event(self.event)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)


class Submission:
    """What goes in, where it goes to, and how it ended.

    `targets`: tensors that the result is written into, in place of new ones; they may be the inputs themselves.
    """

    def __init__(
        self, request: Request, number: int, inputs: Sequence[Tensor] = (), targets: Sequence[Tensor] | None = None
    ):
        self.request, self.number = request, number
        self.key = key_of(request, number)  # under which the ranks meet
        self.inputs, self.targets = inputs, targets
        self.result: Any = None
        self.error: HorovodInternalError | None = None
        self.begun = time.perf_counter()
        self._over = False
        self._bell: threading.Event | None = None
        self._asked: _Mark | None = None  # on a GPU, where the inputs are computed, by the stream of who asks
        self._written: _Mark | None = None  # where the result is, by that of who does it
        if request.device == "cuda":
            self._asked = _Mark(inputs[0].device)

    @property
    def label(self) -> str:
        """How it is called in a timeline and in warnings."""
        return self.request.name or f"{self.request.kind}.noname.{self.number}"

    def begin(self) -> None:
        """Before the inputs are read, on the thread that does."""
        if self._asked is not None:
            self._asked.meet([*self.inputs, *(self.targets or ())])

    def finish(self, result: Any) -> None:
        """The result is there, on a GPU as soon as the stream comes to it."""
        self.result = result
        if self._asked is not None:
            self._written = _Mark(self._asked.device)
        self._end()

    def fail(self, error: HorovodInternalError) -> None:
        """There will be no result."""
        self.error = error
        self._end()

    @property
    def has_ended(self) -> bool:
        """Whether it has a result or an error, if only on the stream that computes."""
        return self._over

    @property
    def done(self) -> bool:
        """Whether `outcome` would not wait."""
        return self._over and (self._written is None or self._written.event.query())

    def wait(self, seconds: float) -> bool:
        """Whether it ended within so long."""
        if self._over:  # a thread that did it itself needs no event, which takes longer to make than all else here
            return True
        if self._bell is None:
            self._bell = threading.Event()
            if self._over:  # it ended before it could ring
                self._bell.set()
        return self._bell.wait(seconds)

    def outcome(self) -> Any:
        """The result of what has ended; raises what it ended with."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        if self._written is not None:
            self._written.meet(self.result)
        return self.result

    def _end(self) -> None:
        self._over = True  # before the bell is looked for: a waiter makes the bell, then looks here
        if self._bell is not None:
            self._bell.set()
