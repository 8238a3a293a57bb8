"""Random functions: noise of a split tensor is one process's, drawn whole on every rank; dropout's is each shard's own.

The default generators of a replica's ranks advance together; a shard's own draws are seeded by them and its number.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fullframe.ranks.recording import recorder, require_sending
from fullframe.spatial.operands import aligned, has_values, merged
from fullframe.spatial.redistribute import sliced
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.spec import Spec, strides_of
from fullframe.spatial.tensor import SpatialTensor, local_of, local_or_whole, wrap
from fullframe.spatial.whole_rows import held_numbers

_BY_HAND = "it draws random numbers for split tensors, but for dropout"


def shard_generator(x: SpatialTensor, generator: torch.Generator | None = None) -> torch.Generator:
    """A generator for this shard of `x`, seeded by a draw from `generator`, which is in the same state on all ranks.

    That is the default CPU generator where none is given, so recompute repeats it.
    """
    require_sending(_BY_HAND)
    seed = x.spec.spatial.draw_seed(generator) + x.spec.coordinate
    return torch.Generator(local_of(x).device).manual_seed(seed)


def _kept(x: SpatialTensor, p: float) -> Tensor:
    """True where an element is kept, with probability 1 - p."""
    by = recorder()
    if by is not None:
        return by.kept(local_of(x).shape, 1 - p, local_of(x).device, x.spec.coordinate)
    kept = torch.empty(local_of(x).shape, dtype=torch.bool, device=x.device)
    return kept.bernoulli_(1 - p, generator=shard_generator(x))


def _kept_channels(x: SpatialTensor, p: float, batched: bool) -> Tensor:
    """The same for whole channels, drawn alike on all ranks: (N, C, 1, ...), or (C, 1, ...) without a batch.

    Of split samples or channels, as of slices (N D, C, H, W), the own ones of all that are drawn.
    """
    leading = 2 if batched else 1
    shape = (*x.shape[:leading], *(1,) * (x.dim() - leading))
    drawn = torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p)
    return aligned(drawn, x.spec.with_(shape, tuple(cut for cut in x.spec.placements if cut.dim < leading)))


@rule(F.dropout, torch.dropout, torch.dropout_)
@rule(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_)
@rule(F.alpha_dropout, F.feature_alpha_dropout)
def _dropout(func: Any, x: SpatialTensor, p: float, training: bool, inplace: bool = False) -> Tensor:
    """Elements dropped, drawn differently on each part, or whole channels, alike on all ranks."""
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


def _part(whole: Tensor, spec: Spec) -> Tensor:
    """This rank's part of what was drawn on every rank alike, in memory of its own; a leaf where that is one."""
    local = sliced(whole.detach() if whole.is_leaf else whole, spec).clone()
    return wrap(local.requires_grad_(whole.requires_grad), spec.strided(strides_of(whole)))


def _undrawn(x: SpatialTensor, device: torch.device | str) -> Tensor:
    """Memory for the whole of `x` as it lies in one process: torch draws in that order."""
    require_sending(_BY_HAND)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


@rule(torch.rand_like, torch.randn_like, torch.randint_like)
def _random_like(func: Any, x: SpatialTensor, *bounds: int, **options: Any) -> Tensor:
    """A new split tensor: one process's numbers."""
    options["device"] = options.get("device") or local_of(x).device
    return _part(func(_undrawn(x, "meta"), *bounds, **options), x.spec)


@rule(
    Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_, Tensor.geometric_, Tensor.cauchy_,
    Tensor.log_normal_, Tensor.random_,
)  # fmt: skip
def _filled(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    """One process's numbers in place, every element of the same distribution, or each of its own probability."""
    args, kwargs = tree_map_only(SpatialTensor, SpatialTensor.full, (args, kwargs))
    local_of(x).copy_(sliced(func(_undrawn(x, local_of(x).device), *args, **kwargs), x.spec))
    return x


@rule(torch.normal, torch.poisson, torch.binomial, torch.bernoulli, Tensor.bernoulli)
def _drawn(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Each element of its own distribution, as mean and spread, a rate, or probabilities say: one process's numbers.

    Those are made whole: how many draws an element takes may follow from its value.
    """
    require_sending(_BY_HAND)
    spec = merged([value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)])
    args, kwargs = tree_map_only(SpatialTensor, SpatialTensor.full, (args, kwargs))
    return _part(func(*args, **kwargs), spec)


@rule(torch.multinomial, Tensor.multinomial)
def _multinomial(func: Any, x: Any, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Tensor:
    """Numbers (..., num_samples) drawn by the weights (..., n), whole: one process's numbers."""
    return func(x.full().detach(), num_samples, replacement, generator=generator)  # type: ignore[no-any-return]


@rule(F.rrelu, torch.rrelu, torch.rrelu_)
def _rrelu(
    func: Any,
    x: SpatialTensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    generator: Any = None,
) -> Tensor:
    """What is not positive times a slope between `lower` and `upper`, drawn for each in training, else their middle."""
    local = local_of(x)
    torch.rrelu(local.detach().flatten()[:0], lower, upper, training)  # refuses what torch does
    inplace = inplace or func is torch.rrelu_
    if training:
        own = shard_generator(x, generator)
        slope = torch.empty_like(local, requires_grad=False).uniform_(lower, upper, generator=own)
        slope = slope.where(local.detach() <= 0, 1)
        made = local.mul_(slope) if inplace else local * slope
    else:
        made = F.leaky_relu(local, (lower + upper) / 2, inplace)
    return x if inplace else wrap(made, x.spec)


@rule(F.gumbel_softmax)
def _gumbel_softmax(
    func: Any, x: SpatialTensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """The softmax of `x` and noise, or one-hot with its gradient."""
    if eps != 1e-10:
        warnings.warn("`eps` parameter is deprecated and has no effect.", stacklevel=2)
    require_sending(_BY_HAND)
    noise = torch.empty(x.shape, dtype=x.dtype, device=local_of(x).device)
    if has_values(noise):  # torch has no such draw of fake tensors
        noise.exponential_()
    soft: Any = torch.softmax((x + _part(-noise.log(), x.spec)) / tau, dim)
    if not hard:
        return soft  # type: ignore[no-any-return]
    best: Any = soft.detach().max(dim, keepdim=True).indices
    best = local_or_whole(best)
    along = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    numbers = held_numbers(x.spec, dim, best.device).unflatten(0, along)
    chosen = wrap((numbers == best).to(soft.dtype), x.spec)
    return chosen - soft.detach() + soft  # type: ignore[no-any-return]
