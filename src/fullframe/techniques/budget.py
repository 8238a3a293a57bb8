"""Which blocks to compute again so that what is saved for backward stays within a budget, by measured costs.

`measured` takes the costs from a forward pass, `choose` is arithmetic on them; a simulation may supply its own.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

from fullframe.errors import StrategyError
from fullframe.model.attributes import kept_attributes
from fullframe.model.buffers import borrow_buffers, return_buffers
from fullframe.model.forward_patch import PatchedForward, unpatch
from fullframe.model.runs import part
from fullframe.ranks.agreement import from_all_ranks
from fullframe.spatial.tensor import local_or_whole


@dataclass(frozen=True)
class BlockCost:
    """What it means to keep a block's activations: bytes held from forward to backward, for seconds saved there."""

    name: str
    bytes: int  # by which what is saved grows when the block is kept
    seconds: float  # of its forward, which backward would repeat


@dataclass(frozen=True)
class Costs:
    """Of one microbatch on one rank; activations only, no parameters."""

    fixed_bytes: int  # saved also when every block is computed again: the blocks' inputs, and what lies outside
    blocks: tuple[BlockCost, ...]


def choose(costs: Costs, budget_bytes: int) -> tuple[str, ...]:
    """The blocks to compute again so that at most `budget_bytes` are saved when a microbatch's forward ends.

    Greedy, fewest seconds per byte first, then those taken back that turned out not to be needed: at most one block's
    forward slower than the best choice. What is saved falls from there on, but while a block runs again its own
    activations come on top.

    Raises StrategyError with what is missing when all blocks together do not suffice.
    """
    excess = costs.fixed_bytes + sum(block.bytes for block in costs.blocks) - budget_bytes
    gaining = [block for block in costs.blocks if block.bytes > 0]
    chosen: list[BlockCost] = []
    for block in sorted(gaining, key=lambda block: block.seconds / block.bytes):
        if excess <= 0:
            break
        chosen.append(block)
        excess -= block.bytes
    if excess > 0:
        raise StrategyError(
            f"strategy.recompute_budget_bytes is {budget_bytes}, but with all blocks recomputed that save any by it "
            f"({len(gaining)} of {len(costs.blocks)}) {budget_bytes + excess} bytes are saved, {excess} more; raise "
            "the budget, use more microbatches or ranks, or name larger blocks with recompute_modules"
        )
    for block in sorted(chosen, key=lambda block: -block.seconds):
        if excess + block.bytes <= 0:
            chosen.remove(block)
            excess += block.bytes
    names = {block.name for block in chosen}
    return tuple(block.name for block in costs.blocks if block.name in names)


def agreed(costs: Costs) -> Costs:
    """The same on all ranks: of the bytes the most anywhere, so that a choice holds on each; rank 0's seconds."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return costs
    everyone = from_all_ranks(costs)
    blocks = (
        BlockCost(block.name, max(other.blocks[number].bytes for other in everyone), block.seconds)
        for number, block in enumerate(everyone[0].blocks)
    )
    return Costs(max(other.fixed_bytes for other in everyone), tuple(blocks))


def measured(
    model: nn.Module, names: Sequence[str], forward: Callable[[], object], clock: Callable[[], float]
) -> Costs:
    """This rank's costs of the named blocks, from running `forward`, a microbatch's forward pass with its loss.

    Nothing is kept for backward meanwhile, so it fits where the step does. Buffers and attributes of modules are put
    back; random states are the caller's. `clock()` tells seconds.
    """
    there = borrow_buffers(model, {})
    ledger = _Ledger(model, clock)
    blocks = [part(model, name) for name in names]
    for name, block in zip(names, blocks, strict=True):
        block.forward = _Measured(block, name, ledger)
    try:
        with kept_attributes(model), torch.autograd.graph.saved_tensors_hooks(ledger.note_saved, _never_unpacked):
            forward()
    finally:
        for block in blocks:
            unpatch(block)
        return_buffers(there)
    return ledger.costs(names)


def device_clock(device_type: str) -> Callable[[], float]:
    """Seconds, after what the device was told to do is done."""
    synchronize = getattr(torch.get_device_module(device_type), "synchronize", lambda: None)

    def now() -> float:
        synchronize()
        return time.perf_counter()

    return now


class _Ledger:
    """Storages by who saves them for backward and whose inputs they are; "" is what runs outside the blocks."""

    def __init__(self, model: nn.Module, clock: Callable[[], float]):
        self.clock = clock
        self.block = ""  # that is running
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._savers: defaultdict[int, set[str]] = defaultdict(set)
        self._takers: defaultdict[int, set[str]] = defaultdict(set)
        self._bytes: dict[int, int] = {}
        self._seen: dict[int, StorageWeakRef] = {}  # so that no address is used twice
        self._weights: set[int] = set()
        self.leave_out(model)

    def leave_out(self, module: nn.Module) -> None:
        """Parameters and buffers are there anyway."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._weights.add(self._key(tensor))

    def note_saved(self, tensor: Tensor) -> None:
        """The hook in whose place tensors are not kept."""
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            self._savers[self._key(tensor)].add(self.block)

    def note_inputs(self, tree: object) -> None:
        """What the running block was given."""
        for leaf in tree_iter(tree):
            if isinstance(leaf, Tensor):
                self._takers[self._key(leaf)].add(self.block)

    def _key(self, tensor: Tensor) -> int:
        storage = local_or_whole(tensor).untyped_storage()
        reference = StorageWeakRef(storage)
        key: int = reference.cdata
        if key not in self._seen:
            self._seen[key], self._bytes[key] = reference, storage.nbytes()
        return key

    def costs(self, names: Sequence[str]) -> Costs:
        """A block frees what it alone saves and is nobody's input; so rather too much is counted as staying.

        An input that nobody saves is held for the second pass alone.
        """
        total = 0
        kept = dict.fromkeys(names, 0)
        for key in (self._savers.keys() | self._takers.keys()) - self._weights:
            savers, takers = self._savers.get(key, set()), self._takers.get(key, set())
            if savers or len(takers) > 1:
                total += self._bytes[key]
            if len(savers) == 1 and not takers and savers != {""}:
                kept[next(iter(savers))] += self._bytes[key]
            if len(takers) == 1 and not savers:
                kept[next(iter(takers))] -= self._bytes[key]
        blocks = tuple(BlockCost(name, kept[name], self.seconds[name]) for name in names)
        return Costs(total - sum(kept.values()), blocks)


class _Measured(PatchedForward):
    def __init__(self, module: nn.Module, name: str, ledger: _Ledger):
        super().__init__(module)
        self._module, self._name, self._ledger = module, name, ledger

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ledger = self._ledger
        ledger.leave_out(self._module)  # where parameters are sharded, these are whole only now
        ledger.block = self._name
        ledger.note_inputs((args, kwargs))
        start = ledger.clock()
        try:
            return self.original(*args, **kwargs)
        finally:
            ledger.seconds[self._name] += ledger.clock() - start
            ledger.block = ""


def _never_unpacked(packed: None) -> Tensor:
    raise StrategyError(
        "recompute='budget' measures a forward pass that keeps nothing, and this one asks for gradients "
        "(torch.autograd.grad); use recompute='blocks'"
    )
