"""Buffers and attributes of a chain whose parts lie on several stages, as one process would leave them.

With one microbatch, what the parts have made of them travels with the state. With several, a module of one stage sees
its own in their order anyway. Of batch norm that several stages run, each microbatch's part of the running statistics
is kept apart and put together in the order of one process. Anything else there may be set by the very first microbatch
on the first stage, as caches are, and travels with it; what is changed later is refused. What a module of one stage
keeps in attributes is told to the other stages after the call, for those who read it there.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fullframe.errors import StrategyError
from fullframe.ranks.raw_bytes import checksums
from fullframe.techniques.stages.attributes import (
    ChangedAttribute,
    PartAttributes,
    packed,
    require_tensor_alone,
    unpack,
)
from fullframe.techniques.stages.elsewhere import Left, hide, left, put, put_back
from fullframe.techniques.stages.statistics import Apart, Statistics, add, counts, is_torchs
from fullframe.wording import inside


class Change(NamedTuple):
    """What a stage has made of a buffer or an attribute."""

    kind: str  # "values" of a buffer that stays, a "new" buffer in its place, an "attribute"
    value: Any  # on the host
    device: str = ""  # the type of a new buffer's
    persists: bool = True  # whether a state dict has it


Changes = dict[str, Change]  # by the name in the whole chain


class Said(NamedTuple):
    """What a stage tells the others after all its microbatches."""

    changes: Changes
    statistics: list[dict[str, Statistics]]  # of each microbatch, by the name of the module
    left: dict[str, Left]  # in attributes of modules that this stage alone runs


class StageBuffers:
    """The buffers of the chain `whole`, of which each stage runs some modules: `stages`, this one's at `stage`."""

    def __init__(self, whole: nn.Module, stages: Sequence[Sequence[nn.Module]], stage: int, microbatches: int):
        self._stage, self._has_several = stage, microbatches > 1
        self._names = names = {module: name for name, module in whole.named_modules()}
        here = nn.ModuleList(dict.fromkeys(stages[stage]))
        times = Counter(module for each in stages for module in nn.ModuleList(dict.fromkeys(each)).modules())
        mine = {names[m]: m for m in here.modules() if m in names}
        self._shared = {name: m for name, m in mine.items() if times[m] > 1}
        self._norms = {name: m for name, m in self._shared.items() if counts(m) and is_torchs(m) and microbatches > 1}
        self._attributes = PartAttributes(mine)
        self._owners = dict(whole.named_modules())
        self._others = [m for name, m in self._owners.items() if name not in mine]
        self._watched = [(name, m) for name, m in mine.items() if name not in self._norms]
        self._before: dict[str, tuple[Tensor, int, int | None]] = {}  # with its version, and sum
        self._apart: dict[str, Apart] = {}  # while a microbatch runs
        self._changed: dict[str, str] = {}  # the kind of change
        self._taken: Changes = {}  # by the stages before
        self._left: dict[str, tuple[ChangedAttribute, bool]] = {}  # and whether with each microbatch
        self._statistics: list[dict[str, Statistics]] = []

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a microbatch; an error leaves running statistics as they were."""
        self.begin()
        try:
            yield
            self.end()
        finally:
            self._put_back()

    def begin(self) -> None:
        """Before a microbatch."""
        self.put_back_attributes()
        self._apart = {name: Apart(norm, name) for name, norm in self._norms.items()}
        self._attributes.begin()
        sums = self._sums_of_statistics()
        self._before = {
            inside(path, name): (buffer, buffer._version, sums.get(inside(path, name)))
            for path, owner in self._watched
            for name, buffer in owner._buffers.items()
            if buffer is not None and not buffer.is_inference()
        }

    def end(self) -> None:
        """After it."""
        is_first = self._stage == 0 and not self._statistics
        self._statistics.append({name: apart.found() for name, apart in self._apart.items()})
        self._put_back()
        sums = self._sums_of_statistics()
        for path, owner in self._watched:
            for name, buffer in owner._buffers.items():
                full = inside(path, name)
                before, version, total = self._before.get(full, (None, 0, None))
                if buffer is None or buffer.is_inference():
                    continue
                is_left = buffer._version == version and sums.get(full) == total
                if buffer is before and is_left and not counts(owner):
                    continue
                if path in self._shared:
                    self._require_known(owner, f"buffer {full}", is_first and before is None)
                    require_tensor_alone(owner, buffer, full)
                is_new = buffer is not before or self._changed.get(full) == "new"
                self._changed[full] = "new" if is_new else "values"
        for changed in self._attributes.changed():
            full = inside(changed.path, changed.name)
            if changed.path in self._shared:
                self._require_known(changed.module, f"attribute {full}", is_first)
                self._changed[full] = "attribute"
                continue
            if changed.inside:
                self._require_own(changed, full)
            self._left[full] = changed, len(self._statistics) > 1

    def _sums_of_statistics(self) -> dict[str, int]:
        """Of what may be statistics of a norm that is none of torch's: `F.batch_norm` updates them, and no version."""
        own = {
            inside(path, name): buffer
            for path, owner in self._watched
            if not isinstance(owner, _NormBase)
            for name, buffer in owner._buffers.items()
            if type(buffer) is Tensor and buffer.dim() == 1 and buffer.is_floating_point()
        }
        found: dict[str, int] = {}
        for device in {buffer.device for buffer in own.values() if not buffer.is_meta}:
            there = {name: buffer for name, buffer in own.items() if buffer.device == device}
            found |= zip(there, checksums(there.values()), strict=True)
        return found

    def put_back_attributes(self) -> None:
        """Modules of this stage alone have in their attributes what they go on with, read or not."""
        for path, module in self._attributes.modules.items():
            for name in put_back(module):
                self._left[inside(path, name)] = ChangedAttribute(path, module, name, inside=True), True

    def hide_attributes(self) -> None:
        """An earlier microbatch goes back: what a later one has set anew is not for its hooks to read."""
        for full, (changed, varies) in self._left.items():
            if varies:
                hide(changed, full, self._stage)

    def _require_own(self, changed: ChangedAttribute, full: str) -> None:
        """Raises StrategyError where modules of other stages hold the very object that forward has changed."""
        value = vars(changed.module)[changed.name]
        other = next((m for m in self._others for one in vars(m).values() if one is value), None)
        if other is not None:
            raise StrategyError(
                f"{type(changed.module).__name__} changes {full} in forward, an object that {self._names[other]} on "
                "another stage holds, too, which would not see it; make it a part of the state, or leave out stages"
            )

    def _put_back(self) -> None:
        for apart in self._apart.values():
            apart.put_back()
        self._apart = {}

    def _require_known(self, owner: nn.Module, what: str, is_first: bool) -> None:
        """Raises StrategyError where a shared module's change comes too late for other microbatches."""
        if self._has_several and not is_first:
            raise StrategyError(
                f"{type(owner).__name__} changes its {what} in forward, and lies on several stages: a later stage's "
                "microbatch would need what an earlier one's has not made yet; use microbatches=1, or a block for each "
                "iteration"
            )

    def changes(self) -> Changes:
        """What this stage and those before have changed."""
        return self._taken | {name: self._change(name) for name in self._changed}

    def left(self) -> Changes:
        """What of it the next stage needs for the microbatch that has just run."""
        if not self._has_several:
            return self.changes()
        if len(self._statistics) > 1:
            return {}
        return self._taken | {name: self._change(name) for name in self._changed if _split(name)[0] in self._shared}

    def said(self) -> Said:
        """What the others must know when all microbatches are through."""
        found = {full: left(changed, full, self._stage, varies) for full, (changed, varies) in self._left.items()}
        return Said(self.changes(), self._statistics, found)

    def take(self, changes: Changes) -> None:
        """Go on from what the stages before have changed."""
        self._taken |= changes
        self._put(changes)

    def settle(self, everyone: Sequence[Said]) -> None:
        """After all microbatches: the buffers as one process would have them, on all stages."""
        last = {name: stage for stage, said in enumerate(everyone) for name in said.changes}
        for stage, said in enumerate(everyone):
            self._put({name: said.changes[name] for name in said.changes if last[name] == stage != self._stage})
        for stage, said in enumerate(everyone):
            for full, found in said.left.items():
                path, name = _split(full)
                put(self._owners[path], name, found, is_own=stage == self._stage)
        names = dict.fromkeys(name for said in everyone for each in said.statistics for name in each)
        for name in names:
            for number in range(max(len(said.statistics) for said in everyone)):
                for said in everyone:
                    if number < len(said.statistics) and name in said.statistics[number]:
                        add(self._owners[name], said.statistics[number][name])

    def _change(self, name: str) -> Change:
        (path, own), kind = _split(name), self._changed[name]
        owner = self._owners[path]
        if kind == "attribute":
            return Change(kind, packed(owner, own, name))
        value: Any = owner._buffers[own]
        persists = own not in owner._non_persistent_buffers_set
        return Change(kind, value.detach().cpu().clone(), value.device.type, persists)

    @torch.no_grad()
    def _put(self, changes: Changes) -> None:
        for name, (kind, value, device, persists) in changes.items():
            path, own = _split(name)
            owner = self._owners[path]
            there = owner._buffers.get(own)
            if kind == "attribute":
                unpack(owner, own, name, value)
            elif own not in owner._buffers:
                owner.register_buffer(own, value.to(device), persists)
            elif kind == "new" or there is None:  # here, too: the old one may be in a graph
                owner._buffers[own] = value.to(device if there is None else there.device)
            else:
                (there.data if isinstance(owner, _NormBase) else there).copy_(value)


def _split(name: str) -> tuple[str, str]:
    path, _, own = name.rpartition(".")
    return path, own
