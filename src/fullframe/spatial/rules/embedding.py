"""Tables that are looked up by split indices: each rank looks up its own, nothing is sent."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@rule(F.one_hot)
def _one_hot(func: Any, x: SpatialTensor, num_classes: int = -1) -> Tensor:
    """Of as many classes as there are in the whole tensor, where their number is not given."""
    spec = x.spec
    if num_classes == -1:
        num_classes = int(torch.amax(x)) + 1
    return wrap(func(local_of(x), num_classes), spec.with_((*spec.shape, num_classes), spec.placements))


@rule(F.embedding)
def _embedding(
    func: Any,
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """A row of the whole table (classes, C) for each index of a split tensor; refuses a split table."""
    if isinstance(weight, SpatialTensor) or not isinstance(x, SpatialTensor):
        raise Unsupported("the table is split")
    spec, local = x.spec, local_of(x)
    everywhere = x.full() if max_norm is not None or scale_grad_by_freq else local
    if max_norm is not None:  # every rank shortens all rows that are used
        torch.embedding_renorm_(weight.detach(), everywhere, max_norm, norm_type)
    found = func(local, weight, padding_idx, sparse=sparse)
    if scale_grad_by_freq and found.requires_grad:
        uses = torch.bincount(everywhere.flatten(), minlength=weight.shape[0])[local].unsqueeze(-1)
        found.register_hook(lambda gradient: gradient / uses)
    return wrap(found, spec.with_((*spec.shape, weight.shape[1]), spec.placements))
