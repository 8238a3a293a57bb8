"""What would be done once at the capture and never again is put back, and refused."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fullframe.model.compiled.guard import Guard
from fullframe.model.compiled.unchanged import unchanged
from fullframe.ranks.recording import NotCapturable


@dataclass(frozen=True, slots=True)
class Frozen:
    gain: float


def made() -> Any:
    block: Any = nn.Sequential(nn.ReLU())
    block.count, block.seen, block.table = 1, [1], {"a": 1}
    block.last = deque([1, 2], maxlen=2)
    block.sums = np.zeros((2, 3)).T
    block.settings, block.frozen, block.others = SimpleNamespace(window=2, sizes=[1]), Frozen(1.0), [nn.Dropout()]
    return block


COUNT, SEEN = 1, [1]


def counts() -> None:
    global COUNT
    COUNT += 1


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a number": (lambda block: setattr(block, "count", 2), "attribute count"),
    "a new one": (lambda block: setattr(block[0], "final", 2), "attribute final"),
    "one less": (lambda block: delattr(block, "count"), "attribute count"),
    "a list": (lambda block: block.seen.append(2), "attribute seen"),
    "a deque": (lambda block: block.last.append(2), "attribute last"),
    "a dict": (lambda block: block.table.update(b=2), "attribute table"),
    "a new buffer": (lambda block: block.register_buffer("map", torch.ones(1)), "attribute map"),
    "a hook": (lambda block: block[0].register_forward_hook(print), "attribute _forward_hooks"),
    "an object": (lambda block: setattr(block.settings, "window", 3), "attribute settings"),
    "a list in an object": (lambda block: block.settings.sizes.append(2), "attribute settings"),
    "a slot": (lambda block: object.__setattr__(block.frozen, "gain", 2.0), "attribute gain of a Frozen"),
    "a module that it does not own": (lambda block: block.others[0].eval(), "attribute others"),
    "an array": (lambda block: block.sums.__iadd__(1.0), "NumPy array"),
    "random": (lambda block: random.random(), "random numbers in Python"),
    "numpy": (lambda block: np.random.rand(), "random numbers in Python"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_put_back_and_refused(name: str) -> None:
    block, (change, why) = made(), CHANGES[name]
    states = random.getstate(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    with pytest.raises(NotCapturable, match=why), unchanged(Guard(block)):
        change(block)
    assert (block.count, block.seen, block.table) == (1, [1], {"a": 1}) and not hasattr(block[0], "final")
    assert (block.settings, block.frozen) == (SimpleNamespace(window=2, sizes=[1]), Frozen(1.0))
    assert not block.sums.any() and block.last == deque([1, 2])
    assert block.others[0].training and not block._buffers and not hasattr(block, "map") and not block[0]._forward_hooks
    assert random.getstate() == states[0] and (np.random.get_state()[1] == states[1]).all()


class Reads(nn.Module):
    def forward(self) -> object:
        return COUNT, SEEN, counts


OUTSIDE: list[tuple[Callable[[], object], str]] = [
    (counts, "global COUNT"),
    (lambda: SEEN.append(2), "global SEEN"),
    (lambda: setattr(counts, "calls", 1), "function's table"),
    (lambda: setattr(Reads, "kept", 1), "class Reads"),
]


@pytest.mark.parametrize(("change", "why"), OUTSIDE)
def test_a_change_outside_is_put_back_and_refused(change: Callable[[], object], why: str) -> None:
    block = Reads()
    with pytest.raises(NotCapturable, match=f"it changes its {why}"), unchanged(Guard(block)):
        change()
    assert (COUNT, SEEN) == (1, [1]) and not hasattr(counts, "calls") and not hasattr(Reads, "kept")


@lru_cache
def remembered(number: int) -> list[int]:
    return [number]


class Remembers(nn.Module):
    def forward(self) -> object:
        return remembered(1)


def test_what_is_remembered_for_the_first_time_is_forgotten_and_refused() -> None:
    block = Remembers()
    remembered.cache_clear()
    with pytest.raises(NotCapturable, match="it changes its cache of remembered"), unchanged(Guard(block)):
        block()
    assert remembered.cache_info().currsize == 0
    kept = block()
    with unchanged(Guard(block)):
        assert block() is kept


def test_what_changes_nothing_passes() -> None:
    block = made()
    with unchanged(Guard(block)):
        block.count += 0
        block.seen.append(block.seen.pop())
    assert block.count == 1
