"""A tensor that is gathered for one op and not kept for its backward: there it is fetched again.

A rank keeps its own part, which other ops keep too; so what one op reads whole costs memory while it runs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.spec import Spec

_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


class Loan(NamedTuple):
    """`whole` was made of this rank's part `own` along the mesh axes `axes`."""

    whole: Tensor
    own: Tensor
    spec: Spec  # of `own`
    axes: tuple[str, ...]


def borrow(own: Tensor, spec: Spec, axes: Sequence[str]) -> tuple[Loan, Spec]:
    """`own` made whole along mesh axes, and its spec; differentiable. All ranks of the axes call this together."""
    whole, whole_spec = gather_axes(own, spec, axes)
    return Loan(whole, own, spec, tuple(axes)), whole_spec


def fetching_again(loans: Sequence[Loan], op: Callable[[], Tensor]) -> Tensor:
    """`op()`, which does not keep the loans' whole tensors for its backward: right before it they are fetched again.

    All else that it keeps goes to the hooks that were there before (recompute, offload). What was written to in between
    is RuntimeError in backward, as in torch. Where the user has disabled such hooks, the whole tensors are kept.
    All ranks call this together, whatever kernels `op` takes on each.
    """
    loans = [loan for loan in loans if loan.whole.untyped_storage()._cdata != loan.own.untyped_storage()._cdata]
    if not loans or not torch.is_grad_enabled() or not _hooks_allowed():
        return op()
    again = _Again(loans)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        result = op()
    if result.requires_grad:
        again.keep(loans)
        result.register_hook(again.fetch)
    return result


class Saved(NamedTuple):
    """A tensor as torch saves it: without its graph, and not to be written to before it is used in backward."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(tensor: Tensor) -> "Saved":
        """`tensor` as it is now."""
        return Saved(tensor.detach(), tensor._version)  # which share the version

    def get(self) -> Tensor:
        """The tensor; RuntimeError as torch's where it was written to."""
        require_unwritten(self.tensor, self.version, self.tensor.shape)
        return self.tensor


def require_unwritten(tensor: Tensor, version: int, shape: torch.Size) -> None:
    """Raise torch's RuntimeError unless `tensor`, which had that `shape`, is still at `version`."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(shape)} is at version {tensor._version}; expected version {version} instead"
        )


class _View(NamedTuple):
    """A saved view of the whole tensor of a loan."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Again:
    """What one op has saved of its loans, and, from its gradient until all of that was read, the tensors themselves."""

    def __init__(self, loans: Sequence[Loan]):
        self._hooks = _top_hooks(True) or (Saved.of, Saved.get)
        self._storages = [loan.whole.untyped_storage()._cdata for loan in loans]
        self._gathers = [(loan.spec, loan.axes) for loan in loans]
        self._views = [0] * len(loans)
        self._own: list[Any] = []
        self._whole: list[tuple[Tensor, int] | None] = []  # with how many views are still to be read

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()._cdata
        if storage not in self._storages:
            return self._hooks[0](tensor)
        number = self._storages.index(storage)
        self._views[number] += 1
        return _View(number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Any) -> Tensor:
        if type(kept) is not _View:
            return self._hooks[1](kept)
        whole, left = self._whole[kept.number]  # type: ignore[misc]
        self._whole[kept.number] = (whole, left - 1) if left > 1 else None
        return whole.as_strided(kept.size, kept.stride, kept.offset)

    def keep(self, loans: Sequence[Loan]) -> None:
        """Keep this rank's parts."""
        self._own = [self._hooks[0](loan.own.detach()) for loan in loans]

    def fetch(self, gradient: Tensor) -> None:
        """Before the op's backward: all of them, used or not, as another rank may use them."""
        parts = [self._hooks[1](own) for own in self._own]
        with torch.no_grad():
            wholes = [gather_axes(part, *how)[0] for part, how in zip(parts, self._gathers, strict=True)]
        self._whole = [(whole, views) if views else None for whole, views in zip(wholes, self._views, strict=True)]
