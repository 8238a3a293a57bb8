"""What the capture of a block may have read of its modules, looked at before each call.

That is what can be reached from their attributes: numbers, strings, lists, dicts, and objects that hold these (a
configuration), modules that it calls and does not own; hooks; and what the functions that their forwards call read
outside.
"""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinMethodType, MethodType, MethodWrapperType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullframe.data.nested import slots
from fullframe.model.compiled.opaque import is_opaque
from fullframe.model.compiled.outside import CONTAINERS, Outside, Place, home_of, is_data
from fullframe.model.sharding.memory_format import to_channels_last

SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_METHODS_OF_C = (BuiltinMethodType, MethodWrapperType)
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_OF_FSDP = "__composable_api"  # its state, of which its hooks make use, outside
MOST_KNOWN = 64  # a sharded parameter is gathered to another place at each call
MOST_BYTES = 1 << 16  # of a NumPy array, or a tensor, that is compared at each call
_MOST = 2000  # containers and objects that are followed, beside those that each module has
_OF_A_MODULE = 20  # which it has at least
_CAPTURING = "transformers.utils.output_capturing"  # whose hooks do nothing unless outputs of layers are asked for


class Same:
    """An object that is compared by identity, and kept, so that no other gets its own."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, eq=False)
class Measures:
    """Of tensors: what a program is compiled for of each, and the memory that they lie in."""

    facts: tuple[Any, ...]
    memory: frozenset[int]


def simple(value: Any) -> tuple[Any, ...]:
    """What tells a simple value from others: -0.0 from 0.0 too."""
    return type(value), repr(value) if isinstance(value, (float, complex, np.generic)) else value


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory holds its numbers as they are, by strides."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def facts(tensor: Tensor) -> tuple[Any, ...]:
    """What a program is compiled for."""
    if not is_plain(tensor):  # for which there is none
        return tensor.shape, tensor.layout, tensor.dtype
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.device


def memory(tensor: Tensor) -> int:
    """Where its memory begins, equal for tensors that share it; who it is where there is none to see."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


_of_tensor = attrgetter("shape", "dtype", "requires_grad", "device")


