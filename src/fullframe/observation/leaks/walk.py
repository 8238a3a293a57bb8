"""The places where a program can keep something, walked from the user's own modules, model, optimizer and variables.

A place is known by its path, so that it is the same one at the next walk. Nothing is held between two walks. Of a long
list only its ends are looked at, so that a walk does not take longer the more was kept.
"""

import functools
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullframe.data.nested import slots
from fullframe.observation.leaks.graph import oldest_node
from fullframe.spatial.tensor import SpatialTensor

_ENDS = 24  # elements looked at, at each end of a container
_MOST = 200_000  # objects of one walk
_ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size,
     types.BuiltinFunctionType, types.CodeType, types.ModuleType, property, staticmethod, classmethod, np.dtype}
)  # fmt: skip
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, deque, set, frozenset)
_HOOKS = tuple(name for name in vars(nn.Identity()) if name.endswith("_hooks"))
_PLAIN = frozenset({"training", "_parameters", "_is_full_backward_hook", "_non_persistent_buffers_set", *_HOOKS})
_OWN = {"torch", "torchvision", "numpy", "fullframe", "builtins", "rich", "tyro", *sys.stdlib_module_names}
_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
PACKAGE = str(Path(__file__).parents[2]) + "/"


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """Where something is kept: reached from `parent` by `label`; by `key`, the whole path's, it is found again."""

    parent: "Spot | None"
    label: str
    key: int

    def under(self, label: str) -> "Spot":
        """One step further."""
        return Spot(self, label, hash((self.key, label)))

    def upwards(self) -> "Iterator[Spot]":
        """This spot and those on the way to it, as far as where the walk came from."""
        spot: Spot | None = self
        while spot is not None:
            yield spot
            spot = spot.parent

    @property
    def path(self) -> str:
        """As a program would write it: `model.encoder.cache`."""
        return "".join(reversed([spot.label for spot in self.upwards()])).lstrip(".")

    @property
    def name(self) -> str:
        """The last name on the path that is no index: `cache`."""
        names = (spot.label for spot in self.upwards() if spot.label and not spot.label.startswith("["))
        return next(names, "").lstrip(".")

    @property
    def root(self) -> str:
        """Where the walk came from."""
        *_, root = self.upwards()
        return root.label


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What is kept at a spot, and the module, object or dict that has it there; for the time of the walk only.

    kind: "list", "dict", "bounded", "hooks", "cache" or "tensor", whose `size` is its elements or bytes; or "graph",
          whose `size` is how many autograd nodes were made since the oldest one that a tensor holds
    """

    spot: Spot
    kind: str
    size: int
    value: Any
    owner: Any


def is_users(file: str | None) -> bool:
    """Whether a source file is neither Python's, nor of an installed package, nor fullframe's own."""
    return bool(file) and not _of_library(str(file))


@functools.cache  # as many as files are loaded: a bound below that would forget all from walk to walk
def _of_library(file: str) -> bool:
    if file.startswith("<frozen"):
        return True
    folder = _real(os.path.dirname(os.path.abspath(file))) + "/"
    return _is_library(folder) or (os.path.islink(file) and _is_library(os.path.realpath(file)))


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or path.startswith(PACKAGE) or "/site-packages/" in path


@functools.cache
def _real(folder: str) -> str:
    """The folder without symbolic links; of thousands of files in hundreds of folders each folder is asked once."""
    parent, name = os.path.split(folder)
    if os.path.islink(folder):
        return os.path.realpath(folder)
    return os.path.join(_real(parent), name) if name else folder


def users_modules() -> dict[str, types.ModuleType]:
    """The modules that are loaded and the user's own, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if type(module) is types.ModuleType else None
        if is_users(file) or (name == "__main__" and file is None):
            found[name] = module
    return found


def walk(roots: Mapping[str, Any], sequence: int) -> Iterator[Place]:
    """Every place that can grow, from `roots` by name, the last one first; a module stands for its variables.

    `sequence` is the number of the autograd node that would be made next.
    """
    stack: list[tuple[Any, Spot, Any]] = []
    seen: set[int] = set()
    for name, root in roots.items():
        spot = Spot(None, name, hash(name))
        if isinstance(root, types.ModuleType):
            module = Spot(None, "", hash(("module", name)))
            stack += [(v, module.under(f".{k}"), root) for k, v in list(vars(root).items()) if not k.startswith("__")]
        elif isinstance(root, Variables):
            stack += [(v, spot.under(f".{k}"), root) for k, v in root.items()]
        else:
            stack.append((root, spot, None))
    while stack and len(seen) < _MOST:
        value, spot, owner = stack.pop()
        kind = type(value)
        if kind in _ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        place = _place(value, kind, spot, owner, sequence)
        if place is not None:
            yield place
        stack += inside(value, kind, spot)


class Variables(dict[str, Any]):
    """The local variables of a running function, as they are now."""

    def __init__(self, frame: types.FrameType):
        super().__init__(frame.f_locals)
        self.frame = frame


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, of a split one this rank's part: to ask a split one is an op."""
    return tensor.local if type(tensor) is SpatialTensor else tensor


def size_of(container: Any) -> int:
    """Its elements, asked of the built-in type: a program's own class may load or make them when it is asked."""
    size: int = built_in(type(container)).__len__(container)
    return size


def built_in(kind: type) -> Any:
    """The built-in container that a class is one of: what it does, a class of the program's does not change."""
    return next(base for base in _CONTAINERS if issubclass(kind, base))


