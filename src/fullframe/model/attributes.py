"""What a forward pass that does not count, or counts once, has set on modules, taken back."""

import io
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = frozenset((type(None), bool, int, float, str, list, tuple, set, dict, OrderedDict))  # most by far
_NOT_THERE: Any = object()
_HOOKS = [name for name in vars(nn.Module()) if name.startswith("_forward")]  # and which of them take keywords, say
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # what `nn.Module` itself keeps: hooks, tables, whether it trains


class Attributes:
    """Attributes of `modules` and theirs as they are now: counters, caches, random generators, which buffers there are.

    And which forward hooks: transformers installs some in a model's first pass, and notes so in an attribute. Not what
    is changed inside of them, as the entries of a list. `tensors` are those among them, and `iterators` those whose
    place nobody can put back.
    """

    def __init__(self, *modules: nn.Module):
        every = [each for module in modules for each in module.modules()]
        tables = (table for m in every for table in (vars(m), m._buffers, *(getattr(m, name) for name in _HOOKS)))
        self._there: list[tuple[Any, dict[Any, Any]]] = [(now, dict(now)) for now in tables]
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
        elif (of_generator := state_of_generator(value)) is not None:
            get, set_state = of_generator
            self._generators.append((set_state, get()))
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


def state_of_generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to get and how to set the state of a generator of random numbers; None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return bits.__getstate__, bits.__setstate__
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return value.getstate, value.setstate
    return None


@contextmanager
def kept_attributes(*modules: nn.Module) -> Iterator[None]:
    """What is set on them meanwhile is taken back."""
    before = Attributes(*modules)
    try:
        yield
    finally:
        before.put_back()
