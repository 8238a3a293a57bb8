"""Fake quantization, as training for int8 does it: each rank rounds its part by numbers that all ranks have alike."""

from typing import Any

import torch
from torch import Tensor

from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@rule(torch.fake_quantize_per_tensor_affine, torch._fake_quantize_learnable_per_tensor_affine)
def _by_one_scale(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """One scale and one zero point, numbers or whole tensors, which may be learned."""
    if not isinstance(x, SpatialTensor):
        raise Unsupported("the scale is split")
    return wrap(func(local_of(x), *args, **kwargs), x.spec.elementwise)


@rule(torch.fake_quantize_per_channel_affine, torch._fake_quantize_learnable_per_channel_affine)
def _by_channel(
    func: Any, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, *args: Any, **kwargs: Any
) -> Tensor:
    """A scale and a zero point for each row of `axis`, as whole vectors, of which each rank takes its rows'."""
    if not isinstance(x, SpatialTensor) or isinstance(scale, SpatialTensor) or isinstance(zero_point, SpatialTensor):
        raise Unsupported("the scales are split")
    held = x.spec.held(axis)
    own = [vector.narrow(0, held.start, len(held)) for vector in (scale, zero_point)]
    return wrap(func(local_of(x), *own, axis, *args, **kwargs), x.spec.elementwise)


@rule(torch.fused_moving_avg_obs_fake_quant)
def _observed(
    func: Any,
    x: Tensor,
    observer_on: Tensor,
    fake_quant_on: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> Tensor:
    """The observer sees the whole tensor's smallest and largest values in its place, then each rank rounds its part.

    Refuses scales of the rows of a split dim.
    """
    if not isinstance(x, SpatialTensor) or (per_row_fake_quant and x.spec.is_split(ch_axis)):
        raise Unsupported("the scales are split")
    kept = running_min, running_max, scale, zero_point, averaging_const, quant_min, quant_max
    rest = *kept, ch_axis, per_row_fake_quant, symmetric_quant
    with torch.no_grad():
        others = range(1 if per_row_fake_quant else 0, x.dim())  # torch has rows of dim 0 alone
        ends = torch.stack([extreme(x, tuple(others)) for extreme in (torch.amin, torch.amax)], -1)
        func(ends, observer_on, fake_quant_on, *rest)
    return wrap(func(local_of(x), torch.zeros_like(observer_on), fake_quant_on, *rest), x.spec.elementwise)
