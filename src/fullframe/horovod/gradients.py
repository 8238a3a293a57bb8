"""Gradients of the collectives, as Horovod defines them: those of the mean over the ranks of their losses.

An allgather's gradient is the ranks' mean of its rows; a broadcast's goes to the root, as the mean; a reducescatter's
is gathered, times the number of ranks where it was a sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.horovod.handles import complete, first
from fullframe.horovod.process_sets import ProcessSet
from fullframe.horovod.request import ReduceOp, Request
from fullframe.horovod.requests_of import request_of


class _OfGroup(torch.autograd.Function):
    """What is asked of several tensors as one."""

    @staticmethod
    def forward(ctx: Any, request: Request, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.request, ctx.process_set = request, process_set
        return tuple(complete(request, tensors, process_set, list))


class Allreduce(_OfGroup):
    """The reduction of a group; the gradient is reduced likewise."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The same reduction of the gradients."""
        asked: Request = ctx.request
        if asked.op not in (ReduceOp.Sum, ReduceOp.Average):
            raise NotImplementedError(f"allreduce with {asked.op.name} has no gradient; use it on tensors without one")
        scales = {"op": asked.op, "prescale": asked.prescale, "postscale": asked.postscale}
        grads = tuple(grad.contiguous() for grad in grads)
        request = request_of("allreduce", grads, asked.name and f"{asked.name}.grad", **scales)
        return None, None, *Allreduce.apply(request, ctx.process_set, *grads)  # type: ignore[no-untyped-call]


class Allgather(_OfGroup):
    """Rows of all ranks; the gradient of a rank's own rows is the mean of what the ranks have for them."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The mean, of which the own rows are taken."""
        asked: Request = ctx.request
        name, own = asked.name and f"{asked.name}.grad", [shape[0] for shape in asked.shapes]
        grads = tuple(grad.contiguous() for grad in grads)
        request = request_of("allreduce", grads, name, op=ReduceOp.Average)
        means = Allreduce.apply(request, ctx.process_set, *grads)  # type: ignore[no-untyped-call]
        mine = torch.tensor([own], device="cpu")
        rows = complete(request_of("allgather", [mine], name and f"{name}.rows"), [mine], ctx.process_set, list)[0]
        firsts = rows[: ctx.process_set.rank()].sum(dim=0).tolist()
        return None, None, *(m.narrow(0, first, n) for m, first, n in zip(means, firsts, own, strict=True))


class Broadcast(torch.autograd.Function):
    """The root's tensor; the gradient is the ranks' mean at the root, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, request: Request, process_set: ProcessSet, tensor: Tensor) -> Tensor:
        """A new tensor on every rank."""
        ctx.process_set, ctx.name, ctx.root = process_set, request.name, request.root
        result = complete(request, [tensor], process_set, first)
        assert isinstance(result, Tensor)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The mean at the root."""
        grad = grad.contiguous()
        request = request_of("allreduce", [grad], ctx.name and f"{ctx.name}.grad", op=ReduceOp.Average)
        (mean,) = Allreduce.apply(request, ctx.process_set, grad)  # type: ignore[no-untyped-call]
        return None, None, mean if ctx.process_set.rank() == ctx.root else mean * 0


class Alltoall(torch.autograd.Function):
    """Rows to every rank; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, request: Request, process_set: ProcessSet, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The rows received, and how many of each rank."""
        out, received = complete(request, [tensor], process_set, tuple)
        ctx.process_set, ctx.name, ctx.received = process_set, request.name, tuple(received.tolist())
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        """What came from a rank goes back to it."""
        grad = grad.contiguous()
        request = request_of("alltoall", [grad], ctx.name and f"{ctx.name}.grad", splits=ctx.received)
        return None, None, Alltoall.apply(request, ctx.process_set, grad)[0]  # type: ignore[no-untyped-call]


class Reducescatter(_OfGroup):
    """This rank's rows of the reduction; the gradient is gathered."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """All ranks' rows."""
        asked: Request = ctx.request
        factor = asked.prescale * asked.postscale
        if asked.op == ReduceOp.Sum:
            factor *= ctx.process_set.size()
        scaled = tuple((grad * factor if factor != 1.0 else grad).contiguous() for grad in grads)
        request = request_of("allgather", scaled, asked.name and f"{asked.name}.grad")
        return None, None, *Allgather.apply(request, ctx.process_set, *scaled)  # type: ignore[no-untyped-call]


def with_gradient(
    function: Any, request: Request, process_set: ProcessSet, tensors: Sequence[Tensor], finish: Callable[[Any], Any]
) -> Any:
    """`function` of these tensors; `complete` alone, without autograd's work, where no gradient will be asked for."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return function.apply(request, process_set, *tensors)
    return complete(request, tensors, process_set, finish)
