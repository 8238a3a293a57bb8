"""Views of split tensors that had to be copied, because their rows came from other ranks.

In torch a slice shares memory with its base: a write to either is seen in both. A copied slice remembers its base:
what is written to the slice is put back, and a slice whose base was written since is taken anew when it is read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@contextmanager
def counting() -> Iterator[None]:
    """What is made inside counts its writes, as inference mode's own tensors do not; it has no graph either."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def version_of(local: Tensor) -> int:
    """How often the memory of `local` was written to."""
    return local._version


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors lie in one piece of memory."""
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined, no-any-return]


@dataclass
class View:
    """How a shell is a view of `base`, another shell.

    `put` writes what the view holds into the base, None where the two share memory. `replay` takes the view again.
    `source` and `version` are the base's local tensor and its version when the view was last taken.
    """

    base: Any
    replay: Callable[[Any], Tensor]  # base -> the view's local tensor
    put: Callable[[Any], None] | None  # the view's shell
    source: Tensor
    version: int

    def refresh(self, shell: Any, source: Tensor) -> None:
        """Take the view again where its base, whose local tensor is `source`, was written since."""
        if self.source is source and (self.put is None or self.version == version_of(source)):
            return
        shell._local = self.replay(self.base)
        self.source, self.version = source, version_of(source)

    def settle(self, shell: Any) -> None:
        """Carry a write to the view on to its base."""
        if self.put is not None:
            self.put(shell)
        self.source, self.version = self.base._local, version_of(self.base._local)
