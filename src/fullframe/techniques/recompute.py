"""Blocks whose activations are thrown away after their forward and computed again in backward.

Non-reentrant `torch.utils.checkpoint` inside the block's own forward, so the hooks of FSDP and of users run once. The
second pass starts from the random states and buffers of the first, and what it does to either is forgotten: batch norm
counts a batch once, dropout draws the same.
"""

import random
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from fullframe.errors import StrategyError
from fullframe.model.blocks import repeated_blocks
from fullframe.model.buffers import borrow_buffers, buffers_of, return_buffers
from fullframe.model.forward_patch import PatchedForward
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap
from fullframe.strategy import Strategy
from fullframe.techniques.budget import Costs, agreed, choose

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which are never called


def blocks_to_recompute(model: nn.Module, strategy: Strategy) -> tuple[str, ...]:
    """Names of the modules that `strategy` may compute again, none within another; () without recompute.

    Raises StrategyError when a pattern names no module, or without patterns the model repeats no block.
    """
    if strategy.recompute == "none":
        return ()
    if strategy.recompute_modules:
        return tuple(_matching(model, strategy.recompute_modules))
    found = repeated_blocks(model)
    if not found:
        raise StrategyError(
            f"strategy.recompute is {strategy.recompute!r}, but {type(model).__name__} has no repeated blocks; "
            f"name modules with recompute_modules, of {_examples(model)}"
        )
    return tuple(found)


def _matching(model: nn.Module, patterns: Sequence[str]) -> Iterator[str]:
    """The outermost modules that match; a list of modules stands for what is in it."""
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise StrategyError(
                f"strategy.recompute_modules names {pattern!r}, which no module of {type(model).__name__} matches; "
                f"there are {_examples(model)}"
            )
    covered: set[str] = set()
    for name, module in modules.items():  # a parent comes before its children
        parent = name.rpartition(".")[0]
        is_in_list = parent in covered and isinstance(modules[parent], _CONTAINERS)
        if parent in covered and not is_in_list:
            covered.add(name)
        elif is_in_list or any(fnmatchcase(name, pattern) for pattern in patterns):
            covered.add(name)
            if not isinstance(module, _CONTAINERS):
                yield name


def _examples(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") or "which it has none"


def recompute(model: nn.Module, names: Sequence[str]) -> None:
    """From now on the named modules keep their inputs only. `patching.restore` takes it back."""
    for name in names:
        block = model.get_submodule(name)
        block.forward = _Recomputed(block, name)


class _Recomputed(PatchedForward):
    def __init__(self, module: nn.Module, name: str):
        super().__init__(module)
        self._module, self._name = module, name
        self.was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        # All tensors go in as plain positional arguments: only those does checkpoint save through the hooks around it,
        # which may offload them.
        leaves, spec = tree_flatten((args, kwargs))
        specs = [leaf.spec if isinstance(leaf, SpatialTensor) else None for leaf in leaves]
        locals_ = [local_of(leaf) if isinstance(leaf, SpatialTensor) else leaf for leaf in leaves]
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

        before = _Before(self._module)
        result = checkpoint(run, *locals_, use_reentrant=False, context_fn=lambda: (before, _Again(before)))
        if any(tensor._version != version for tensor, version in versions):
            raise StrategyError(
                f"{self._name} writes to its input, so it cannot be recomputed from it; use inplace=False in its first "
                "layer, or name other modules with recompute_modules"
            )
        return result


class _Before:
    """Around the first pass: what it starts from, beside its inputs and torch's random states."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.random_states = random.getstate(), np.random.get_state()
        self.buffers: dict[tuple[nn.Module, str], Tensor] = {}  # as they were, of those that the pass has changed

    def __enter__(self) -> None:
        # Without batch norm's: its kernel writes them unseen by autograd, but its output does not follow from them.
        self._watched = [
            (owner, name, buffer, buffer._version, buffer.detach().clone())
            for owner, name, buffer in buffers_of(self.module)
            if not isinstance(owner, _NormBase)
        ]

    def __exit__(self, *error: Any) -> None:
        for owner, name, buffer, version, copy in self._watched:
            if owner._buffers.get(name) is not buffer:
                self.buffers[owner, name] = buffer
            elif buffer._version != version:
                self.buffers[owner, name] = copy
        del self._watched


class _Again:
    """Around the second pass, which can come more than once: it starts as the first did and leaves no trace."""

    def __init__(self, before: _Before):
        self._before = before

    def __enter__(self) -> None:
        before = self._before
        self._random_states = random.getstate(), np.random.get_state()
        _set_random_states(before.random_states)
        self._buffers = borrow_buffers(before.module, before.buffers)

    def __exit__(self, *error: Any) -> None:
        return_buffers(self._buffers)
        _set_random_states(self._random_states)


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class Recomputation:
    """Which blocks of `model` are computed again: known at once, or with a budget when `decide` got the costs."""

    def __init__(self, model: nn.Module, strategy: Strategy):
        self._model, self._budget_bytes = model, strategy.recompute_budget_bytes
        self.candidates = blocks_to_recompute(model, strategy)
        self.names: tuple[str, ...] | None = None
        if self._budget_bytes is None:
            self._apply(self.candidates)

    def decide(self, costs: Costs) -> None:
        """Choose within the budget; all ranks call it, each with its own costs."""
        assert self._budget_bytes is not None
        self._apply(choose(agreed(costs), self._budget_bytes))

    def _apply(self, names: tuple[str, ...]) -> None:
        recompute(self._model, names)
        self.names, self._unchecked = names, names

    def check(self) -> None:
        """After the first forward pass: say which blocks it did not call (but their parts one by one, perhaps)."""
        forwards = {name: self._model.get_submodule(name).forward for name in self._unchecked}
        passed_by = [name for name, f in forwards.items() if isinstance(f, _Recomputed) and not f.was_called]
        self._unchecked = ()
        if passed_by and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(
                f"strategy.recompute has no effect on {', '.join(passed_by[:3])}{', ...' if passed_by[3:] else ''}: "
                "the model did not call them as modules in its first forward pass; name others with recompute_modules",
                stacklevel=2,
            )
