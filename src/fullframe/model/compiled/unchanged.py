"""What a capture must not do, as it would be done once and never again.

Change attributes of modules, or globals and what else is read outside of them; fill a cache; draw numbers in Python.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fullframe.model.compiled.guard import Guard
from fullframe.ranks.randomness import python_states, set_python_states
from fullframe.ranks.recording import NotCapturable, NotYet


@contextmanager
def unchanged(guard: Guard) -> Iterator[None]:
    """Puts back what changes of what the guard looks at, and of Python's random states, and empties caches that fill.

    Raises NotCapturable where anything did.
    """
    held = [(name, table, _items(table)) for name, table in guard.watched]
    slots = [(owner, key, getattr(owner, key)) for owner, keys in guard.slots for key in keys]
    arrays = [(array, array.copy(), then) for array, then in guard.arrays]
    classes = [(kind, set(vars(kind))) for kind in guard.outside.kinds]
    caches = [(cache, cache.cache_info().misses) for cache in guard.outside.caches]
    states = python_states()
    changed: str | None = None
    try:
        yield
    finally:
        for name, table, items in held:
            now = _items(table)
            if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                changed = name or f"attribute {_first(now, items)}"
                _put_back(table, items)
        for owner, key, value in slots:
            if getattr(owner, key, slots) is not value:
                changed = f"attribute {key} of a {type(owner).__name__}"
                object.__setattr__(owner, key, value)  # it may be frozen
        for array, copy, then in arrays:
            if array.tobytes() != then:
                changed = "NumPy array"
                array[...] = copy
        for place in guard.outside.places:
            if place.now is not place.value:
                changed = f"global {place.name}"
                place.put(place.value)
        for kind, names in classes:
            for name in [n for n in vars(kind) if n not in names and not n.startswith("__")]:
                changed = f"class {kind.__name__}"
                delattr(kind, name)
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                changed = f"cache of {cache.__name__}"
                cache.cache_clear()
        drew = repr(python_states()) != repr(states)
        set_python_states(states)
    if changed is not None:
        raise NotYet(f"it changes its {changed}")
    if drew:
        raise NotCapturable("it draws random numbers in Python")


def _items(value: Any) -> list[Any]:
    return [item for pair in value.items() for item in pair] if isinstance(value, dict) else list(value)


def _first(now: list[Any], then: list[Any]) -> Any:
    """The key of the first thing in which two dicts differ, given by their items."""
    one, other = (dict(zip(items[::2], items[1::2], strict=True)) for items in (now, then))
    return next((key for key in [*one, *other] if one.get(key, now) is not other.get(key, now)), "order")


def _put_back(value: Any, items: list[Any]) -> None:
    value.clear()
    if isinstance(value, dict):
        value.update(zip(items[::2], items[1::2], strict=True))
    else:
        (value.update if isinstance(value, set) else value.extend)(items)
