"""Views of split tensors that had to be copied, because their rows came from other ranks.

In torch a slice shares memory with its base: a write to either is seen in both. A copied slice remembers its base:
what is written to the slice is put back, and a slice whose base was written since is taken anew when it is read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullframe.errors import UnsupportedOp
from fullframe.spatial.module_path import module_path


@contextmanager
def counting() -> Iterator[None]:
    """What is made inside counts its writes, as inference mode's own tensors do not; it has no graph either."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def version_of(local: Tensor) -> int:
    """How often the memory of `local` was written to, through `.data` too, which torch does not count."""
    return local._version + getattr(local.untyped_storage(), _UNCOUNTED, 0)


def count_write(local: Tensor) -> None:
    """One more write to the memory of `local` that torch does not count."""
    memory = local.untyped_storage()
    setattr(memory, _UNCOUNTED, getattr(memory, _UNCOUNTED, 0) + 1)


_UNCOUNTED = "_fullframe_uncounted_writes"


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors lie in one piece of memory."""
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined, no-any-return]


def before_write(shell: Any) -> None:
    """Have copied views of views, and those with hooks, taken again: in torch what is written does not come by views.

    Their hooks, and gradients that are asked of the views between, have no part in it.
    """
    while shell._view is not None:
        view, of, base = shell._view, shell._local, shell._view.base
        between = base._view is not None or base._local._is_view()
        if view.put is not None and of.requires_grad and (between or of._backward_hooks):
            view.version = -1
        shell = base


@dataclass
class View:
    """How a shell is a view of `base`, another shell.

    `put` writes what the view holds into the base, None where the two share memory. `replay` takes the view again.
    `source` and `version` are the base's local tensor and its version when the view was last taken; `tracked` says
    whether it was first taken where gradients are recorded, and so is taken again in the same way.
    """

    base: Any
    replay: Callable[[Any], Tensor]  # base -> the view's local tensor
    put: Callable[[Any], None] | None  # the view's shell
    source: Tensor
    version: int
    tracked: bool = field(default_factory=torch.is_grad_enabled)

    def __post_init__(self) -> None:
        self.memory = self.source.untyped_storage()
        self.spec = self.base.spec

    def _require_memory(self, source: Tensor) -> None:
        """Raises UnsupportedOp where `base.data = other` has left the view, a copy, with the base's memory before."""
        if self.source is source and source.untyped_storage() is not self.memory:
            reason = "the tensor that it is a view of was given other data, and this view of the data before is a copy"
            fix = "Take the view again, or give x.copy_(data) under torch.no_grad() instead of x.data = data."
            raise UnsupportedOp("a view", (), module_path(), reason, fix)

    def refresh(self, shell: Any, source: Tensor, beside_hooks: Callable[[Any], Any]) -> None:
        """Take the view again where its base, whose local tensor is `source`, was written since.

        `beside_hooks` gives the base, where it is a view itself, as a write makes it: without what hangs on its node.
        """
        self._require_memory(source)
        if self.source is source and (self.put is None or self.version == version_of(source)):
            return
        if self.base.spec is not self.spec:
            reason = "the tensor that it is a view of was given another shape in place"
            raise UnsupportedOp("a view", (), module_path(), reason, "Take the view afterwards, or use .clone().")
        before = shell._local
        with torch.set_grad_enabled(self.tracked):
            base = beside_hooks(self.base) if self.put is not None and before.requires_grad else self.base
            shell._local = self.replay(base)
        if before.retains_grad:
            shell._local.retain_grad()
            shell._local.__dict__.update(before.__dict__)
        self._taken_of(source)

    def settle(self, shell: Any) -> None:
        """Carry a write to the view on to its base.

        What is read of the view from then on is, as in torch, taken of the base, whose gradient has the view's in it.
        """
        if self.put is not None:
            self.put(shell)
        self._taken_of(self.base._local)
        if self.put is not None and shell._local.requires_grad:
            self.version = -1

    def _taken_of(self, source: Tensor) -> None:
        self.source, self.version, self.memory = source, version_of(source), source.untyped_storage()
