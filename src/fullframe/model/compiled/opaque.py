"""Objects that may change where nothing that can be looked at shows it.

Iterators, generators of random numbers, what differs by thread or context, and what C code keeps for itself.
"""

import contextvars
import os
import random
import weakref
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fullframe.data.nested import slots
from fullframe.model.compiled.outside import home_of, is_data

_KNOWN = (random.random.__self__, np.random.rand.__self__, os.environ)  # type: ignore[attr-defined]  # looked at apart
# Of the standard library, NumPy and binders of C++: what does not change, or nothing depends on.
_FIXED = (type, ModuleType, slice, np.ufunc, nn.Module)
_FIXED_HOMES = {"_abc", "abc", "logging", "operator", "typing", "pybind11_builtins", "nanobind"}
_FIXED_NAMES = {
    "PyCapsule",
    "lock",
    "RLock",
    "TypeVar",
    "ParamSpec",
    "ellipsis",
    "NotImplementedType",
    "NoneType",
    "object",
}
_HASHED_BUT_CHANGING = (contextvars.ContextVar, memoryview, MappingProxyType)
_LIBRARIES = {"fullframe", "torch", "torchao", "torchvision", "transformers"}  # whose objects are their own business
_POINTER = 8


def is_opaque(value: Any) -> bool:
    """Whether what `value` gives may differ from call to call, and its attributes do not say so; of a module they do.

    What Python can hash by value it takes for unchanging, and so do we.
    """
    kind = type(value)
    of = home_of(kind).partition(".")[0]
    if isinstance(value, _FIXED) or any(value is known for known in _KNOWN) or hasattr(kind, "__get__"):
        return False
    if isinstance(value, weakref.ref):
        return not isinstance(value(), (Tensor, type(None)))
    if of in _FIXED_HOMES or kind.__name__ in _FIXED_NAMES:
        return False
    if of in _LIBRARIES:
        return hasattr(kind, "__next__")
    if is_data(value):
        return keeps_for_itself(kind)
    by_value: Any = kind.__hash__
    return hasattr(kind, "__next__") or by_value in (None, object.__hash__) or isinstance(value, _HASHED_BUT_CHANGING)


def keeps_for_itself(kind: type) -> bool:
    """Whether objects of the class hold more than their table and their slots."""
    shown = sum(len(slots(one)) for one in kind.__mro__) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + _POINTER * shown
