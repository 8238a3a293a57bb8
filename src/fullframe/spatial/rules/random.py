"""Random functions: a split tensor draws differently on each shard, a whole value equally on all ranks.

The default generators of a replica's ranks advance together; a shard draws from one seeded by them and its number.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fullframe.spatial.operands import aligned
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


def shard_generator(x: SpatialTensor, generator: torch.Generator | None = None) -> torch.Generator:
    """A generator for this shard of `x`, seeded by a draw from `generator`, which is in the same state on all ranks.

    That is the default CPU generator where none is given, so recompute repeats it.
    """
    spec = x.spec
    part = spec.spatial.coordinate_along([p.axis for p in spec.placements])
    return torch.Generator(local_of(x).device).manual_seed(spec.spatial.draw_seed(generator) + part)


def _kept(x: SpatialTensor, p: float) -> Tensor:
    """True where an element is kept, with probability 1 - p."""
    return torch.empty(local_of(x).shape, dtype=torch.bool, device=x.device).bernoulli_(
        1 - p, generator=shard_generator(x)
    )


def _kept_channels(x: SpatialTensor, p: float, batched: bool) -> Tensor:
    """The same for whole channels, drawn alike on all ranks: (N, C, 1, ...), or (C, 1, ...) without a batch."""
    leading = 2 if batched else 1
    x.spec.require_whole("the samples or channels are split", *range(leading))
    shape = (*x.shape[:leading], *(1,) * (x.dim() - leading))
    return torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p)


@rule(F.dropout, torch.dropout, torch.dropout_)
@rule(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_)
@rule(F.alpha_dropout, F.feature_alpha_dropout)
def _dropout(func: Any, x: SpatialTensor, p: float, training: bool, inplace: bool = False) -> Tensor:
    """Elements dropped, drawn differently on each part, or whole channels, alike on all ranks.

    Refuses split samples or channels where channels are dropped.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return x
    alpha, local = func in (F.alpha_dropout, F.feature_alpha_dropout), local_of(x)
    if func in (F.dropout, torch.dropout, torch.dropout_, F.alpha_dropout):
        kept = _kept(x, p)
    else:  # dropout2d takes (N, C, L) for what has 3 dims
        kept = _kept_channels(x, p, batched=x.dim() != {F.dropout1d: 2, F.dropout3d: 4}.get(func))
    if alpha:  # SELU's mean and variance are kept
        kept, low = kept.to(local.dtype), -1.7580993408473766  # what SELU tends to for very negative input
        scale = ((1 - p) * (1 + p * low**2)) ** -0.5 if p < 1 else 0.0
        local = local * (kept * scale) + ((1 - kept) * (scale * low) - scale * p * low)
    else:
        local = local * kept * (1 / (1 - p) if p < 1 else 0)
    result = wrap(local, x.spec)
    return x.copy_(result) if inplace or func in (torch.dropout_, torch.feature_dropout_) else result


@rule(torch.rand_like, torch.randn_like, torch.randint_like)
def _random_like(func: Any, x: SpatialTensor, *bounds: int, generator: Any = None, **options: Any) -> Tensor:
    """A new split tensor, drawn differently on each part."""
    bounds = (*bounds, *(options.pop(name) for name in ("low", "high") if name in options))
    out = torch.empty_like(local_of(x), **options)
    own = shard_generator(x, generator)
    if func is torch.randint_like:
        out.data.random_(*(bounds if len(bounds) == 2 else (0, *bounds)), generator=own)
    else:
        (out.data.uniform_ if func is torch.rand_like else out.data.normal_)(generator=own)
    return wrap(out, x.spec)


@rule(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(func: Any, x: SpatialTensor, p: float | None = None, *, generator: Any = None) -> Tensor:
    """0 or 1 by the probabilities in `x`, or by `p`."""
    local, own = local_of(x), shard_generator(x, generator)
    drawn = torch.bernoulli(local, generator=own) if p is None else torch.empty_like(local).bernoulli_(p, generator=own)
    return wrap(drawn, x.spec)


@rule(
    Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_, Tensor.geometric_, Tensor.cauchy_,
    Tensor.log_normal_, Tensor.random_,
)  # fmt: skip
def _filled(func: Any, x: SpatialTensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    """Every element of the same distribution, or of its own where the probabilities are a tensor."""
    args, kwargs = tree_map_only(Tensor, lambda t: aligned(t, x.spec), (args, kwargs))
    func(local_of(x), *args, **kwargs, generator=shard_generator(x, generator))
    return x
