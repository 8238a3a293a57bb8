"""Convolutions: the local part is convolved as it is, and only the few rows that see a neighbour's are done again.

So a rank does its share of the arithmetic with the kernel's own zero padding, and the exchange runs meanwhile. A small
map is joined with the borrowed rows first, which takes fewer calls. Backward keeps the local input and the borrowed
strips, never a joined copy.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from fullframe.geometry.extents import overlap
from fullframe.geometry.window import Window
from fullframe.ranks.adjoint import applied, unrecorded
from fullframe.ranks.mesh import kept_with_mesh
from fullframe.spatial.approved import tells
from fullframe.spatial.gradients import enters
from fullframe.spatial.halo import Halo, Ranges, borrow, joined_again, part_of, put_together
from fullframe.spatial.rules.autocast import autocast_inputs
from fullframe.spatial.rules.narrow_bf16 import called, convolution, convolution_backward
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.rules.transposing import moved_from
from fullframe.spatial.rules.window_plan import (
    WindowPlan,
    embedded,
    ints,
    padded,
    plan_windows,
    region,
    region_gradient,
)
from fullframe.spatial.second_derivative import gradients_of
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, whole, wrap

Ints = tuple[int, ...]
# A map of at most so many bytes is joined with what it borrows: one more pass over it takes less time than the calls
# that it saves, each a launch on a GPU. So is one of at most so many times its weight's bytes, as a call, even for one
# row, lays out the whole weight anew. Where the first is 0, no map with elements is joined.
JOINED_BYTES = defaultdict(lambda: 16 << 20, cpu=768 << 10)
_JOINED_WEIGHTS = 4
Border = tuple[Ranges, Ranges]  # output rows that see a strip, and the input rows they read


def joined_bytes(local: Tensor) -> int:
    """Up to so many bytes a map on the device of `local` is joined with what it borrows."""
    return JOINED_BYTES["cpu" if local.is_cpu else local.device.type]  # a device's name takes long to ask for


@dataclass(frozen=True, eq=False)
class _Plan:
    """A convolution on this rank. `padding` is torch's for whole dims and 0 for split ones."""

    window: WindowPlan
    windows: tuple[Window, ...]  # one a cut
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int
    lead: Ints | None  # padding with which the local part alone gives all output rows; None where there is none
    skips: tuple[tuple[int, int], ...]  # (dim, rows at its start) that no output row reads
    borders: tuple[Border, ...]  # done again with the strips; none when `lead` is None

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints) -> Tensor:
        none = (0,) * len(padding)
        found: Tensor = convolution(x, weight, bias, self.stride, padding, self.dilation, False, none, self.groups)
        # lines are convolved as images: what a function of ours returns may be written to if it is no view
        return found if len(padding) > 1 else torch.ops.aten._unsafe_view(found, found.shape)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, padding: Ints, mask: list[bool]) -> list[Any]:
        """(input, weight, bias) gradients of `convolve`, None where `mask` is False."""
        if not x.numel():  # rows that see padding alone, which torch's kernel does not take
            made = torch.zeros_like(x), torch.zeros_like(weight), grad.sum([d for d in range(grad.dim()) if d != 1])
            return [gradient if wanted else None for gradient, wanted in zip(made, mask, strict=True)]
        none = (0,) * len(padding)
        bias_sizes = [weight.shape[0]]
        return list(
            convolution_backward(
                grad, x, weight, bias_sizes, self.stride, padding, self.dilation, False, none, self.groups, mask
            )
        )

    def is_joined(self, local: Tensor, weight: Tensor) -> bool:
        """Whether one convolution of own and borrowed rows joined is cheaper than one of each."""
        limit, size = joined_bytes(local), local.nbytes
        return self.lead is None or size <= limit or 0 < size <= _JOINED_WEIGHTS * weight.nbytes * bool(limit)

    def kernel_part(self, weight: Tensor, taps: list[range]) -> Tensor:
        """The view of the kernel rows `taps`, one range a cut."""
        for cut, rows in zip(self.window.cuts, taps, strict=True):
            dim = cut.dim - len(self.window.spec.shape) + weight.dim()
            if len(rows) != weight.shape[dim]:
                weight = weight.narrow(dim, rows.start, len(rows))
        return weight

    def unskipped(self, local: Tensor) -> Tensor:
        """`local` without the rows that no output row reads."""
        for dim, rows in self.skips:
            local = local.narrow(dim, rows, local.shape[dim] - rows)
        return local


