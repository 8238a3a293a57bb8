"""What data sets, collate functions and loaders hand on: tensors in nested mappings, lists and tuples.

By hand, as torch's pytree takes a UserDict, as processors and tokenizers give, and subclasses of list and tuple for
leaves.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fullframe.errors import DataError

Path = tuple[Any, ...]  # the keys and places that lead to a leaf
_DEEPEST = 200  # containers within each other
_OBJECTS_WITHIN = 3  # objects within each other, as a sample of annotations of boxes; further in it is no longer data


def replaced(value: Any, function: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """`value` with each leaf replaced by `function(leaf, path)`, in containers of the same kinds.

    Raises DataError where a container holds itself.
    """
    if len(path) > _DEEPEST:
        raise DataError(
            f"a batch is nested {_DEEPEST} deep, by {', '.join(map(repr, path[:4]))}, ...: a list or mapping in it "
            "holds itself; hand on what the step needs of it"
        )
    if isinstance(value, Mapping):
        return with_items(value, {key: replaced(item, function, (*path, key)) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return like(value, [replaced(item, function, (*path, number)) for number, item in enumerate(value)])
    return function(value, path)


def tensors_replaced(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with each tensor replaced by `function(tensor)`, also in classes that torch's pytree was told of."""
    return replaced(value, lambda leaf, path: tree_map_only(Tensor, function, leaf))


def leaves(value: Any, within: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Whatever is no mapping, list or tuple, in order; what lies `within` itself is not entered again."""
    if isinstance(value, (Mapping, list, tuple)):
        if not any(value is outer for outer in within):
            for item in value.values() if isinstance(value, Mapping) else value:
                yield from leaves(item, (*within, value))
    else:
        yield value


def tensors_in(value: Any, within: tuple[Any, ...] = ()) -> Iterator[Tensor]:
    """All tensors, in order, also in dataclasses and in classes that torch's pytree was told of.

    What lies `within` itself, as a node that knows its parent, is not entered again.
    """
    for leaf in leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            if not any(leaf is outer for outer in within):
                yield from tensors_in([getattr(leaf, field.name, None) for field in fields(leaf)], (*within, leaf))
            continue
        for inner in tree_leaves(leaf):
            if isinstance(inner, Tensor):
                yield inner
            elif inner is not leaf:
                yield from tensors_in(inner, within)


def held(value: object) -> Iterator[Any]:
    """Whatever an object's attributes hold, in containers and in objects of their own, three within each other."""
    seen = {id(value)}
    objects = [value]
    for _ in range(_OBJECTS_WITHIN):
        found = [leaf for item in objects for leaf in tree_leaves([*attributes(item).values()]) if id(leaf) not in seen]
        yield from found
        seen.update(map(id, found))
        objects = [leaf for leaf in found if not isinstance(leaf, (Tensor, type, ModuleType))]


def attributes(value: object) -> dict[str, Any]:
    """What an object holds by its attributes' names, also in `__slots__`, as attrs and dataclasses may have them."""
    names = [*getattr(value, "__dict__", ()), *(name for kind in type(value).__mro__ for name in slots(kind))]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def slots(kind: type) -> tuple[str, ...]:
    """The attributes that have a place in an object of the class itself, by the names that getattr takes."""
    names = vars(kind).get("__slots__", ())
    mangled = "_" + kind.__name__.lstrip("_")
    return tuple(
        mangled + name if name.startswith("__") else name
        for name in ([names] if isinstance(names, str) else names)
        if not name.endswith("__")
    )


def with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the kind of `value`, and with the same keys."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    made: Any = copy.copy(value)
    if getattr(value, "__dict__", None) is value:  # a dict whose items are its attributes
        made.__dict__ = made
    else:
        _hold_its_own(made)
    for key, item in items.items():  # some refuse to be updated
        made[key] = item
    return made


def _hold_its_own(made: Any) -> None:
    """Of a mapping that was copied: it may keep its items in another, which is still that of the first."""
    for name, items in attributes(made).items():
        if isinstance(items, MutableMapping):
            object.__setattr__(made, name, copy.copy(items))


def like(value: Sequence[Any], items: Sequence[Any]) -> Any:
    """A list or tuple of the kind of `value`; a list has its attributes too."""
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = items
        return made
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # type: ignore[call-arg]
