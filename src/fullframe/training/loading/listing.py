"""Which samples a data set says that it has: a checksum of the lists of files, labels, indices that it holds.

A folder lists its files in another order on each machine, and `random_split` draws by the rank's own random state.
"""

import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from fullframe.errors import RecipeError

_DEPTH = 4  # of data sets in data sets


def length_of(dataset: Any) -> int | None:
    """How many samples it has; None where it does not say, as a stream does not."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def first_sample(dataset: Any) -> Any:
    """What is read first of it; raises RecipeError of a stream that gives none."""
    if not isinstance(dataset, IterableDataset):
        return dataset[0]
    for sample in dataset:
        return sample
    raise RecipeError(f"the {type(dataset).__name__} gives no sample; does its folder or file list exist?")


def listing_of(dataset: Any, ordered: bool = True) -> int:
    """The checksum, of all attributes that are as long as their data set, and of data sets inside; 0 for none.

    What paths begin with alike is left out: a machine may have its files in a place of its own; and unless `ordered`,
    so is the order of `dataset`'s lists.
    """
    found = 0
    for entries in _lists(dataset, _DEPTH):
        words = [*_words(entries)] if ordered else sorted(_words(entries))
        start = len(_common_folder([word for word in words if os.sep in word]))
        text = "\n".join(word[start:] if os.sep in word else word for word in words)
        found = zlib.crc32(text.encode(errors="replace"), found)
    return found


def _common_folder(paths: list[str]) -> str:
    first, last = (os.path.dirname(path(paths, default="")) for path in (min, max))
    return os.path.commonpath([first, last]) if os.path.isabs(first) == os.path.isabs(last) else ""


def _lists(dataset: Any, depth: int) -> Iterator[Any]:
    try:
        count, held = len(dataset), vars(dataset)
    except TypeError:
        return
    for _, value in sorted(held.items()):
        if isinstance(value, (list, tuple, range)) and len(value) == count and count:
            yield value
        elif isinstance(value, (np.ndarray, Tensor)) and _is_of_indices(value) and len(value) == count:
            yield value.tolist()
        for inner in value if type(value) in (list, tuple) and len(value) <= count else [value]:
            if depth and hasattr(inner, "__getitem__") and hasattr(inner, "__len__") and hasattr(inner, "__dict__"):
                yield from _lists(inner, depth - 1) if not isinstance(inner, Tensor) else ()


def _is_of_indices(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 1 and value.is_cpu and not value.is_floating_point() and not value.is_complex()
    return value.ndim == 1 and value.dtype.kind in "iuSU"


def _words(entries: Iterable[Any]) -> Iterator[str]:
    for entry in entries:
        for one in entry.values() if type(entry) is dict else entry if type(entry) in (list, tuple) else (entry,):
            if isinstance(one, (str, bool, int, np.integer)):
                yield str(one)
            elif isinstance(one, os.PathLike):
                yield os.fsdecode(one)
