"""Random generators that a data set keeps for itself, as the transforms of MONAI and albumentations do.

A data set of theirs draws from these, not from the process's random states, so they are set for each sample as well:
else the ranks of a replica would read different samples.
"""

import random
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from fullframe.ranks.randomness import mixed_seed

_MOST = 1000  # entries of a list or dict: one of samples holds no transforms
_ALL = 100_000  # objects that are looked at
_DEPTH = 12
_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_OF_THE_PROCESS = (random.random.__self__, np.random.rand.__self__, torch.default_generator)  # type: ignore[attr-defined]
_ATOMS = (str, bytes, bool, int, float, complex, type(None), torch.Tensor, np.ndarray, ModuleType)


def generators_of(dataset: Any) -> list[Any]:
    """Those that can be reached from `dataset` by attributes, also of classes, by lists, tuples, dicts and closures.

    In an order that follows from the program alone; each once, none of the process's own, and none of a GPU.
    """
    found: list[Any] = []
    seen = {id(each) for each in _OF_THE_PROCESS}
    waiting = [(dataset, 0)]
    while waiting and len(seen) < _ALL:
        value, depth = waiting.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            if not isinstance(value, torch.Generator) or value.device.type == "cpu":
                found.append(value)
        elif depth < _DEPTH:
            waiting += [(inner, depth + 1) for inner in _inside(value)]
    return found


def _inside(value: Any) -> Iterator[Any]:
    """What `value` holds."""
    if isinstance(value, dict):  # no other mapping: it may be a file
        yield from value.values() if len(value) <= _MOST else ()
    elif isinstance(value, (list, tuple)):
        yield from value if len(value) <= _MOST else ()
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # of a name that has no value yet
                continue
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, type):
        yield from (each for kind in value.__mro__ for each in vars(kind).values() if isinstance(each, _KINDS))
    else:
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
        yield type(value)


def seed_generators(generators: list[Any], *numbers: int) -> None:
    """Set each of these from `numbers` and its place among them."""
    for place, generator in enumerate(generators):
        seed = mixed_seed(*numbers, place)
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seed % 2**32)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        else:
            generator.seed(seed)
