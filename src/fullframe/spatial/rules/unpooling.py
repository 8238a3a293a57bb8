"""Max unpooling: each rank takes the pooled rows whose windows reach its own rows of the image, and puts them there."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullframe.geometry.window import TransposedWindow
from fullframe.ranks.adjoint import linear
from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.ranks.recording import recorder
from fullframe.spatial.operands import aligned, merged
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.rules.resampling import in_format
from fullframe.spatial.rules.window_plan import WindowPlan, ints, plan_windows, region
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, wrap

_UNPOOL: dict[Any, int] = {F.max_unpool1d: 1, F.max_unpool2d: 2, F.max_unpool3d: 3}


@rule(*_UNPOOL)
def _max_unpool(
    func: Any,
    input: SpatialTensor,
    indices: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Any = None,
) -> Tensor:
    """(..., h, w) put into zeros (..., H, W) at the indices of the whole image; the last of several at one place wins.

    Indices that lie in the windows of these options cost a halo; where any lies elsewhere all pooled rows are gathered.
    """
    if not input.is_floating_point():
        raise NotImplementedError(f"{func.__name__} is not implemented for {input.dtype}")
    count = _UNPOOL[func]
    kernel, padding = ints(kernel_size, count), ints(padding, count)
    stride = ints(stride, count) if stride not in (None, [], ()) else kernel
    spec = merged([input, indices])
    first = len(spec.shape) - count
    sizes = F._unpool_output_size(input, kernel, stride, padding, output_size)  # type: ignore[attr-defined]
    windows = [TransposedWindow(k, s, 1, p) for k, s, p in zip(kernel, stride, padding, strict=True)]
    plan = plan_windows(spec, range(first, first + count), windows, sizes, (*spec.shape[:first], *sizes))
    values, places = aligned(input, spec), aligned(indices, spec)
    if _all_in_reach(places, spec, plan, windows, sizes):
        values, places = region(values, plan), region(places, plan)
    else:
        axes = [cut.axis.name for cut in plan.cuts]
        values, places = gather_axes(values, spec, axes)[0], gather_axes(places, spec, axes)[0]
    held = [plan.spec.held(first + n) for n in range(count)]
    shape = (*values.shape[:first], *map(len, held))
    slots = _slots(places, held, sizes)
    back = partial(_taken, slots=slots, shape=values.shape)
    result = linear(values, partial(_put, slots=slots, shape=shape), back, partial(_added, slots=slots, shape=shape))
    return in_format(wrap(result, plan.spec), input, input.dtype)


@rule(torch._C._nn.max_unpool2d, torch._C._nn.max_unpool3d)
def _unpool_whole(func: Any, input: Tensor, indices: SpatialTensor, *args: Any) -> Tensor:
    """Whole values at split indices: the functions above look at the values alone, and call these."""
    if isinstance(input, SpatialTensor):
        raise Unsupported("it is an inner function of torch", "Call that of torch.nn.functional.")
    return func(input, indices.full(), *args)  # type: ignore[no-any-return]


def _all_in_reach(
    places: Tensor, spec: Spec, plan: WindowPlan, windows: Sequence[TransposedWindow], sizes: Sequence[int]
) -> bool:
    """Whether on all ranks every place lies in the window of its element; RuntimeError for a place outside the image.

    Tensors without values (of a simulation) count as pooled by the same windows.
    """
    simulated = isinstance(places, FakeTensor)
    if places.is_meta or (simulated and recorder() is not None):
        return True
    outside = ((places < 0) | (places >= math.prod(sizes))).any()
    far = torch.zeros_like(outside)
    first = len(spec.shape) - len(sizes)
    for cut in plan.cuts:
        window = windows[cut.dim - first]
        row = places // math.prod(sizes[cut.dim - first + 1 :]) % sizes[cut.dim - first]
        start = torch.arange(cut.own.start, cut.own.stop, device=places.device) * window.stride - window.padding
        start = start.view(-1, *(1,) * (places.dim() - cut.dim - 1))
        far = far | ((row < start) | (row >= start + window.kernel)).any()
    group = spec.group
    counts = all_sum_no_grad(torch.stack([outside, far]).long(), group)
    if simulated:
        return True
    strays, strangers = counts.tolist()
    if strays:
        volume = "x".join(map(str, sizes))
        raise RuntimeError(f"Found an invalid max index (output volumes are of size {volume})")
    return not strangers


def _slots(places: Tensor, held: Sequence[range], sizes: Sequence[int]) -> Tensor:
    """Where each element goes in this rank's part of the image, flattened; its length where it goes to another rank."""
    lead = places.shape[: places.dim() - len(sizes)]
    slots = torch.zeros_like(places)
    inside = torch.ones_like(places, dtype=torch.bool)
    step = 1
    for rows, size in reversed(list(zip(held, sizes, strict=True))):
        row = places % size - rows.start
        inside &= (row >= 0) & (row < len(rows))
        slots += row * step
        places, step = places // size, step * len(rows)
    planes = torch.arange(math.prod(lead), device=places.device).view(*lead, *(1,) * len(sizes))
    return torch.where(inside, slots + planes * step, math.prod(lead) * step)


def _put(values: Tensor, slots: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of `shape` with the values at their slots, the last one where there are several."""
    total = math.prod(shape)
    image = values.new_zeros(total + 1).scatter_(0, slots.flatten(), values.flatten())
    return torch.ops.aten._unsafe_view(image[:total], shape)  # type: ignore[no-any-return]  # no view to autograd


def _added(values: Tensor, slots: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of `shape` with the values added at their slots."""
    total = math.prod(shape)
    image = values.new_zeros(total + 1).scatter_add_(0, slots.flatten(), values.flatten())
    return torch.ops.aten._unsafe_view(image[:total], shape)  # type: ignore[no-any-return]  # no view to autograd


def _taken(image: Tensor, slots: Tensor, shape: Sequence[int]) -> Tensor:
    """What lies at the slots, zero for those of other ranks; each of several at one slot gets it, as in torch."""
    total = image.numel()
    if not total:
        return image.new_zeros(tuple(shape))
    taken = image.flatten()[slots.clamp(max=total - 1)]
    return torch.where(slots < total, taken, 0).view(tuple(shape))