class Guard:
    """The modules of a block as they are now.

    `tensors` are the parameters and buffers, each once; `places` where they are, as the dict that holds one, its name
    there and its number among them. `structure` is equal for blocks of which one program serves all. `watched` are the
    containers that are looked at and of what they are, "" for a module's own table; `slots` objects and the names of
    their slots, `arrays` those of NumPy and what is in them. `refusal` says why not all of it can be seen.
    """

    def __init__(self, block: nn.Module):
        self._empty: list[Any] = []
        self._full: list[Any] = []
        self.arrays: list[tuple[Any, bytes]] = []
        self._readers: list[tuple[Callable[[Any], Any], Any]] = []  # of slots
        self._seen: set[int] = set()
        self._most = _MOST
        self._own = set(map(id, block.modules()))
        self._others: list[nn.Module] = []  # that it may call and does not own
        self.refusal = ""
        self.watched: list[tuple[str, Any]] = []
        self.slots: list[tuple[Any, list[str]]] = []
        self.tensors: list[Tensor] = []
        self.places: list[tuple[dict[str, Any], str, int]] = []
        hooks: list[Any] = []
        parts: list[Any] = []
        numbers: dict[int, int] = {}
        modules: dict[nn.Module, int] = {}
        for name, module in block.named_modules(remove_duplicate=False):
            if module in modules:
                parts.append((name, modules[module]))
                continue
            modules[module] = len(modules)
            self._most += _OF_A_MODULE
            parts.append(self._told_module(name, module, numbers))
            hooks += chain.from_iterable(vars(module)[key].values() for key in _HOOKS) if name else ()
        self.outside = self._looked_outside(list(modules), parts)
        hooks += chain.from_iterable(vars(other)[key].values() for other in self._others for key in _HOOKS)
        self.structure = tuple(parts)
        self.refusal = self.refusal or self.outside.refusal
        # All in one row, so that C compares it: a view of a dict's values, or a list itself, shows what is there now.
        tables = {id(vars(module)) for module in modules}
        self._now = [table.values() if isinstance(table, dict) else table for table in self._full]
        self._now += [table.keys() for table in self._full if isinstance(table, dict) and id(table) not in tables]
        self._sized = [*self._full, *map(vars, self.outside.kinds)]
        self._lengths = list(map(len, self._sized))
        self._values = list(chain.from_iterable(self._now))
        self._in_slots = list(self._read_slots())
        self._outputs = {_captured(hook) for hook in hooks if hook is not to_channels_last}
        self.has_hooks = None in self._outputs
        self._are_plain = all(type(t) in PLAIN and is_plain(t) for t in self.tensors)
        self._raw: list[Any] = []
        self._measures = Measures(tuple(map(Same, self.tensors)), frozenset())
        self._known: dict[Any, Measures] = {}

    def holds(self) -> bool:
        """Whether all is as it was."""
        return (
            not any(self._empty)
            and list(map(len, self._sized)) == self._lengths
            and all(map(is_, chain.from_iterable(self._now), self._values))
            and self._outside_holds()
            and all(array.tobytes() == held for array, held in self.arrays)
        )

    def _outside_holds(self) -> bool:
        try:
            same = all(map(is_, self.outside.now(), self.outside.values))
            return same and (not self._readers or all(map(is_, self._read_slots(), self._in_slots)))
        except (KeyError, ValueError, AttributeError):  # a name is gone
            return False

    def _read_slots(self) -> Iterator[Any]:
        return chain(*[read(owner) for read, owner in self._readers])

    def measures(self) -> "Measures":
        """Of the parameters and buffers as they are now; the same object as long as they are the same."""
        if not self._are_plain:
            return self._measures
        own = self.tensors
        raw = [*map(_of_tensor, own), *map(Tensor.stride, own), *map(Tensor.data_ptr, own)]
        if raw != self._raw:
            self._raw = raw
            key = tuple(map(facts, own)), frozenset(map(memory, own))
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._measures = self._known.setdefault(key, Measures(*key))
        return self._measures

    @property
    def gives_outputs(self) -> bool:
        """Whether transformers wants a layer's result from inside the block in this call."""
        if not self._outputs or _CAPTURING not in sys.modules:
            return False
        wanted = sys.modules[_CAPTURING]._active_collector.get()
        return wanted is not None and not self._outputs.isdisjoint(wanted)

    def _told_module(self, name: str, module: nn.Module, numbers: dict[int, int]) -> Any:
        """Of one of its modules, whose tensors get the next `numbers`."""
        table = vars(module)
        self._watch(table, "")
        told: list[Any] = [name, Same(type(module))]
        for held in (module._parameters, module._buffers):
            self._watch(held, "")
            for key, tensor in held.items():
                if tensor is not None:
                    number = numbers.setdefault(id(tensor), len(numbers))
                    self.tensors += [tensor] if number == len(self.tensors) else []
                    self.places.append((held, key, number))
                told.append((key, None if tensor is None else number))
        self._watch(module._modules, "")
        told.append(tuple(module._modules))
        # Of the block itself, hooks run outside of it.
        apart = (*_TABLES, *(_STATE_HOOKS if name else ("forward", *filter(_is_hooks, table))))
        own = [item for item in table.items() if item[0] not in apart and not item[0].startswith(_OF_FSDP)]
        return *told, *((key, self._told(value, f"attribute {key}")) for key, value in own)

    def _looked_outside(self, modules: list[nn.Module], parts: list[Any]) -> Outside:
        """What they read outside, told to `parts`; again where modules were found there, which read things too."""
        while True:
            known = len(self._others)
            outside = Outside([*modules, *self._others])
            parts += [(place.name, self._told_outside(place)) for place in outside.places]
            for table in outside.tables:
                if id(table) not in self._seen:
                    self._watch(table, "function's table")
                    parts += [(key, self._told(value, f"function's {key}")) for key, value in table.items()]
            if len(self._others) == known:
                return outside

    def _watch(self, table: Any, name: str) -> None:
        """Look at what the container holds before each call; it is of what has this name."""
        self._seen.add(id(table))
        self.watched.append((name, table))
        (self._full if table else self._empty).append(table)

    def _told_outside(self, place: Place) -> Any:
        is_whole = place.is_library and not isinstance(place.value, SIMPLE)
        return Same(place.value) if is_whole else self._told(place.value, f"global {place.name}")

    def _told_array(self, array: Any) -> Any:
        if array.nbytes > MOST_BYTES:
            self.refusal = f"it reads a NumPy array of {array.nbytes} bytes"
            return Same(array)
        self.arrays.append((array, array.tobytes()))
        return Same(array), self.arrays[-1][1]

    def _told(self, value: Any, name: str) -> Any:
        """What two equal blocks have in common: a simple value itself, of other things what is in them or who it is."""
        if isinstance(value, (*SIMPLE, np.generic)):
            return simple(value)
        if isinstance(value, Tensor) or id(value) in self._own:
            return Same(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return self._told_array(value)
        if isinstance(value, CONTAINERS):
            if not isinstance(value, (tuple, frozenset)):
                if not self._is_new(value, name):
                    return Same(value)
                self._watch(value, name)
            items = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
            told: tuple[Any, ...] = type(value), tuple(self._told(item, name) for item in items)
            if isinstance(value, defaultdict):
                told = (*told, self._told(value.default_factory, name))
            is_own = home_of(type(value)) not in ("builtins", "collections")
            return (*told, self._told_inside(value, name)) if is_own else told
        if isinstance(value, MethodType):
            return Same(value.__func__), self._told(value.__self__, name)
        if isinstance(value, partial):
            return partial, *(self._told(item, name) for item in (value.func, value.args, value.keywords))
        if isinstance(value, nn.Module) and value not in self._others:
            self._others.append(value)
            return Same(type(value)), self._told_inside(value, name)
        what = value.__self__ if isinstance(value, _METHODS_OF_C) else value
        if is_opaque(what):
            self.refusal = self.refusal or f"its {name} is or holds a {type(what).__name__}, which may change unseen"
        return (Same(value), self._told_inside(value, name)) if is_data(value) else Same(value)

    def _told_inside(self, value: Any, name: str) -> Any:
        """Of an object its attributes, in its table and in slots."""
        told: list[Any] = []
        held = getattr(value, "__dict__", None)
        if held is not None and self._is_new(held, name):
            self._watch(held, name)
            told += [(key, self._told(item, name)) for key, item in held.items()]
        held_in = [key for kind in type(value).__mro__ for key in slots(kind) if hasattr(value, key)]
        if held_in and id(value) not in self._seen and self._is_new(value, name):
            self._seen.add(id(value))
            self.slots.append((value, held_in))
            self._readers.append((attrgetter(*held_in, held_in[-1]), value))  # of a single name it would give no row
            told += [(key, self._told(getattr(value, key), name)) for key in held_in]
        return tuple(told)

    def _is_new(self, value: Any, name: str) -> bool:
        if id(value) in self._seen:
            return False
        if len(self._seen) >= self._most:
            why = f"its {name} holds too many lists, dicts and objects to look at before each call"
            self.refusal = self.refusal or why
            return False
        return True


def _is_hooks(name: str) -> bool:
    return name.startswith("_") and "_hooks" in name


def _captured(hook: Callable[..., Any]) -> str | None:
    """What a hook of transformers takes when asked to; None for any other hook, which may do anything."""
    if getattr(hook, "__module__", "") != _CAPTURING:
        return None
    key: str | None = inspect.getclosurevars(hook).nonlocals.get("key")
    return key
