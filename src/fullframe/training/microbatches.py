"""A batch in slices: nested tensors, and lists with an entry for each sample, cut along the first dim."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fullframe.errors import ShapeError


def microbatches(batch: Any, count: int) -> Iterator[Any]:
    """`count` equal slices of a nested batch along its first dim; scalars and strings go to every slice.

    Raises ShapeError when the tensors' first dims differ or are no multiple of `count`.
    """
    if count == 1:
        yield batch
        return
    sizes = {name: length for name, length in _lengths(batch, "batch")}
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name}: {length}" for name, length in sizes.items()) or "no tensor"
        raise ShapeError(f"microbatches need one common first dim, got {found}; use microbatches=1")
    samples = next(iter(sizes.values()))
    if samples % count:
        raise ShapeError(f"{samples} samples a replica cannot be cut into {count} equal microbatches")
    size = samples // count
    for start in range(0, samples, size):
        yield _cut(batch, start, start + size, samples)


def _lengths(value: Any, name: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, Tensor):
        if value.dim():
            yield name, value.shape[0]
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lengths(item, str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _lengths(item, f"{name}[{number}]")


def _cut(value: Any, start: int, stop: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() else value
    if isinstance(value, Mapping):
        return {key: _cut(item, start, stop, samples) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        # A list without tensors, one entry a sample (names, paths), is cut as the tensors are.
        if len(value) == samples and not any(_lengths(value, "")):
            return value[start:stop]
        items = [_cut(item, start, stop, samples) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
