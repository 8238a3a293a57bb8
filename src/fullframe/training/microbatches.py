"""A batch in slices: nested tensors and arrays cut along the first dim, and lists with an entry for each sample."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_iter

from fullframe.data.nested import held, like, with_items
from fullframe.errors import RecipeError, ShapeError

Cut = Callable[[Any, int], Iterable[Any]]

_WHOLE = "give recipe.cut, or use microbatches=1"
_TOP = "the batch"
_IMAGE_OF_EACH = "batch_idx"  # Ultralytics' name for which image each box is of: one's boxes may be as many as images


def microbatches(batch: Any, count: int, cut: Cut | None = None) -> Iterator[Any]:
    """What the user's `cut(batch, count)` gives, else `count` equal slices of a nested batch along its first dim.

    Scalars and strings go to every slice. A list within the batch is cut where it has an entry for each sample, a tuple
    where these hold no tensors; else what is in it is.

    Raises ShapeError when the tensors' first dims differ or are no multiple of `count`, where a list could be meant
    either way, and for an object of a class of its own that holds tensors; RecipeError where `cut` gives fewer or more.
    """
    if count == 1:
        yield batch
        return
    if cut is not None:
        slices = list(cut(batch, count))
        if len(slices) != count:
            raise RecipeError(f"recipe.cut(batch, {count}) gave {len(slices)} batches; it must give {count}")
        yield from slices
        return
    sizes = dict(_lengths(batch, _TOP)) or dict(_lengths(batch, _TOP, into_lists=True))
    if _IMAGE_OF_EACH in sizes:
        raise ShapeError(f"{_IMAGE_OF_EACH} counts the images of the whole batch, not of a microbatch; {_WHOLE}")
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name}: {length}" for name, length in sizes.items()) or "no tensor"
        raise ShapeError(f"microbatches need one common first dim, got {found}; {_WHOLE}")
    samples = next(iter(sizes.values()))
    if samples % count:
        raise ShapeError(f"{samples} samples a replica cannot be cut into {count} equal microbatches")
    size = samples // count
    for start in range(0, samples, size):
        yield _cut(batch, slice(start, start + size), samples, _TOP)


def fresh(batch: Any) -> Any:
    """The batch with containers of its own, so that what is put into them is not put into `batch`."""
    if isinstance(batch, MutableMapping):
        return with_items(batch, {key: fresh(item) for key, item in batch.items()})
    if type(batch) in (list, tuple):
        return type(batch)(fresh(item) for item in batch)
    return batch


def _lengths(value: Any, name: str, into_lists: bool = False) -> Iterator[tuple[str, int]]:
    """The first dims of tensors and arrays by their names, outside of lists only unless `into_lists`."""
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            yield name, value.shape[0]
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lengths(item, str(key), into_lists)
    elif isinstance(value, tuple) or (into_lists and isinstance(value, list)):
        for number, item in enumerate(value):
            yield from _lengths(item, f"{name}[{number}]", into_lists)


def _cut(value: Any, part: slice, samples: int, name: str) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim and value.shape[0] != samples:
            raise ShapeError(f"{name} has {value.shape[0]} rows, the batch {samples} samples; {_WHOLE}")
        return value[part] if value.ndim else value
    if isinstance(value, Mapping):
        return with_items(value, {key: _cut(item, part, samples, str(key)) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        if len(value) == samples and name != _TOP and _an_entry_each(value, samples, name):
            return value[part]
        items = [_cut(item, part, samples, f"{name}[{number}]") for number, item in enumerate(value)]
        return like(value, items)
    within = [] if isinstance(value, type) else held(value)
    if any(isinstance(leaf, (Tensor, np.ndarray)) for leaf in chain(tree_iter(value), within)):
        raise ShapeError(f"{name} is a {type(value).__name__}, of which it is not known how to cut it; {_WHOLE}")
    return value


def _an_entry_each(value: Any, samples: int, name: str) -> bool:
    """Whether a sequence of as many entries as there are samples is meant so: names, boxes, dicts of targets."""
    lengths = [length for _, length in _lengths(value, name, into_lists=True)]
    if lengths and isinstance(value, tuple):
        return False
    if lengths and set(lengths) == {samples}:
        raise ShapeError(
            f"{name} has {samples} entries, as there are samples, of {samples} rows each: whether it is to be cut or "
            f"they are cannot be told; stack them to one tensor, or {_WHOLE}"
        )
    return True
