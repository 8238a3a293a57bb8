"""A message and its adjoint: each is the other's backward, so that gradients of any order are messages too."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from fullframe.errors import GradientError, UnsupportedOp

_is_batched = torch._C._functorch.is_legacy_batchedtensor
is_transformed = torch._C._are_functorch_transforms_active
Map = Callable[[Tensor], Tensor]
Computation = TypeVar("Computation", bound=Callable[..., Any])


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without looks at each argument, none of which is ever a split tensor: in two thirds of its time.

    Raises UnsupportedOp under transforms of `torch.func`, which would have to see inside.
    """
    quickly = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        if is_transformed():
            refuse_transforms()
        return quickly(*args)

    return apply


def refuse_transforms() -> None:
    """Raises UnsupportedOp under transforms of `torch.func`."""
    if is_transformed():
        raise UnsupportedOp(
            "a transform of torch.func (grad, vjp, jvp, vmap)",
            (),
            "",
            "a message between ranks cannot be transformed",
            "Use torch.autograd.grad, with create_graph=True for gradients of gradients; a loop in place of vmap.",
        )


def unrecorded(computation: Computation) -> Computation:
    """`computation`, for where nothing is recorded: its ops pass autograd by, which takes a part of each one's time.

    Inside, `torch.enable_grad` has no effect.
    """

    @wraps(computation)
    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return computation(*args)

    return below  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    """`send(value)`, whose gradient is sent by `adjoint`, and that one's by `again`; keeps no tensor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, send: Map, adjoint: Map, again: Map) -> Tensor:
        ctx.back = adjoint, again
        ctx.set_materialize_grads(False)
        return send(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:  # on no rank, as all run one program
            return None, None, None, None
        if _is_batched(gradient):  # before one rank alone meets what cannot be sent of it
            reason = "is_grads_batched asks for several gradients at once"
            raise UnsupportedOp("autograd.grad", (), "", reason, "Ask for one at a time.")
        if hasattr(gradient, "full_tensor"):
            raise GradientError(
                "a loss has been added to values of sharded parameters (a penalty on weights?), which are DTensors; "
                "take them of parameter.full_tensor()"
            )
        return linear(gradient, *ctx.back), None, None, None


def linear(value: Tensor, send: Map, adjoint: Map, again: Map | None = None) -> Tensor:
    """`send(value)`, a new tensor, by messages that are linear in `value`; differentiable as often as one likes.

    `again` is `send` without the constants that it adds, where it adds any.
    """
    return _linear(value, send, adjoint, again or send)  # type: ignore[no-any-return]


_linear = applied(_Linear)
