"""Autocast, for rules that call kernels past the functions that autocast looks at."""

from typing import Any

import torch
from torch import Tensor


def autocast_inputs(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The inputs of a convolution or of attention, cast as autocast casts them, which does not look into a Function."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float32, torch.bfloat16, torch.float16)  # autocast leaves float64 alone
    return tuple(t.to(dtype) if t is not None and t.dtype in narrow else t for t in tensors)
