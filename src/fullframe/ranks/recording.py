"""While a block is captured nothing is sent or drawn: a recorder notes it, for a graph that does so at every run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class NotCapturable(Exception):
    """A block does something that a graph cannot hold, so it runs as it is; says what."""


class NotYet(NotCapturable):
    """A block has changed itself at this call, and may be done with that: it is tried again at the next."""


class Recorder(Protocol):
    """What is asked in place of other ranks, and of random generators."""

    def post(
        self, axis: Any, sends: Sequence[Any], receives: Sequence[Any], like: Tensor, kind: str, at_once: bool
    ) -> Any:
        """As an `InFlight` of these messages; `like` has their dtype and dims.

        `at_once`: it is waited for before anything else is sent, and nothing long is computed meanwhile.
        """

    def all_sum(self, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """As `all_sum_no_grad`."""

    def all_gather(self, value: Tensor, group: dist.ProcessGroup, kind: str) -> Tensor:
        """As `all_gather_no_grad`."""

    def share_out(self, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's part of the sum over the ranks of (ranks, ...)."""

    def kept(self, shape: Sequence[int], p: float, device: torch.device, part: int) -> Tensor:
        """True with probability `p`, drawn for part number `part` from a seed that is alike on all ranks."""


_recorders: list[Recorder | None] = []


def recorder() -> Recorder | None:
    """The one that is at work just now; None where messages are sent."""
    return _recorders[-1] if _recorders else None


@contextmanager
def recording(by: Recorder | None) -> Iterator[None]:
    """Inside, `by` is asked; with None messages are sent, whatever is captured around."""
    _recorders.append(by)
    try:
        yield
    finally:
        _recorders.pop()


_reasons: list[str] = []


@contextmanager
def as_they_are(why: str) -> Iterator[None]:
    """Inside, compiled blocks run as they are, for this reason."""
    _reasons.append(why)
    try:
        yield
    finally:
        _reasons.pop()


def reason_not_to_compile() -> str:
    """The innermost of these reasons; "" where there is none."""
    return _reasons[-1] if _reasons else ""


def require_sending(what: str) -> None:
    """Raises NotCapturable while a block is captured, which does `what`."""
    if recorder() is not None:
        raise NotCapturable(what)
