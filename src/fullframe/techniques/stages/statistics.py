"""Running statistics of a batch norm that several stages run, of each microbatch apart.

They are begun at zero, so that what a microbatch adds can be put behind that of the ones before it in one process. What
these would have made of them is not known while a microbatch runs: forward may add to them, and not read them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fullframe.model.unread import unread

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")
_WHY = (
    "is read in forward, and lies on several stages, where what other microbatches make of it is not known yet; use "
    "microbatches=1, or a block for each iteration"
)


class Statistics(NamedTuple):
    """What one microbatch on one stage adds to a batch norm's running statistics."""

    batches: int
    mean: Tensor
    var: Tensor


class Apart:
    """The norm, called `name`, has statistics of one microbatch alone, from now until `put_back`."""

    def __init__(self, norm: nn.Module, name: str):
        self._norm = norm
        self._there = {own: norm._buffers[own] for own in _RUNNING}
        self._own = {own: torch.zeros_like(buffer) for own, buffer in self._there.items()}  # type: ignore[arg-type]
        self._unread = {own: unread(zeros, f"{name}.{own} {_WHY}") for own, zeros in self._own.items()}
        self._handles = (
            norm.register_forward_pre_hook(self._enter),
            norm.register_forward_hook(self._leave, prepend=True),
        )
        norm._buffers.update(self._unread)

    def _enter(self, norm: nn.Module, args: Any) -> None:
        if norm.training:
            norm._buffers.update(self._own)

    def _leave(self, norm: nn.Module, args: Any, result: Any) -> None:
        norm._buffers.update(self._unread)

    def found(self) -> Statistics:
        """What the microbatch has added."""
        mean, var, batches = self._own.values()
        return Statistics(int(batches), mean.cpu().clone(), var.cpu().clone())

    def put_back(self) -> None:
        """The norm has the statistics that it had."""
        for handle in self._handles:
            handle.remove()
        self._norm._buffers.update(self._there)


def counts(module: nn.Module) -> bool:
    """Whether it is a norm that adds to its running statistics, by a kernel that autograd's counters do not see."""
    return isinstance(module, _NormBase) and module.training and module.running_mean is not None


def is_torchs(norm: nn.Module) -> bool:
    """Whether its output does not follow from its running statistics; a forward of the user's may read them."""
    return type(norm).forward.__module__.startswith("torch.nn.")


@torch.no_grad()
def add(norm: Any, found: Statistics) -> None:
    """Go on by some batches whose statistics, begun at zero, are known; running shrinks by (1 - momentum) ^ batches.

    Unseen by autograd, as the kernels do it: norms' nodes keep these buffers, and use them in evaluation alone.
    """
    mean, var, count = (getattr(norm, own) for own in _RUNNING)
    new = int(found.batches)
    if norm.momentum is None:  # the mean over all batches so far
        old = int(count)
        keep, add = old / max(old + new, 1), new / max(old + new, 1)
    else:
        keep, add = (1 - norm.momentum) ** new, 1.0
    for running, part in ((mean, found.mean), (var, found.var)):
        running.data.mul_(keep).add_(part.to(running.device), alpha=add)
    count.data.add_(new)
