"""What a forward pass that does not count, or counts once, has set on modules, taken back."""

import io
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = frozenset((type(None), bool, int, float, str, list, tuple, set, dict, OrderedDict))  # most by far
_NOT_THERE: Any = object()


class Attributes:
    """Attributes of `modules` and theirs as they are now: counters, caches, random generators, which buffers there are.

    Not what is changed inside of them, as the entries of a list. `tensors` are those among them, and `iterators` those
    whose place nobody can put back.
    """

    def __init__(self, *modules: nn.Module):
        every = [each for module in modules for each in module.modules()]
        self._there = [(entries, dict(entries)) for each in every for entries in (vars(each), each._buffers)]
        self._generators: list[tuple[Any, Any]] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.iterators: list[str] = []
        for each in every:
            for name, value in vars(each).items():
                if type(value) not in _PLAIN:
                    self._note(name, value)

    def _note(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
        elif isinstance(value, torch.Generator):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits: Any = value.bit_generator
            self._generators.append((bits.__setstate__, bits.__getstate__()))
        elif isinstance(value, np.random.RandomState):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            self._generators.append((value.setstate, value.getstate()))
        elif hasattr(type(value), "__next__") and not isinstance(value, io.IOBase):
            self.iterators.append(name)

    def put_back(self) -> None:
        """As they were."""
        for now, before in self._there:
            for name in [name for name in now if name not in before]:
                del now[name]
            for name, value in before.items():
                if now.get(name, _NOT_THERE) is not value:
                    now[name] = value
        for set_state, state in self._generators:
            set_state(state)


@contextmanager
def kept_attributes(*modules: nn.Module) -> Iterator[None]:
    """What is set on them meanwhile is taken back."""
    before = Attributes(*modules)
    try:
        yield
    finally:
        before.put_back()
