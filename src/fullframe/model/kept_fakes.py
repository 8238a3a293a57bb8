"""Tensors without values that were kept where the next real call would find them, taken out again.

Simulations, captures and trials run the user's functions on fake tensors. What these remember by an `lru_cache`, in a
global, or in a dict that is a global or a module's attribute (`_GRIDS[height, width] = grid`), would stay behind.
"""

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fullframe.ranks.collector import objects_of
from fullframe.spatial.tensor import SpatialTensor, local_or_whole

_Cached = type(lru_cache(len))
_TENSORS = {Tensor, nn.Parameter, nn.Buffer, FakeTensor, SpatialTensor}
_DICTS = (dict, OrderedDict, defaultdict)
_LOOKED_AT = {*_TENSORS, *_DICTS}
_known: dict[tuple[int, int], "WeakSet[Any]"] = {}  # the functions that remember, by how many names there were then
_within: list[bool] = []  # a context for fakes of any mode


@contextmanager
def no_fakes_kept(mode: FakeTensorMode | None = None, *modules: nn.Module) -> Iterator[list[str]]:
    """Afterwards caches of functions, globals, and what `modules` and theirs have are without fakes of `mode`, or any.

    Yields a list of what has kept some, filled at the end. To look takes some 40 ms, and as much again where functions
    may be new: inside of a context for any mode that one does it, at its end.
    """
    found: list[str] = []
    if _within:
        yield found
        return
    before = {id(table): dict(table) for table in _tables(modules)}
    misses = {id(cache): cache.cache_info().misses for cache in _caches()}
    if mode is None:
        _within.append(True)
    try:
        yield found
    finally:
        if mode is None:
            _within.clear()
        for cache in _caches():
            is_asked = cache.cache_info().misses != misses.get(id(cache))
            if is_asked and any(_holds(result, mode) for result in _results(cache)):
                found.append(f"cache of {getattr(cache, '__name__', 'a function')}")
                cache.cache_clear()
        for table in _tables(modules):
            found += _taken_out(table, before.get(id(table), {}), mode)


def _caches() -> list[Any]:
    """The functions that remember: looked for anew once modules were imported, or a notebook's cell has run."""
    now = len(sys.modules), len(vars(sys.modules["__main__"]))
    if now not in _known:
        _known.clear()
        _known[now] = WeakSet(objects_of(_Cached))
    return list(_known[now])


def _results(cache: Any) -> Iterator[Any]:
    """What it remembers, among other things; that of one without a limit is in a dict."""
    for each in gc.get_referents(cache):
        yield from each.values() if type(each) is dict else (each,)


def _taken_out(table: dict[str, Any], before: dict[str, Any], mode: FakeTensorMode | None) -> list[str]:
    """Names for which a table has kept fakes: it has for them what it had before, and their dicts have no fakes."""
    found = []
    for name, value in [item for item in table.items() if type(item[1]) in _LOOKED_AT]:
        if type(value) in _TENSORS:
            if before.get(name) is not value and _is_fake(value, mode):
                found.append(name)
                del table[name]
                table.update({name: before[name]} if name in before else {})
        elif name != "__builtins__":
            may = [(k, e) for k, e in value.items() if type(e) in _LOOKED_AT or isinstance(e, (tuple, list))]
            kept = [key for key, entry in may if _holds(entry, mode)]
            found += [name] * bool(kept)
            for key in kept:
                del value[key]
    return found


def _tables(modules: tuple[nn.Module, ...]) -> Iterator[dict[str, Any]]:
    """Globals of Python's modules, but torch's, and attributes of networks."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" and type(table := getattr(module, "__dict__", None)) is dict:
            yield table
    for network in modules:
        yield from (vars(each) for each in network.modules())


def _holds(value: Any, mode: FakeTensorMode | None) -> bool:
    """Whether it is a tensor without values, or a tuple, list or dict that has one."""
    if type(value) in _DICTS:
        value = list(value.values())
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return any(type(part) in _TENSORS and _is_fake(part, mode) for part in parts)


def _is_fake(value: Tensor, mode: FakeTensorMode | None) -> bool:
    tensor = local_or_whole(value)
    if isinstance(tensor, FakeTensor):
        return mode is None or tensor.fake_mode is mode
    return mode is None and tensor.device.type == "meta"
