"""Gradients with `create_graph=True`: those that can be differentiated again, and those that say that they cannot."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fullframe.errors import GradientError

Backward = Callable[..., Any]


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


def once_differentiable(backward: Backward) -> Backward:
    """For the backward of an autograd.Function: what it returns with `create_graph` refuses to be differentiated.

    Torch's own decorator lets a result pass for a constant where the incoming gradient is one, though it depends on
    what the function has saved; and `autograd.grad` goes round its refusal.
    """
    name = backward.__qualname__.split(".")[0].lstrip("_")

    @wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        context = _ReadOnce(ctx, ctx.saved_tensors)
        with torch.no_grad():
            results = backward(context, *gradients)
        sources = [t for t in (*gradients, *context.saved_tensors) if isinstance(t, Tensor) and t.requires_grad]
        if not sources:
            return results
        several = results if isinstance(results, tuple) else (results,)
        guarded = [_Once.apply(r, name, *sources) if isinstance(r, Tensor) else r for r in several]  # type: ignore[no-untyped-call]
        return tuple(guarded) if isinstance(results, tuple) else guarded[0]

    return once


def require_first(what: str, remedy: str) -> None:
    """In a backward: raises GradientError with `create_graph`, where `what` has a first derivative only."""
    if torch.is_grad_enabled():
        raise GradientError(
            f"gradients of gradients (create_graph=True) are asked for through {what}, of which there is a first "
            f"derivative only; {remedy}"
        )


class _ReadOnce:
    """A function's context whose saved tensors were read, as some may be read only once a pass."""

    def __init__(self, context: Any, saved_tensors: tuple[Any, ...]):
        self._context, self.saved_tensors = context, saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _Once(torch.autograd.Function):
    """`value` as it is, with a backward to `sources` that raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str, *sources: Tensor) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise GradientError(
            f"a second derivative is asked for (a gradient of gradients, as create_graph=True gives) through "
            f"{ctx.name} of split tensors, which has a first one only; make the input of that part whole with x.full()"
        )
