"""A rule that needs whole channels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@rule(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(func: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The weight is one number or one a channel; refuses a split weight."""
    if isinstance(weight, SpatialTensor) or not isinstance(x, SpatialTensor):
        raise Unsupported("the weight is split")
    if weight.numel() > 1:
        channels = x.spec.held(1)
        weight = weight.narrow(0, channels.start, len(channels))
    return wrap(func(local_of(x), weight), x.spec)
