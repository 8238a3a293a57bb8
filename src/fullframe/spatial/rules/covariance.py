"""Covariances and correlations of variables whose observations, or which themselves, are split."""

from typing import Any

import torch
from torch import Tensor

from fullframe.spatial.operands import has_values
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.rules.transposing import moved_from
from fullframe.spatial.tensor import SpatialTensor


@rule(torch.cov, Tensor.cov)
def _cov(
    func: Any, x: Any, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """(variables, observations) or (observations,), by torch's formula; sums over ranks, as small as the result."""
    x = x.reshape(1, -1) if x.dim() < 2 else x
    for weights in (fweights, aweights):
        lowest = torch.zeros(()) if weights is None or not weights.numel() else weights.min()
        if has_values(lowest) and lowest < 0:
            raise RuntimeError("cov: weights cannot be negative")
    if isinstance(x, SpatialTensor) and x.spec.is_split(0):
        x = moved_from(x, 0)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total: Any = x.shape[1] if weights is None else weights.sum()
    mean = (x if weights is None else x * weights).sum(1, keepdim=True) / total
    factor = total - correction
    if weights is not None and aweights is not None and correction:
        factor = total - correction * (weights * aweights).sum() / total
    factor = torch.as_tensor(factor).clamp_min(0)
    apart = x - mean
    products = (apart if weights is None else apart * weights) @ apart.mH
    covariance: Tensor = (products / factor).squeeze()
    return covariance


@rule(torch.corrcoef, Tensor.corrcoef)
def _corrcoef(func: Any, x: SpatialTensor) -> Tensor:
    """Covariances over the roots of the variances, clipped to what correlations can be."""
    covariance = torch.cov(x)
    if covariance.dim() == 0:
        return covariance / covariance
    roots = covariance.diagonal().real.sqrt() if x.is_complex() else covariance.diagonal().sqrt()
    found = covariance / roots[:, None] / roots
    return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1)) if x.is_complex() else found.clip(-1, 1)
