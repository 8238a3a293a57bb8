"""How long the parts of a step take: by the host's clock on the CPU, by events on a GPU, for which nobody waits.

What a rank waits for rows of its neighbours is taken out of forward and backward on the CPU; on a GPU, where the device
waits, it is part of them. The code for GPUs has never run on one.
"""

import time
from collections import deque
from itertools import pairwise
from typing import Any

import torch

from fullframe.ranks.waiting import waited_seconds

_WAITING = ("forward", "backward")  # in which ranks exchange rows
_PENDING = 64  # steps whose events are kept until the device has met them


class Phases:
    """`enter(name)` ends what was before; `take()` gives the seconds of the steps that are known by now.

    Nothing is measured unless somebody who takes it has made it `active`.
    """

    def __init__(self, device: torch.device):
        self.active = False
        self._events = device.type != "cpu"
        self._name, self._since, self._waited = "", 0.0, 0.0
        self._seconds: dict[str, float] = {}
        self._marks: list[tuple[str, Any]] = []
        self._pending: deque[tuple[int, list[tuple[str, Any]]]] = deque(maxlen=_PENDING)

    def enter(self, name: str) -> None:
        """From now on the step does this; "": nothing that counts."""
        if not self.active:
            return
        if self._events:
            event = torch.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
            return
        now, waited = time.perf_counter(), waited_seconds()
        if self._name:
            inside = waited - self._waited if self._name in _WAITING else 0.0
            self._add(self._name, now - self._since - inside)
            if inside:
                self._add("exchange", inside)
        self._name, self._since, self._waited = name, now, waited

    @property
    def now(self) -> str:
        """What the step does just now; "" where that is not known, or nothing that counts."""
        return self._marks[-1][0] if self._events and self._marks else self._name

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self, step: int) -> dict[int, dict[str, float]]:
        """After a step: the seconds by phase of it, and of earlier ones that a device has got through since."""
        if not self._events:
            found, self._seconds = {step: self._seconds}, {}
            return found
        self._pending.append((step, self._marks))
        self._marks = []
        done: dict[int, dict[str, float]] = {}
        while self._pending and (not self._pending[0][1] or self._pending[0][1][-1][1].query()):
            number, marks = self._pending.popleft()
            seconds = done[number] = {}
            for (name, event), (_, after) in pairwise(marks):
                if name:
                    seconds[name] = seconds.get(name, 0.0) + event.elapsed_time(after) / 1e3
        return done
