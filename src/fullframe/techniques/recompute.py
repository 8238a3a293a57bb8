"""Blocks whose activations are thrown away after their forward and computed again in backward.

Non-reentrant `torch.utils.checkpoint` inside the block's own forward, so the hooks of FSDP and of users run once. The
second pass starts from the random states, buffers and attributes of the first, and what it does to them is forgotten:
batch norm counts a batch once, dropout draws the same. It multiplies fp32 numbers as the first did, in TF32 or not.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from fullframe.errors import StrategyError
from fullframe.model.attributes import Attributes
from fullframe.model.blocks import blocks_that_repeat, examples, matching
from fullframe.model.buffers import borrow_buffers, buffers_of, return_buffers
from fullframe.model.forward_patch import PatchedForward
from fullframe.model.runs import part
from fullframe.spatial.tensor import SpatialTensor, local_or_whole, wrap
from fullframe.strategy import Strategy
from fullframe.techniques.budget import Costs, choose
from fullframe.techniques.precision import Fp32Math, fp32_math

_SMALL_BYTES = 65_536
_NOT_IN_PLACE = "use inplace=False in its first layer, or name other modules with recompute_modules"


def blocks_to_recompute(model: nn.Module, strategy: Strategy) -> tuple[str, ...]:
    """Names of the modules that `strategy` may compute again, none within another; () without recompute.

    Without patterns the blocks of its `ff.unroll`, else its repeated blocks, or where it has none runs of the layers
    of its Sequentials. With "nested" none: there each `ff.unroll` does it.

    Raises StrategyError when a pattern names no module, or without patterns there is neither.
    """
    if strategy.recompute in ("none", "nested"):
        return ()
    if strategy.recompute_modules:
        return tuple(matching(model, strategy.recompute_modules, "strategy.recompute_modules"))
    found = blocks_that_repeat(model)
    if not found:
        raise StrategyError(
            f"strategy.recompute is {strategy.recompute!r}, but {type(model).__name__} has no repeated blocks, and no "
            f"nn.Sequential of four layers; name modules with recompute_modules, of {examples(model)}"
        )
    return tuple(found)


def recompute(model: nn.Module, names: Sequence[str]) -> None:
    """From now on the named modules keep their inputs only. `forward_patch.restore` takes it back."""
    for name in names:
        block = part(model, name)
        block.forward = Recomputed(block, name)


class Recomputed(PatchedForward):
    """The forward of `module`, of which its inputs alone are kept; the error where it writes to them says `remedy`."""

    def __init__(self, module: nn.Module, name: str, remedy: str = _NOT_IN_PLACE):
        super().__init__(module)
        self._module, self._name, self._remedy = module, name, remedy
        self.was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        # All tensors go in as plain positional arguments: only those does checkpoint save through the hooks around it,
        # which may offload them.
        leaves, spec = tree_flatten((args, kwargs))
        specs = [leaf.spec if isinstance(leaf, SpatialTensor) else None for leaf in leaves]
        locals_ = [local_or_whole(leaf) for leaf in leaves]
        given = [(args, kwargs)]  # the first pass gets the very objects, which it may change; and lets go of them
        versions = [(tensor, tensor._version) for tensor in locals_ if isinstance(tensor, Tensor)]
        del leaves, args, kwargs

        def run(*again: Any) -> Any:
            if given:
                args, kwargs = given.pop()
            else:
                dressed = [leaf if lay is None else wrap(leaf, lay) for leaf, lay in zip(again, specs, strict=True)]
                args, kwargs = tree_unflatten(dressed, spec)
            return self.original(*args, **kwargs)

        before = _Before(self._module, self._name)
        result = checkpoint(run, *locals_, use_reentrant=False, context_fn=lambda: (before.noting(), before))
        if any(tensor._version != version for tensor, version in versions):
            raise StrategyError(f"{self._name} writes to its input, so it cannot be recomputed from it; {self._remedy}")
        return result


class _Before:
    """What the first pass starts from, beside its inputs and torch's random states."""

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self.attributes = Attributes(module)
        self.random_states = random.getstate(), np.random.get_state()
        self.math = Fp32Math.now()
        self.buffers: dict[tuple[nn.Module, str], Tensor] = {}  # as they were

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around the first pass."""
        watched = [
            (owner, name, buffer, buffer._version, buffer.detach().clone())
            for owner, name, buffer in buffers_of(self.module)
        ]
        versions = [(name, parameter, parameter._version) for name, parameter in self.module.named_parameters()]
        try:
            yield
        finally:
            for owner, name, buffer, version, copy in watched:
                # Of a large one that the pass left alone no copy: an unrolled block would hold one for each iteration.
                # Batch norm's kernel writes its statistics unseen by autograd.
                seen = not isinstance(owner, _NormBase) and buffer._version == version
                self.buffers[owner, name] = buffer if seen and buffer.nbytes > _SMALL_BYTES else copy
        written = [name for name, parameter, version in versions if parameter._version != version]
        if written:
            raise StrategyError(
                f"{self.name} writes to its parameter {written[0]} in forward, which it would do once more when it is "
                "recomputed; make it a buffer, or name other modules with recompute_modules"
            )

    def __enter__(self) -> None:
        """Around the second pass, which can come more than once: it starts as the first did and leaves no trace."""
        self._now = random.getstate(), np.random.get_state()
        _set_random_states(self.random_states)
        self._now_set = Attributes(self.module)
        self.attributes.put_back()
        self._there = borrow_buffers(self.module, self.buffers)
        self._math = fp32_math(self.math)
        self._math.__enter__()

    def __exit__(self, *error: object) -> None:
        self._math.__exit__(None, None, None)
        return_buffers(self._there)
        self._now_set.put_back()
        del self._now_set
        _set_random_states(self._now)


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class Recomputation:
    """Which blocks of `model` are computed again, by their `names`; with a budget, none until it is settled."""

    def __init__(self, model: nn.Module, strategy: Strategy):
        self._model, self._candidates = model, blocks_to_recompute(model, strategy)
        self._budget_bytes = strategy.recompute_budget_bytes  # None: there is none to be settled
        self.names = self._unchecked = self._candidates if self._budget_bytes is None else ()
        recompute(model, self.names)

    def settle(self, costs: Callable[[Sequence[str]], Costs]) -> None:
        """Before a forward pass: choose within the budget, once, by `costs(names)`, on which the ranks agree."""
        if self._budget_bytes is not None:
            self.names = self._unchecked = choose(costs(self._candidates), self._budget_bytes)
            self._budget_bytes = None
            recompute(self._model, self.names)

    def check(self) -> None:
        """After the first forward pass: say which blocks it did not call (but their parts one by one, perhaps)."""
        forwards = {name: part(self._model, name).forward for name in self._unchecked}
        passed_by = [name for name, f in forwards.items() if isinstance(f, Recomputed) and not f.was_called]
        self._unchecked = ()
        if passed_by and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(
                f"strategy.recompute has no effect on {', '.join(passed_by[:3])}{', ...' if passed_by[3:] else ''}: "
                "the model did not call them as modules in its first forward pass; name others with recompute_modules",
                stacklevel=2,
            )
