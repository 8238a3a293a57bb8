"""What may change unseen, and what may not: iterators and generators against values, functions and configurations."""

import array
import itertools
import logging
import random
import re
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fullframe.data.nested import slots
from fullframe.model.compiled.opaque import is_opaque, keeps_for_itself


class Drawing(random.Random):
    """Its state is of C."""


class ByThread(threading.local):
    pass


class Plain:
    __slots__ = ("__hidden", "__weakref__", "shown")


class WithTable(Plain):
    def __init__(self) -> None:
        self.more = 1


OPAQUE: dict[str, Callable[[], Any]] = {
    "Random": random.Random,
    "RandomState": np.random.RandomState,
    "Generator": np.random.default_rng,
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1]),
    "generator": lambda: (n for n in range(3)),
    "iterator": lambda: iter([1]),
    "array": lambda: array.array("d", [1.0]),
    "bytearray": lambda: bytearray(2),
    "local": threading.local,
    "context": lambda: ContextVar("context"),
    "proxy": lambda: MappingProxyType({}),
    "weak": lambda: weakref.ref(nn.ReLU),
    "objects": lambda: np.array([[1]], dtype=object),
    "subclass": Drawing,
    "subclass of local": ByThread,
}
SEEN: list[Any] = [
    random.random.__self__, len, torch.relu, nn.ReLU, nn.ReLU(), torch.nn.functional.conv2d, re.compile("a"), Path("a"),
    Fraction(1, 2), np.float32(1), np.dtype("f4"), np.add, range(3), slice(2), ..., object(), SimpleNamespace(),
    logging.getLogger("a"), threading.Lock(), WithTable(), namedtuple("Pair", "a b").a, torch.Generator(),
    weakref.ref(torch.ones(1)), np.random.rand, torch,
]  # fmt: skip


@pytest.mark.parametrize("name", OPAQUE)
def test_what_may_change_unseen(name: str) -> None:
    assert is_opaque(OPAQUE[name]())


@pytest.mark.parametrize("value", SEEN, ids=lambda value: type(value).__name__)
def test_what_does_not_change_or_shows_it(value: Any) -> None:
    assert not is_opaque(value)


def test_slots_by_the_names_that_getattr_takes() -> None:
    assert slots(Plain) == ("_Plain__hidden", "shown") and slots(WithTable) == ()
    assert not keeps_for_itself(Plain) and not keeps_for_itself(WithTable) and keeps_for_itself(Drawing)
