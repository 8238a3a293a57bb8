"""Fractional max pooling: its windows differ from channel to channel, so each rank has some planes whole meanwhile."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.operands import aligned
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.rules.transposing import with_whole
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

_DIMS = {F.fractional_max_pool2d: 2, F.fractional_max_pool2d_with_indices: 2}
_DIMS |= {F.fractional_max_pool3d: 3, F.fractional_max_pool3d_with_indices: 3}
_INDEXED = (F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices)


@rule(*_DIMS)
def _fractional_max_pool(
    func: Any,
    input: Any,
    kernel_size: Any,
    output_size: Any = None,
    output_ratio: Any = None,
    return_indices: bool = False,
    _random_samples: Tensor | None = None,
) -> Any:
    """(N, C, ...) or (C, ...), with one process's draws; the split moves to samples or channels and back."""
    if isinstance(_random_samples, SpatialTensor):
        _random_samples = _random_samples.full()
    if not isinstance(input, SpatialTensor):
        return func(input, kernel_size, output_size, output_ratio, return_indices, _random_samples)
    planes = tuple(range(input.dim() - _DIMS[func], input.dim()))
    if input.dim() == len(planes) + 1:  # no batch dim
        found = func(input[None], kernel_size, output_size, output_ratio, return_indices, _random_samples)
        return tuple(t.squeeze(0) for t in found) if func in _INDEXED else found.squeeze(0)
    for dim in planes:
        input.spec.of(dim)  # a merged dim makes the rule run again: before anything is drawn
    if _random_samples is None:
        shape = (*input.shape[:2], len(planes))
        _random_samples = torch.rand(shape, dtype=input.dtype, device=input.device)
    pool, draws = _INDEXED[len(planes) - 2], _random_samples

    def part(number: int) -> Tensor:
        def of_planes(x: Tensor) -> Tensor:
            if not isinstance(x, SpatialTensor):
                return pool(x, kernel_size, output_size, output_ratio, True, draws)[number]
            mine = aligned(draws, x.spec.with_(draws.shape, x.spec.placements))
            found = pool(local_of(x), kernel_size, output_size, output_ratio, True, mine)[number]
            return wrap(found, x.spec.with_((*x.shape[:2], *found.shape[2:]), x.spec.placements))

        return with_whole(input, planes, of_planes)

    return (part(0), part(1)) if func in _INDEXED else part(0)
