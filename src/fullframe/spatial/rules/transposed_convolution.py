"""Transposed convolutions: an exchange of input rows forward, of the gradient's rows backward.

    input rows, own and borrowed -> convolved -> trimmed to this rank's output rows
    gradient rows that the own input rows added to, own and borrowed -> gradients of the own input rows and the weight

Backward, so, each rank meets its own input rows alone, and each of them with all the rows that it added to: nothing is
multiplied with the zeros of a trimmed row, which would make NaN of an infinity.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.window import TransposedWindow, Window
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import kept_with_mesh
from fullframe.spatial.halo import Cut
from fullframe.spatial.rules.autocast import autocast_inputs
from fullframe.spatial.rules.narrow_bf16 import called, convolution, convolution_backward
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.rules.window_plan import WindowPlan, ints, plan_windows, region
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, whole, wrap

Ints = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Plan:
    """A transposed convolution on this rank. The paddings are torch's for whole dims."""

    forward: WindowPlan  # from input rows to output rows
    backward: WindowPlan  # from the gradient's rows to input rows
    stride: Ints
    padding: Ints  # 0 for split dims
    extra: Ints  # output padding, forward
    dilation: Ints
    groups: int
    trims: tuple[tuple[int, int, int], ...]  # (dim, first row, rows) of this rank's output in what is made

    @property
    def alone(self) -> bool:
        """Whether every rank's input rows make its own output rows and no others."""
        return all(cut.wanted == cut.extents.ranges for cut in (*self.forward.cuts, *self.backward.cuts))

    def trimmed(self, made: Tensor) -> Tensor:
        """This rank's rows of what was `made` from the rows it reads: no view, which could not be written to."""
        kept = memory_format_of(made)
        for dim, first, rows in self.trims:
            if rows != made.shape[dim]:
                made = made.narrow(dim, first, rows)
        made = made.contiguous(memory_format=kept)
        return made if made._base is None else made.clone(memory_format=kept)


@kept_with_mesh(maxsize=1024)
def _plan(spec: Spec, weight: Ints, stride: Ints, padding: Ints, extra: Ints, dilation: Ints, groups: int) -> _Plan:
    count = len(stride)
    dims = range(len(spec.shape) - count, len(spec.shape))
    spec.require_whole("the channels are split", dims[0] - 1)
    options = list(zip(weight[2:], stride, dilation, padding, strict=True))
    windows = [TransposedWindow(*option) for option in options]
    sizes = [w.output_size(spec.shape[dim], more) for w, dim, more in zip(windows, dims, extra, strict=True)]
    forward = plan_windows(spec, dims, windows, sizes, (*spec.shape[: dims[0] - 1], weight[1] * groups, *sizes))
    inner, behind, trims, cuts, needs = list(padding), list(extra), [], [], []
    for cut, need, out in zip(forward.cuts, forward.needs, forward.outs, strict=True):
        at = cut.dim - dims[0]
        window = Window(*options[at])
        first = out.start + window.padding - need.start * window.stride
        made = (len(need) - 1) * window.stride + window.span
        inner[at], behind[at] = 0, max(0, first + len(out) - made)
        trims.append((cut.dim, first, len(out)))
        placement = forward.spec.of(cut.dim)
        assert placement is not None
        wanted = tuple(placement.extents.clipped(window.reads(rows)) for rows in cut.extents.ranges)
        cuts.append(Cut(cut.dim, placement.extents, wanted, cut.axis))
        needs.append(window.reads(cut.own))
    backward = WindowPlan(tuple(cuts), tuple(needs), tuple(cut.own for cut in forward.cuts), spec)
    return _Plan(forward, backward, stride, tuple(inner), tuple(behind), dilation, groups, tuple(trims))


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _transposed_convolution(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Ints = 1,
    padding: int | Ints = 0,
    output_padding: int | Ints = 0,
    groups: int = 1,
    dilation: int | Ints = 1,
) -> Tensor:
    """Transposed convolution of an input split along spatial dims; refuses split channels and a split weight."""
    if not isinstance(input, SpatialTensor) or isinstance(weight, SpatialTensor):
        raise Unsupported("the weight is split, not the input")
    if type(bias) is SpatialTensor:  # made of an image
        return func(input, weight, whole(bias), stride, padding, output_padding, groups, dilation)  # type: ignore[no-any-return]
    count = weight.dim() - 2
    if len(input.spec.shape) == count + 1:  # no batch dim
        batch = func(input.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation)
        return batch.squeeze(0)  # type: ignore[no-any-return]
    stride, padding, dilation = ints(stride, count), ints(padding, count), ints(dilation, count)
    extra = ints(output_padding, count)
    plan = _plan(input.spec, tuple(weight.shape), stride, padding, extra, dilation, groups)
    local = local_of(input)
    if plan.alone or local.is_complex():  # for which aten::convolution has no kernel
        joined = region(local, plan.forward)
        options = {"stride": stride, "padding": plan.padding, "output_padding": plan.extra}
        out = plan.trimmed(called(func, joined, weight, bias, **options, groups=groups, dilation=dilation))
    else:
        local, weight, bias = autocast_inputs(local, weight, bias)
        out = _HaloTransposedConvolution.apply(local, weight, bias, plan)  # type: ignore[no-untyped-call]
    return wrap(out, plan.forward.spec)


class _HaloTransposedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        ctx.save_for_backward(local, weight)
        ctx.plan = plan
        joined = region(local, plan.forward)
        settings = plan.stride, plan.padding, plan.dilation, True, plan.extra, plan.groups
        return plan.trimmed(convolution(joined, weight, bias, *settings))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        local, weight = ctx.saved_tensors
        plan: _Plan = ctx.plan
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        cut = {cut.dim for cut in plan.backward.cuts}
        first = local.dim() - len(plan.extra)
        extra = [0 if first + n in cut else more for n, more in enumerate(plan.extra)]
        settings = plan.stride, plan.padding, plan.dilation, True, extra, plan.groups, [of_input, of_weight, False]
        input_gradient = weight_gradient = None
        if of_input or of_weight:
            seen = region(gradient, plan.backward)
            input_gradient, weight_gradient, _ = convolution_backward(seen, local, weight, None, *settings)
        summed = gradient.sum([dim for dim in range(gradient.dim()) if dim != first - 1]) if of_bias else None
        return input_gradient, weight_gradient, summed, None
