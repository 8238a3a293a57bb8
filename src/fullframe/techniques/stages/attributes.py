"""What forward sets on the modules of parts: counters, caches, hidden states, generators of random numbers.

Seen: another value, another entry of a list or dict, what is written into a tensor, what is drawn from a generator,
another attribute of an object of the user's own. Not what changes deeper. torch's modules keep nothing in attributes.
"""

import copy
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullframe.errors import StrategyError
from fullframe.model.attributes import OF_EVERY_MODULE, state_of_generator
from fullframe.spatial.tensor import SpatialTensor

_UNSEEN = OF_EVERY_MODULE - {"training"}
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, range)
CONTAINERS = (list, tuple, set, frozenset, deque)
_MOST_ENTRIES = 1000  # of a container inside of an object


class GONE:
    """In the place of an attribute that is not there; pickled, it stays itself."""


class ChangedAttribute(NamedTuple):
    """One that forward has changed; `inside`: in the very object that it was."""

    path: str
    module: nn.Module
    name: str
    inside: bool


class PartAttributes:
    """Those of `modules`, by their path."""

    def __init__(self, modules: Mapping[str, nn.Module]):
        self.modules = {path: module for path, module in modules.items() if not _is_torchs(type(module))}
        self._before: dict[str, dict[str, tuple[Any, Any]]] = {}

    def begin(self) -> None:
        """Note how they are."""
        self._before = {path: _seen(module) for path, module in self.modules.items()}

    def changed(self) -> Iterator[ChangedAttribute]:
        """Those that are other than at `begin`."""
        for path, module in self.modules.items():
            before, now = self._before[path], _seen(module)
            for name in dict.fromkeys((*before, *now)):
                old, new = before.get(name, (GONE, None)), now.get(name, (GONE, None))
                if not _is_same(old, new):
                    yield ChangedAttribute(path, module, name, inside=old[0] is new[0])


class Packed(NamedTuple):
    """An attribute on its way to other stages."""

    kind: str  # "plain", "tensor", "generator"
    value: Any  # on the host; of a generator its state
    device: str = ""  # the type of a tensor's


def packed(module: nn.Module, name: str, path: str) -> Packed:
    """The attribute as it is now. Raises StrategyError where it cannot go to other stages."""
    value = vars(module).get(name, GONE)
    generator = state_of_generator(value)
    if generator is not None:
        return Packed("generator", generator[0]())
    if _is_plain(value):
        return Packed("plain", value)
    require_tensor_alone(module, value, path)
    return Packed("tensor", value.detach().cpu().clone(), value.device.type)


def require_tensor_alone(module: nn.Module, value: Any, path: str) -> None:
    """Raises StrategyError for all but a whole tensor without a graph, which the module has set at `path`."""
    if not isinstance(value, Tensor):
        what = "and removes it" if value is GONE else f"to an object ({type(value).__name__})"
    elif isinstance(value, SpatialTensor) or value.requires_grad:
        what = f"to a tensor that {'is split' if isinstance(value, SpatialTensor) else 'wants a gradient'}"
    else:
        return
    raise StrategyError(
        f"{type(module).__name__} sets {path} in forward {what}, and lies on several stages, of which the next would "
        "not find it; make it a part of the state, or keep a detached whole tensor, a number or words"
    )


def unpack(module: nn.Module, name: str, path: str, found: Packed) -> None:
    """Set the attribute to what another stage has made of it. Raises StrategyError for a generator that is new."""
    generator = state_of_generator(vars(module).get(name))
    if found.kind == "tensor":
        vars(module)[name] = found.value.to(found.device)
    elif found.kind == "plain":
        vars(module)[name] = found.value
    elif generator is not None:
        generator[1](found.value)
    else:
        raise StrategyError(f"{type(module).__name__} makes {path} in forward, on one stage alone; make it in __init__")


def _seen(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute with a copy, or what else tells that it has changed inside."""
    return {name: (value, _inside(value)) for name, value in vars(module).items() if name not in _UNSEEN}


def _inside(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return None
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, (*CONTAINERS, dict)):
        return copy.deepcopy(value) if _is_plain(value) else _Entries(value)
    generator = state_of_generator(value)
    if generator is None:
        return _Entries(_attributes_of(value)) if _is_users(value) else None
    state = generator[0]()
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


class _Entries:
    """What is in a container of anything, told apart by identity."""

    def __init__(self, container: Any):
        self._entries = list(container.items() if isinstance(container, dict) else container)
        if isinstance(container, dict):
            self._entries = [entry for item in self._entries for entry in item]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Entries) or len(self._entries) != len(other._entries):
            return False
        pairs = zip(self._entries, other._entries, strict=True)
        return all(a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


def _is_same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    if before[0] is not now[0] and isinstance(before[0], PLAIN):
        return type(before[0]) is type(now[0]) and bool(before[0] == now[0])
    is_equal = type(before[0]) is type(now[0]) and isinstance(now[0], (*CONTAINERS, dict))
    return (before[0] is now[0] or is_equal) and bool(before[1] == now[1])


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for item in value.items() for each in item)
    return isinstance(value, PLAIN) or (isinstance(value, CONTAINERS) and all(map(_is_plain, value)))


def _is_users(value: Any) -> bool:
    """Whether it is an object, with attributes, of a class that is not Python's, torch's or ours."""
    package = type(value).__module__.partition(".")[0]
    is_other = package in sys.stdlib_module_names or package in ("torch", "fullframe", "numpy")
    return not is_other and not isinstance(value, (nn.Module, type)) and hasattr(value, "__dict__")


def _attributes_of(value: Any) -> list[Any]:
    """Its attributes, what they hold, and how often tensors among them were written."""
    found: list[Any] = []
    for name, one in vars(value).items():
        found += [name, one]
        if isinstance(one, Tensor) and not one.is_inference():
            found.append(one._version)
        elif isinstance(one, (*CONTAINERS, dict)) and len(one) <= _MOST_ENTRIES:
            found += one.values() if isinstance(one, dict) else one
    return found


def _is_torchs(kind: type) -> bool:
    return all(each.__module__.startswith("torch.nn.") for each in kind.__mro__[:-1])
