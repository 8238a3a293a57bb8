"""The memory format of a tensor, as torch's kernels see it."""

import torch
from torch import Tensor


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """The memory format that torch's kernels give to a result of `tensor`, by its strides; also of a cut-out view."""
    if tensor.dim() in (4, 5) and _channels_last(tensor):
        return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.contiguous_format


def _channels_last(tensor: Tensor) -> bool:
    """Whether strides grow from channels over the image to samples; False where both formats have these strides."""
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 0 or (dim == 1 and stride == 0) or (dim == 0 and least == tensor.stride(1)):
            return False
        if stride < least:
            return bool(dim == 0 and size == 1)  # the stride of a single sample says nothing
        least = stride * size
    return True