@kept_with_mesh(maxsize=4096)
def _plan(spec: Spec, weight: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> _Plan | None:
    """None where the channels are split."""
    count = len(stride)
    dims = range(len(spec.shape) - count, len(spec.shape))
    if spec.is_split(dims[0] - 1):
        return None
    windows = [Window(k, s, d, p) for k, s, d, p in zip(weight[2:], stride, dilation, padding, strict=True)]
    sizes = [w.output_size(spec.shape[dim]) for w, dim in zip(windows, dims, strict=True)]
    shape = (*spec.shape[: dims[0] - 1], weight[0], *sizes)
    plan = plan_windows(spec, dims, windows, sizes, shape)
    split = {cut.dim for cut in plan.cuts}
    inner = tuple(0 if dim in split else p for dim, p in zip(dims, padding, strict=True))
    cut_windows = tuple(window for dim, window in zip(dims, windows, strict=True) if dim in split)
    lead, skips = _lead(plan, cut_windows, dims, inner)
    borders = _borders(plan, cut_windows) if lead is not None else None
    if borders is None:
        lead, borders = None, ()
    return _Plan(plan, cut_windows, stride, inner, dilation, groups, lead, skips, borders)


def _lead(
    plan: WindowPlan, windows: tuple[Window, ...], dims: range, inner: Ints
) -> tuple[Ints | None, tuple[tuple[int, int], ...]]:
    """The symmetric padding with which the local rows give exactly this rank's output rows, and the rows to skip."""
    lead, skips = list(inner), []
    for cut, window, need, out in zip(plan.cuts, windows, plan.needs, plan.outs, strict=True):
        skip = max(0, need.start - cut.own.start)
        pad = max(0, cut.own.start - need.start)
        rows = len(cut.own) - skip
        if rows <= 0 or rows + 2 * pad < window.span or (rows + 2 * pad - window.span) // window.stride + 1 != len(out):
            return None, ()
        lead[cut.dim - dims[0]] = pad
        if skip:
            skips.append((cut.dim, skip))
    return tuple(lead), tuple(skips)


def _borders(plan: WindowPlan, windows: tuple[Window, ...]) -> tuple[Border, ...] | None:
    """Output rows that read a borrowed row; None when they are so many that one joined convolution is cheaper."""
    borders: list[Border] = []
    for number, (cut, window, out) in enumerate(zip(plan.cuts, windows, plan.outs, strict=True)):
        here = []
        if cut.rows.start < cut.own.start:
            here.append(overlap(out, window.touched_by(range(cut.rows.start, cut.own.start))))
        if cut.rows.stop > cut.own.stop:
            here.append(overlap(out, window.touched_by(range(cut.own.stop, cut.rows.stop))))
        here = [rows for rows in here if rows]  # a stride may pass over what lies between
        if sum(map(len, here)) * 2 > len(out):
            return None
        for rows in here:
            outs = (*plan.outs[:number], rows, *plan.outs[number + 1 :])
            borders.append((outs, tuple(w.reads(rows) for w, rows in zip(windows, outs, strict=True))))
    return tuple(borders)


@tells(F.conv1d, F.conv2d, F.conv3d)
def _told(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """A call as torch's convolutions make it, whose result lies as the weight's strides have it."""
    if kwargs or len(args) != 7:
        return None
    _, weight, bias, stride, padding, dilation, groups = args
    if type(weight) is not Parameter or list in (type(stride), type(padding), type(dilation)):
        return None
    of_bias = None
    if bias is not None:
        if type(bias) is not Parameter or (bias.requires_grad and enters(bias)):
            return None
        of_bias = bias.shape, bias.dtype, bias.requires_grad
    trains = weight.requires_grad
    if trains and enters(weight):
        return None
    return weight.shape, weight.stride(), weight.dtype, trains, of_bias, stride, padding, dilation, groups


@rule(F.conv1d, F.conv2d, F.conv3d)
def _convolution(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Ints = 1,
    padding: int | str | Ints = 0,
    dilation: int | Ints = 1,
    groups: int = 1,
) -> Tensor:
    """(N, C, ...) by a weight (K, C / groups, ...), which is made whole, as are channels; refuses a whole input."""
    if type(input) is not SpatialTensor:
        raise Unsupported("the weight is split, not the input")
    if type(weight) is SpatialTensor or type(bias) is SpatialTensor:  # a kernel that was made of an image
        return func(input, whole(weight), whole(bias), stride, padding, dilation, groups)  # type: ignore[no-any-return]
    asked: tuple[Any, ...] = (weight.shape, stride, padding, dilation, groups)
    try:
        plan = input.spec.plans.get(asked)
    except TypeError:  # a list among them
        asked = tuple(tuple(each) if type(each) is list else each for each in asked)
        plan = input.spec.plans.get(asked)
    if plan is None:
        count = len(weight.shape) - 2
        if len(input.spec.shape) == count + 1:  # no batch dim
            batch = func(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups)
            return batch.squeeze(0)  # type: ignore[no-any-return]
        stride, dilation = ints(stride, count), ints(dilation, count)
        if isinstance(padding, str):
            total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:], strict=True)]
            padding = tuple(t // 2 for t in total)
            if any(t % 2 for t in total):  # torch pads the odd row behind
                padded = F.pad(input, [after for t in reversed(total) for after in (0, t % 2)])
                return func(padded, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        plan = _plan(input.spec, tuple(weight.shape), stride, ints(padding, count), dilation, groups)
        if plan is None:
            return func(moved_from(input, -count - 1), weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        input.spec.plans[asked] = plan
    local, window = local_of(input), plan.window
    if not window.borrows and plan.lead is not None:
        own = plan.unskipped(local) if plan.skips else local
        options = {"stride": plan.stride, "padding": plan.lead, "dilation": plan.dilation, "groups": groups}
        out = called(func, own, weight, bias, **options)
    elif local.is_complex():  # for which aten::convolution has no kernel
        out = func(region(local, window), weight, bias, stride, plan.padding, dilation, groups)
    else:
        local, weight, bias = autocast_inputs(local, weight, bias)
        out = _halo_convolution(local, weight, bias, plan)
    return wrap(out, window.spec)


class _HaloConvolution(torch.autograd.Function):
    """A convolution that borrows rows; it keeps the local input, the strips and the weight for backward."""

    @staticmethod
    @unrecorded
    def forward(ctx: Any, local: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        cuts, ctx.plan = plan.window.cuts, plan
        if plan.is_joined(local, weight) or _results_are_kept():
            joined, strips = borrow(local, cuts, plan.window.outside[-1])
            ctx.save_for_backward(weight, local, *strips)
            return plan.convolve(padded(joined, plan.window, last=False), weight, bias, plan.padding)
        assert plan.lead is not None
        halo = Halo(local, cuts)
        out = plan.convolve(plan.unskipped(local), weight, bias, plan.lead)  # the exchange runs meanwhile
        halo.wait([out])
        for outs, reads in plan.borders:
            border = plan.convolve(halo.region(reads), weight, bias, plan.padding)
            part_of(out, plan.window.outs, outs, cuts).copy_(border)
        ctx.save_for_backward(weight, *(piece.tensor for piece in halo.pieces))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        weight, local, *strips = ctx.saved_tensors
        plan: _Plan = ctx.plan
        mask = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # create_graph
            return *_differentiable_backward(plan, local, grad, weight, mask), None
        return *_gradients(plan, [local, *strips], grad, weight, mask), None


_halo_convolution = applied(_HaloConvolution)


def _results_are_kept() -> bool:
    """Whether a selective checkpoint may keep the kernel's result, which then must not be written to."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    return any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack())


@unrecorded
def _gradients(plan: _Plan, held: list[Tensor], grad: Tensor, weight: Tensor, mask: list[bool]) -> list[Any]:
    """Of (input, weight, bias), from that of the result; `held` are the local input and the strips."""
    local, *strips = held
    if not plan.is_joined(local, weight):
        return _strips_first_backward(plan, Halo.of(held, plan.window.cuts), grad, weight, mask)
    joined = joined_again(local, plan.window.cuts, strips, plan.window.outside[-1])
    gradients = plan.gradients(grad, padded(joined, plan.window, last=False), weight, plan.padding, mask)
    if mask[0]:
        gradients[0] = region_gradient(gradients[0], plan.window)
    return gradients


def _differentiable_backward(plan: _Plan, local: Tensor, grad: Tensor, weight: Tensor, mask: list[bool]) -> list[Any]:
    """Gradients that can be differentiated again: those of one convolution of own and borrowed rows joined."""

    def joined(local: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return plan.convolve(region(local, plan.window), weight, bias, plan.padding)

    bias = weight.new_zeros(weight.shape[0], requires_grad=True)
    return gradients_of(joined, [local, weight, bias], grad, mask)


def _strips_first_backward(plan: _Plan, halo: Halo, grad: Tensor, weight: Tensor, mask: list[bool]) -> list[Any]:
    """A convolution is linear in its input: the strips' share first, on its way home while the local share is done.

    A 3-row kernel; this rank owns rows 4 to 7, wants rows 3 and 8 (s) too and makes outputs 4 to 7:

        input      3s [4  5  6  7] 8s
        outputs       [4  5  6  7]
        1. strip 3s is seen by output 4 alone, through kernel row 0: its gradient is that grad row by that kernel row;
           strip 8s is seen by output 7 alone, through kernel row 2
        2. both are sent home, and meanwhile rows 4 to 7 are done by one call with the kernel's own zero padding
        3. the kernel's gradient is that of the call plus, in rows 0 and 2, those of the strips
        4. what other ranks send home is added to rows 4 and 7
    """
    local, *strips = halo.pieces
    cuts, outs, windows = plan.window.cuts, plan.window.outs, plan.windows
    thin = [mask[0], mask[1], False]
    strip_gradients, weight_gradients = [], []
    for strip in strips:
        touched = tuple(
            overlap(window.touched_by(rows), out) for window, rows, out in zip(windows, strip.ranges, outs, strict=True)
        )
        if not all(touched) or not any(thin):
            strip_gradients.append(torch.zeros_like(strip.tensor))
            continue
        # Only some kernel rows reach from these outputs into the strip: the rest of the kernel is left out.
        taps = [w.taps(rows, out) for w, rows, out in zip(windows, strip.ranges, touched, strict=True)]
        reads = tuple(w.cropped(t).reads(out) for w, t, out in zip(windows, taps, touched, strict=True))
        block = put_together([strip], cuts, reads, halo.shape(reads))
        seen = part_of(grad, outs, touched, cuts)
        of_block, of_weight, _ = plan.gradients(seen, block, plan.kernel_part(weight, taps), plan.padding, thin)
        weight_gradients.append((taps, of_weight))
        strip_gradients.append(embedded(of_block, reads, strip.ranges, cuts) if mask[0] else strip.tensor)
    flight = halo.start_return([local.tensor, *strip_gradients]) if mask[0] else None
    assert plan.lead is not None
    gradients = plan.gradients(grad, plan.unskipped(local.tensor), weight, plan.lead, mask)
    if mask[1]:
        for taps, of_weight in weight_gradients:
            plan.kernel_part(gradients[1], taps).add_(of_weight)
    if flight is not None:
        for dim, rows in plan.skips:
            behind = grad.dim() - dim - 1
            gradients[0] = F.pad(gradients[0], (0, 0) * behind + (rows, 0))
        gradients[0] = flight.add_to(gradients[0])
    return gradients
