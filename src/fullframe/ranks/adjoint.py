"""A message and its adjoint: each is the other's backward, so that gradients of any order are messages too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """`send(value)`, whose gradient is sent by `adjoint`; keeps no tensor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, send: Map, adjoint: Map) -> Tensor:
        ctx.back = adjoint, send
        ctx.set_materialize_grads(False)
        return send(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:  # on no rank, as all run one program
            return None, None, None
        return linear(gradient, *ctx.back), None, None


def linear(value: Tensor, send: Map, adjoint: Map) -> Tensor:
    """`send(value)`, a new tensor, by messages that are linear in `value`; differentiable as often as one likes."""
    return _Linear.apply(value, send, adjoint)  # type: ignore[no-any-return, no-untyped-call]
