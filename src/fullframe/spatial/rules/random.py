"""Random functions: a split tensor draws differently on each shard, a whole value equally on all ranks.

The default generators of a replica's ranks advance together; a shard draws from one seeded by them and its number.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.registry import Refused, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


def shard_generator(x: SpatialTensor) -> torch.Generator:
    """A generator for this shard of `x`; its seed is drawn from the default CPU generator, so recompute repeats it."""
    layout = x._layout
    part = layout.spatial.part_along([p.axis for p in layout.placements])
    seed = int(torch.randint(2**48, ()).item())
    return torch.Generator(local_of(x).device).manual_seed(seed + part)


def _kept(x: SpatialTensor, p: float) -> Tensor:
    """True where an element is kept, with probability 1 - p."""
    return torch.empty(local_of(x).shape, dtype=torch.bool, device=x.device).bernoulli_(
        1 - p, generator=shard_generator(x)
    )


@rule(F.dropout, torch.dropout, torch.dropout_)
def _dropout(func: Any, x: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    _probability(p)
    if inplace or func is torch.dropout_:
        raise Refused("in-place dropout is not split", "Use inplace=False.")
    if not training or p == 0:
        return x
    if p == 1:
        return x * 0
    return wrap(local_of(x) * _kept(x, p) * (1 / (1 - p)), x._layout)


@rule(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
def _channel_dropout(
    func: Any, x: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    _probability(p)
    layout = x._layout
    if layout.is_split(0) or layout.is_split(1):
        raise Refused("the samples or channels are split")
    if not training or p == 0:
        return x
    channels = torch.ones((*layout.shape[:2], *(1,) * (len(layout.shape) - 2)), dtype=x.dtype, device=x.device)
    mask = torch.feature_dropout(channels, p, True)  # the same on all ranks
    return x.mul_(mask) if inplace else x * mask


@rule(F.alpha_dropout, F.feature_alpha_dropout)
def _alpha_dropout(
    func: Any, x: SpatialTensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    _probability(p)
    if not training or p == 0:
        return x
    if func is F.feature_alpha_dropout or inplace:
        raise Refused("feature and in-place alpha dropout are not split", "Use alpha_dropout or dropout.")
    low = -1.7580993408473766  # what SELU tends to for very negative input
    scale = ((1 - p) * (1 + p * low**2)) ** -0.5
    local = local_of(x)
    kept = torch.where(_kept(x, p), local, torch.full((), low, dtype=local.dtype, device=local.device))
    return wrap(kept * scale - scale * p * low, x._layout)


def _probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


@rule(torch.rand_like, torch.randn_like)
def _random_like(func: Any, x: SpatialTensor, **options: Any) -> Tensor:
    out = torch.empty_like(local_of(x), **options)
    generator = shard_generator(x)
    filled = (
        out.data.uniform_(generator=generator) if func is torch.rand_like else out.data.normal_(generator=generator)
    )
    return wrap(filled.requires_grad_(bool(options.get("requires_grad"))), x._layout)


@rule(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(func: Any, x: SpatialTensor) -> Tensor:
    return wrap(torch.bernoulli(local_of(x), generator=shard_generator(x)), x._layout)


@rule(Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_)
def _filled(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    func(local_of(x), *args, **kwargs, generator=shard_generator(x))
    return x
