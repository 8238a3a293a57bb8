"""An optimizer's state spread over the ranks, by whole parameters: ZeRO-1.

As Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020). The optimizer is
the recipe's own, which updates what has a gradient, so that its options, schedules and hooks work as ever; torch's
ZeroRedundancyOptimizer would make another, from a class and defaults.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fullframe.errors import CheckpointError
from fullframe.ranks.raw_bytes import BUCKET_BYTES

_STEP = Optimizer.profile_hook_step(lambda _: None).__code__  # of what torch puts around each class's `step`


def trainable(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that it updates."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def shard_state(optimizer: Optimizer) -> None:
    """From now on each rank updates its part of the parameters, whose state it has; all get the new values.

    Raises CheckpointError where it then loads a state that another rank's optimizer gave.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = _parts(trainable(optimizer), ranks)
    others = [p for owner, part in enumerate(parts) if owner != rank for p in part]
    for other in others:
        optimizer.state.pop(other, None)  # Adagrad makes its state at once
    everyone = dist.distributed_c10d._get_default_group()
    set_aside: list[Tensor | None] = []

    def leave_out_others(*_: Any) -> None:
        if _is_within_another(optimizer):
            return
        set_aside[:] = [p.grad for p in others]
        for parameter in others:
            parameter.grad = None

    def share(*_: Any) -> None:
        if _is_within_another(optimizer):
            return
        for parameter, gradient in zip(others, set_aside, strict=True):
            parameter.grad = gradient
        set_aside.clear()
        for owner, part in enumerate(parts):
            if part:
                dist._broadcast_coalesced(everyone, [p.detach() for p in part], BUCKET_BYTES, owner)

    def require_own(*_: Any) -> None:
        own = [p for p in parts[rank] if p in optimizer.state]
        if parts[rank] and not own and any(p in optimizer.state for p in others):
            raise CheckpointError(
                "the optimizer has loaded the state of another rank's part of the parameters, so its own would begin "
                "anew; with shard_optimizer each rank loads the state_dict that it saved, or one of a whole optimizer"
            )
        for other in others:
            optimizer.state.pop(other, None)

    optimizer.register_load_state_dict_post_hook(require_own)
    _leave_others_hooks_between(optimizer, leave_out_others, share)


def _leave_others_hooks_between(optimizer: Any, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Registers `before` and `after` a step; users' hooks, whenever registered, see all gradients and new values."""
    own = optimizer.register_step_pre_hook(before)
    register = optimizer.register_step_pre_hook

    def register_step_pre_hook(hook: Callable[..., Any]) -> Any:
        handle = register(hook)
        optimizer._optimizer_step_pre_hooks.move_to_end(own.id)
        return handle

    optimizer.register_step_pre_hook = register_step_pre_hook
    handle = optimizer.register_step_post_hook(after)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)


def _is_within_another(optimizer: Optimizer) -> bool:
    """In a hook of its step: whether this is its parent class's step, called by its own.

    torch calls the hooks around that too, once it has met an optimizer of the parent class.
    """
    frame: FrameType | None = sys._getframe(1)
    running = 0
    while frame is not None and running < 2:
        running += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return running > 1


def _parts(parameters: list[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """One part a rank: the largest parameter first, each to the rank that has the fewest elements."""
    parts: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = held.index(min(held))
        parts[least].append(parameter)
        held[least] += parameter.numel()
    return parts
