"""Lists, dicts, dataclasses that a call is given and writes to: our door and FSDP2 hand it copies, which are lost.

So they do of objects of classes that are registered with `torch.utils._pytree`, from the parts that these name.
"""

from collections import deque
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import BUILTIN_TYPES, SUPPORTED_NODES, TreeSpec

from fullframe.errors import StrategyError


class Kept:
    """Stands in a changed container for a value that the call was given: its number in `values_in`."""

    def __init__(self, number: int):
        self.number = number


def values_in(tree: Any, within: tuple[Any, ...] = ()) -> list[Any]:
    """Nested values, containers and all, in an order that a copy of the containers shares."""
    inside = _inside(tree)
    if inside is None or any(each is tree for each in within):
        return [tree]
    each_of = inside.values() if isinstance(inside, dict) else inside
    return [tree, *(value for each in each_of for value in values_in(each, (*within, tree)))]


class Contents:
    """What the containers in nested values hold when this is made."""

    def __init__(self, tree: Any):
        self._values = values_in(tree)
        self._before = list(map(_inside, self._values))

    def changed(self) -> dict[int, Any]:
        """What they hold now, by their number in `values_in`, where that is something else."""
        found = ((number, before, _inside(self._values[number])) for number, before in enumerate(self._before))
        changed = {number: now for number, before, now in found if not _is_same(before, now)}
        known = {id(value): number for number, value in enumerate(self._values)} if changed else {}

        def kept(value: Any) -> Any:
            return Kept(known[id(value)]) if id(value) in known else value

        return {number: _each(kept, now) for number, now in changed.items()}


def put_back(values: list[Any], changed: dict[int, Any]) -> None:
    """Gives containers, whose `values_in` these were, what a copy of them has come to hold.

    Raises StrategyError where one stands in them twice, which would be one no more in a copy.
    """
    for number, content in changed.items():
        target = values[number]
        if sum(each is target for each in values) > 1:
            raise StrategyError(
                f"forward writes to a {type(target).__name__} that it is given twice, of which it has two copies; "
                "pass it once, or return what is new"
            )
        now = _each(lambda value: values[value.number] if isinstance(value, Kept) else value, content)
        if isinstance(target, dict):
            if [*now][: len(target)] != [*target]:  # keys have gone, or stand in another order
                target.clear()
            for key, value in now.items():
                target[key] = value
        elif isinstance(now, dict):
            for name, value in now.items():
                setattr(target, name, value)
        else:
            target.clear()
            target.extend(now)


class GivenBack:
    """Gives what a unit's forward writes to lists and dicts back to those that it is called with.

    To be made before torch's own hooks, which copy them, and to be `finished` when they are there.
    """

    def __init__(self, unit: nn.Module):
        self._unit = unit
        self._calls: list[tuple[list[Any], Contents | None]] = []  # of the unit, one in another
        unit.register_forward_pre_hook(self._copied, prepend=True, with_kwargs=True)
        unit.register_forward_hook(self._ended)

    def finish(self) -> None:
        """Torch's own hooks are there."""
        self._unit.register_forward_pre_hook(self._given, prepend=True, with_kwargs=True)

    def begin(self) -> None:
        """A forward pass; another may have ended by an error."""
        self._calls.clear()

    def _given(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.append((values_in((args, kwargs)), None))

    def _copied(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if self._calls:
            given, _ = self._calls.pop()
            self._calls.append((given, Contents((args, kwargs))))

    def _ended(self, unit: nn.Module, args: Any, output: Any) -> None:
        given, contents = self._calls.pop() if self._calls else ([], None)
        if contents is not None:
            put_back(given, contents.changed())


def _inside(value: Any) -> list[Any] | dict[Any, Any] | None:
    """What a container holds; None of anything else."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if _is_registered(type(value)) and hasattr(value, "__dict__"):
        return dict(vars(value))
    if is_dataclass(value) and not isinstance(value, (type, nn.Module)):  # FSDP2 copies those, too
        return {field.name: getattr(value, field.name, None) for field in fields(value)} | getattr(
            value, "__dict__", {}
        )
    return None


def with_own_contexts(tree: TreeSpec) -> TreeSpec:
    """The same, by which objects are made that have lists and dicts of their own beside the leaves, as they are now."""
    children = [*map(with_own_contexts, tree.children() if hasattr(tree, "children") else tree.children_specs)]
    context = _copied(tree.context) if _is_registered(tree.type) else tree.context
    return TreeSpec(tree.type, context, children) if children or context is not None else tree


def _copied(context: Any) -> Any:
    if type(context) is deque:
        return deque(map(_copied, context), context.maxlen)
    if type(context) in (list, tuple, set):
        return type(context)(map(_copied, context))
    return {key: _copied(value) for key, value in context.items()} if type(context) is dict else context


def _is_registered(kind: Any) -> bool:
    return kind in SUPPORTED_NODES and kind not in BUILTIN_TYPES


def _each(function: Any, inside: Any) -> Any:
    return (
        {key: function(value) for key, value in inside.items()}
        if isinstance(inside, dict)
        else [*map(function, inside)]
    )


def _is_same(before: Any, now: Any) -> bool:
    if before is None:
        return True
    if isinstance(before, dict):
        return [*before] == [*now] and all(before[key] is now[key] for key in before)
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