def _place(value: Any, kind: type, spot: Spot, owner: Any, sequence: int) -> Place | None:
    if issubclass(kind, Tensor):
        return _of_tensor(value, spot, owner, sequence)
    if kind is np.ndarray:
        return Place(spot, "tensor", value.nbytes, value, owner)
    if issubclass(kind, deque) and value.maxlen is not None:
        return Place(spot, "bounded", size_of(value), value, owner)
    if issubclass(kind, list | set | deque):
        return Place(spot, "list", size_of(value), value, owner)
    if issubclass(kind, dict):
        return Place(spot, "hooks" if spot.label.endswith("_hooks") else "dict", size_of(value), value, owner)
    if kind is functools._lru_cache_wrapper:
        about = value.cache_info()
        return Place(spot, "cache", about.currsize, value, owner) if about.maxsize is None else None
    return None


def _of_tensor(value: Tensor, spot: Spot, owner: Any, sequence: int) -> Place | None:
    held = plain(value)
    if type(held) is nn.Parameter:
        return None
    if held.grad_fn is not None:
        return Place(spot, "graph", sequence - oldest_node(held.grad_fn, sequence), value, owner)
    try:
        return Place(spot, "tensor", held.untyped_storage().nbytes(), value, owner)
    except (NotImplementedError, RuntimeError):  # sparse ones have no storage
        return None


def inside(value: Any, kind: type, spot: Spot) -> Iterator[tuple[Any, Spot, Any]]:
    """What lies in it, each with its spot and what has it."""
    if issubclass(kind, nn.Module):
        yield from _in_module(value, spot)
    elif issubclass(kind, Tensor):
        value = plain(value)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(value, name, None):
                yield getattr(value, name), spot.under(f".{name}"), value
        if getattr(value, "__dict__", None):
            yield from ((v, spot.under(f".{k}"), value) for k, v in list(vars(value).items()))
    elif issubclass(kind, dict):
        held = dict.items(value)
        items = held if len(held) <= 2 * _ENDS else chain(islice(held, _ENDS), islice(reversed(held), _ENDS))
        for number, (key, one) in enumerate(list(items)):
            label = f"[{key!r}]" if type(key) in (str, int) else f"[#{number}]"
            yield one, spot.under(label), value
    elif issubclass(kind, list | tuple | deque):
        numbers = range(size_of(value))
        for number in dict.fromkeys([*numbers[:_ENDS], *numbers[-_ENDS:]]):
            yield built_in(kind).__getitem__(value, number), spot.under(f"[{number}]"), value
    elif issubclass(kind, set | frozenset):
        yield from ((one, spot.under("[...]"), value) for one in islice(built_in(kind).__iter__(value), _ENDS))
    else:
        yield from _of_object(value, kind, spot)


def _in_module(value: nn.Module, spot: Spot) -> Iterator[tuple[Any, Spot, Any]]:
    attributes = vars(value)
    for name in _HOOKS:
        if attributes.get(name):
            yield attributes[name], spot.under(f".{name}"), value
    for name, one in list(attributes.items()):
        if name == "_modules":
            yield from ((child, spot.under(f".{k}"), value) for k, child in list(one.items()))
        elif name == "_buffers":
            yield from ((buffer, spot.under(f".{k}"), value) for k, buffer in list(one.items()))
        elif name not in _PLAIN:
            yield one, spot.under(f".{name}"), value
    for parameter_name, parameter in list(value._parameters.items()):
        yield parameter, spot.under(f".{parameter_name}"), value


def _of_object(value: Any, kind: type, spot: Spot) -> Iterator[tuple[Any, Spot, Any]]:
    if kind is types.FunctionType:
        if value.__module__ and value.__module__.partition(".")[0] in _OWN:
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, spot.under(f".{name}"), value
            except ValueError:  # nothing was put into it yet
                continue
        yield from ((one, spot.under(".defaults"), value) for one in value.__defaults__ or ())
        yield from ((one, spot.under(f".{name}"), value) for name, one in list(vars(value).items()))
    elif kind is types.MethodType:
        yield value.__self__, spot.under(".self"), value
        yield value.__func__, spot, value
    elif kind is functools.partial:
        yield value.func, spot, value
        yield from ((one, spot.under(".args"), value) for one in (*value.args, *value.keywords.values()))
    elif kind is functools._lru_cache_wrapper:
        yield value.__wrapped__, spot, value
    elif kind is types.GeneratorType:
        if value.gi_frame is not None and is_users(value.gi_frame.f_code.co_filename):
            yield from ((one, spot.under(f".{name}"), value) for name, one in list(value.gi_frame.f_locals.items()))
    elif issubclass(kind, type):
        if value.__module__.partition(".")[0] not in _OWN:
            yield from ((one, spot.under(f".{k}"), value) for k, one in list(vars(value).items()) if k[:2] != "__")
    elif issubclass(kind, torch.optim.Optimizer) or is_open(str(kind.__module__)):
        attributes = getattr(value, "__dict__", None) or {}
        yield from ((one, spot.under(f".{name}"), value) for name, one in list(attributes.items()))
        for name in (name for base in kind.__mro__ for name in slots(base)):
            if hasattr(value, name):
                yield getattr(value, name), spot.under(f".{name}"), value


@functools.cache
def is_open(module: str) -> bool:
    """Whether objects of classes of this module are looked into: not those of torch, numpy and Python itself."""
    return module == "types" or module.partition(".")[0] not in _OWN
