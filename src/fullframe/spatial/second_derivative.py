"""Gradients with `create_graph=True`: those that can be differentiated again, and those that say that they cannot."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.errors import GradientError


def gradients_of(
    forward: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of those `inputs` that are `needed`, differentiable as often as `forward` is, which runs again.

    `forward(*inputs)` is made of torch's functions and differentiable messages. `gradient` is that of its result.
    """
    aliases = [t.view_as(t) for t in inputs]  # hooks of the tensors are not for these
    made = forward(*aliases)
    wanted = [alias for alias, wants in zip(aliases, needed, strict=True) if wants]
    found: Any = iter(torch.autograd.grad(made, wanted, gradient, create_graph=True))
    return [next(found) if wants else None for wants in needed]


def require_first(what: str, remedy: str) -> None:
    """In a backward: raises GradientError with `create_graph`, where `what` has a first derivative only."""
    if torch.is_grad_enabled():
        raise GradientError(
            f"gradients of gradients (create_graph=True) are asked for through {what}, of which there is a first "
            f"derivative only; {remedy}"
        )
