"""Batch and instance norm over ranks by the kernels that a GPU has for it, `nn.SyncBatchNorm`'s; none on a CPU.

They read 16-bit and channels_last maps as they are. Never run on a GPU so far: the tests run them on kernels written in
plain torch after the CUDA source, and what is asked of each is what torch's own `SyncBatchNorm` asks.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fullframe.ranks.adjoint import applied
from fullframe.ranks.collectives import all_gather_no_grad
from fullframe.ranks.constants import constant
from fullframe.ranks.memory_format import memory_format_of
from fullframe.spatial.rules.channel_statistics import Holders, differentiable_norm, gradient_of_sums
from fullframe.spatial.rules.reduction import wide
from fullframe.spatial.second_derivative import gradients_of


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels are there."""
    key = str(torch._C._dispatch_key_for_device(device.type))
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::batch_norm_stats", key)


def normalized_by_kernels(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor | None, Tensor | None],
    over: Holders,
    momentum: float,
    eps: float,
) -> Tensor:
    """Of x (N, C, ...) normalized over all dims but 1 and the ranks `over`; `running` (mean, var) are updated."""
    kind = wide(x.dtype)
    # The kernels take weights of the dtype of x, or of the one that they compute in.
    weight, bias = (t if t is None or t.dtype == x.dtype else t.to(kind) for t in (weight, bias))
    # Without gaps from here on: what is saved must be an input, for the second derivative.
    x = x.contiguous(memory_format=memory_format_of(x))
    return _normalize(x, weight, bias, *running, over, momentum, eps)  # type: ignore[no-any-return]


class _Normalize(torch.autograd.Function):
    """It keeps the input and two numbers a channel for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, over: Holders, momentum: float, eps: float
    ) -> Tensor:  # fmt: skip
        if x.numel():
            found = list(torch.batch_norm_stats(x, eps))
        else:  # a mask has picked nothing here
            kind = wide(x.dtype)
            found = [x.new_zeros(x.shape[1], dtype=kind), x.new_ones(x.shape[1], dtype=kind)]
        if over.elements is None:
            found.append(found[0].new_full((1,), over.counted_of(x)))
        everyone = all_gather_no_grad(torch.cat(found), over.group, at=over.line())
        if over.elements is None:  # the kernel divides by what it has counted so far, first by one rank's
            everyone = everyone[everyone[:, -1].argsort(descending=True, stable=True)]
        means, inverses, *last = everyone.split(x.shape[1], 1)
        if over.elements is None:
            counts, whole = last[0].flatten(), last[0].flatten().to(torch.int32)
        else:
            counts, whole = (constant(over.elements, kind, x.device) for kind in (means.dtype, torch.int32))
            if 0 in over.elements:  # the kernel would divide by it
                rows = constant(tuple(n for n, own in enumerate(over.elements) if own), torch.int64, x.device)
                means, inverses, counts = means[rows], inverses[rows], counts[rows]
        # It counts in the dtype of the running statistics, else of its first argument; 16 bit would round the counts.
        wide_mean, wide_var = (None if t is None else t.to(means.dtype) for t in (running_mean, running_var))
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            means, means, inverses, wide_mean, wide_var, momentum, eps, counts
        )
        for t, new in ((running_mean, wide_mean), (running_var, wide_var)):
            if t is not None and new is not None and t is not new:
                t.copy_(new)
        ctx.save_for_backward(x, weight, mean, inverse, whole)
        ctx.over, ctx.eps = over, eps
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps) if x.numel() else torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse, counts = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph
            again = partial(differentiable_norm, elements=counts.sum(), apart=False, m=1, eps=ctx.eps, over=ctx.over)
            whole = torch.ones_like(mean, requires_grad=True) if weight is None else weight
            bias = torch.zeros_like(mean, requires_grad=True)
            return *gradients_of(again, [x, whole, bias], grad, needs[:3]), *(None,) * 5
        grad = grad.contiguous(memory_format=memory_format_of(x))
        if x.numel():
            by_mean, by_var, of_weight, of_bias = torch.batch_norm_backward_reduce(
                grad, x, mean, inverse, weight, True, *needs[1:3]
            )
        else:
            by_mean, by_var = torch.zeros_like(mean), torch.zeros_like(mean)
            of_weight, of_bias = (torch.zeros_like(mean if weight is None else weight) for _ in range(2))
        sums = gradient_of_sums(torch.cat((by_mean, by_var)), ctx.over)
        by_mean, by_var = sums.view(2, -1)
        weight = None if weight is None else weight.to(mean.dtype)
        if x.numel():
            grad = torch.batch_norm_backward_elemt(grad, x, mean, inverse, weight, by_mean, by_var, counts)
        return grad, of_weight if needs[1] else None, of_bias if needs[2] else None, *(None,) * 5


_normalize = applied(_Normalize)
