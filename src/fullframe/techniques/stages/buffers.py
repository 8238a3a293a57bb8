"""Buffers of a chain whose parts lie on several stages, as one process would leave them after the same microbatches.

With one microbatch, what the parts have made of their buffers travels with the state. With several, a module of one
stage sees them in their order anyway. Of batch norm that several stages run, each microbatch's part of the running
statistics is kept apart and put together in the order of one process; any other buffer there is refused.

Norms' buffers are written as their kernels do it, unseen by autograd: their nodes keep the buffers, and use them in
evaluation alone.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fullframe.errors import StrategyError
from fullframe.model.buffers import buffers_of

Changes = dict[str, tuple[Tensor, bool]]  # by the name in the whole chain: the value, on the host; is it a new tensor


class Statistics(NamedTuple):
    """What one microbatch on one stage adds to a batch norm's running statistics."""

    batches: int
    mean: Tensor
    var: Tensor


class Said(NamedTuple):
    """What a stage tells the others after all its microbatches."""

    changes: Changes
    statistics: list[dict[str, Statistics]]  # of each microbatch, by the name of the module


class StageBuffers:
    """The buffers of the chain `whole`, of which each stage runs some modules: `stages`, this one's at `stage`."""

    def __init__(self, whole: nn.Module, stages: Sequence[Sequence[nn.Module]], stage: int, microbatches: int):
        self._stage = stage
        names = {module: name for name, module in whole.named_modules()}
        here = nn.ModuleList(dict.fromkeys(stages[stage]))
        counts = Counter(module for each in stages for module in nn.ModuleList(dict.fromkeys(each)).modules())
        self._shared = {names[m]: m for m in here.modules() if m in names and counts[m] > 1 and microbatches > 1}
        self._norms = {name: m for name, m in self._shared.items() if _counts(m) and _is_torchs(m)}
        self._owners = {names[m]: m for m in whole.modules()}
        self._watched = [(names[owner], owner, name) for owner, name, _ in buffers_of(here) if owner in names]
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._kept: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # running statistics as the call found them
        self._changed: dict[str, bool] = {}  # whether it is a new tensor
        self._taken: Changes = {}  # by the stages before
        self._statistics: list[dict[str, Statistics]] = []

    def begin(self) -> None:
        """Before a microbatch."""
        for name, norm in self._norms.items():
            if name not in self._kept:
                self._kept[name] = tuple(b.clone() for b in _running(norm))  # type: ignore[assignment]
            for running in _running(norm):
                running.data.zero_()
        self._before = {}
        for path, owner, name in self._watched:
            buffer = owner._buffers[name]
            if buffer is not None:
                self._before[_joined(path, name)] = buffer, buffer._version

    def end(self) -> None:
        """After it."""
        self._statistics.append({})
        for name, norm in self._norms.items():
            mean, var, batches = _running(norm)
            self._statistics[-1][name] = Statistics(int(batches), mean.cpu().clone(), var.cpu().clone())
        for path, owner, name in self._watched:
            if path in self._norms:
                continue
            full, buffer = _joined(path, name), owner._buffers.get(name)
            before, version = self._before.get(full, (None, 0))
            if buffer is None or (buffer is before and buffer._version == version and not _counts(owner)):
                continue
            if path in self._shared:
                raise StrategyError(
                    f"{type(owner).__name__} changes its buffer {full} in forward, and lies on several stages: a later "
                    "stage's microbatch would need what an earlier one's has not made yet; use microbatches=1, or a "
                    "block for each iteration"
                )
            self._changed[full] = self._changed.get(full, False) or buffer is not before

    def changes(self) -> Changes:
        """What this stage and those before have changed."""
        own = {name: (self._value(name).detach().cpu().clone(), new) for name, new in self._changed.items()}
        return self._taken | own

    def said(self) -> Said:
        """What the others must know when all microbatches are through."""
        return Said(self.changes(), self._statistics)

    def take(self, changes: Changes) -> None:
        """Go on from what the stages before have changed."""
        self._taken = changes
        self._put(changes)

    def settle(self, everyone: Sequence[Said]) -> None:
        """After all microbatches: the buffers as one process would have them, on all stages."""
        last = {name: stage for stage, said in enumerate(everyone) for name in said.changes}
        for stage, said in enumerate(everyone):
            self._put({name: said.changes[name] for name in said.changes if last[name] == stage != self._stage})
        names = dict.fromkeys(name for said in everyone for each in said.statistics for name in each)
        for name in names:
            norm = self._owners[name]
            if name in self._kept:
                for buffer, value in zip(_running(norm), self._kept[name], strict=True):
                    buffer.data.copy_(value)
            for number in range(max(len(said.statistics) for said in everyone)):
                for said in everyone:
                    if number < len(said.statistics) and name in said.statistics[number]:
                        _add(norm, said.statistics[number][name])

    def _value(self, name: str) -> Tensor:
        path, _, own = name.rpartition(".")
        return self._owners[path]._buffers[own]  # type: ignore[return-value]

    @torch.no_grad()
    def _put(self, changes: Changes) -> None:
        for name, (value, is_new) in changes.items():
            path, _, own = name.rpartition(".")
            owner = self._owners[path]
            there = owner._buffers[own]
            assert there is not None
            if is_new:  # here, too: the old one may be in a graph
                owner._buffers[own] = value.to(there.device)
            else:
                (there.data if isinstance(owner, _NormBase) else there).copy_(value)


def _counts(module: nn.Module) -> bool:
    """Whether it is a norm that adds to its running statistics, by a kernel that autograd's counters do not see."""
    return isinstance(module, _NormBase) and module.training and module.running_mean is not None


def _is_torchs(norm: nn.Module) -> bool:
    """Whether its output does not follow from its running statistics; a forward of the user's may read them."""
    return type(norm).forward.__module__.startswith("torch.nn.")


def _running(norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


@torch.no_grad()
def _add(norm: Any, found: Statistics) -> None:
    """Go on by some batches whose statistics, begun at zero, are known; running shrinks by (1 - momentum) ^ batches."""
    mean, var, count = _running(norm)
    new = int(found.batches)
    if norm.momentum is None:  # the mean over all batches so far
        old = int(count)
        keep, add = old / max(old + new, 1), new / max(old + new, 1)
    else:
        keep, add = (1 - norm.momentum) ** new, 1.0
    for running, part in ((mean, found.mean), (var, found.var)):
        running.data.mul_(keep).add_(part.to(running.device), alpha=add)
    count.data.add_(new)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
