"""Parts of torch that are replaced for a while: attributes, the kernels of its operators, what it says."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.library import Library


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Inside, the attribute `name` of `owner` is `value`."""
    # As it stands there: of a class's C++ method getattr gives a function that would no longer be bound.
    is_own = name in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:  # of a base, which has it still
            delattr(owner, name)


@contextmanager
def replaced_kernels(key: str, kernels: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the aten operators named run these kernels where torch dispatches to `key`."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, kernel in kernels.items():
            library.impl(name, kernel, key)
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def silenced(logger: str) -> Iterator[None]:
    """Inside, nothing below a critical message is said by `logger`."""
    said = logging.getLogger(logger)
    level = said.level
    said.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        said.setLevel(level)
