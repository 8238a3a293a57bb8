"""Random functions: a split tensor draws differently on each shard, a whole value equally on all ranks.

The default generators of a replica's ranks advance together; a shard draws from one seeded by them and its number.
Numbers of a split tensor's elements (`multinomial`) are drawn from the whole of it on every rank: one process's draws.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.ranks.recording import recorder, require_sending
from fullframe.spatial.operands import aligned, has_values, merged
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, local_or_whole, wrap
from fullframe.spatial.whole_rows import held_numbers


def shard_generator(x: SpatialTensor, generator: torch.Generator | None = None) -> torch.Generator:
    """A generator for this shard of `x`, seeded by a draw from `generator`, which is in the same state on all ranks.

    That is the default CPU generator where none is given, so recompute repeats it.
    """
    return _generator_of(x.spec, local_of(x).device, generator)


def _generator_of(spec: Spec, device: torch.device, generator: torch.Generator | None = None) -> torch.Generator:
    require_sending("it draws random numbers for split tensors, but for dropout")
    return torch.Generator(device).manual_seed(spec.spatial.draw_seed(generator) + spec.coordinate)


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


@rule(torch.normal, torch.poisson, torch.binomial)
def _drawn(func: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    """Each element of its own distribution, as its mean and spread, its rate, or its count and probability say."""
    names = {torch.normal: ("mean", "std"), torch.poisson: ("input",), torch.binomial: ("count", "prob")}[func]
    given = {**dict(zip((*names, "generator"), args, strict=False)), **kwargs}
    generator = given.pop("generator", None) or generator
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    spec = merged(tensors)
    parts = {name: aligned(v, spec) if isinstance(v, Tensor) else v for name, v in given.items()}
    positive = {torch.normal: parts.get("std"), torch.poisson: parts.get("input")}.get(func)
    if isinstance(positive, Tensor) and has_values(positive):  # what torch refuses on one rank, all refuse
        wrong = all_sum_no_grad((~(positive >= 0)).any().int(), spec.spatial.replica)
        parts = parts if not wrong else {n: v - v - 1 if isinstance(v, Tensor) else v for n, v in parts.items()}
    own = _generator_of(spec, next(t for t in parts.values() if isinstance(t, Tensor)).device, generator)
    return wrap(func(*(parts[name] for name in names if name in parts), generator=own), spec)


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
    noise, own = torch.empty_like(local_of(x), requires_grad=False), shard_generator(x)
    if has_values(noise):  # torch has no such draw of fake tensors
        noise.exponential_(generator=own)
    soft: Any = torch.softmax((x + wrap(-noise.log(), x.spec)) / tau, dim)
    if not hard:
        return soft  # type: ignore[no-any-return]
    best: Any = soft.detach().max(dim, keepdim=True).indices
    best = local_or_whole(best)
    along = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    numbers = held_numbers(x.spec, dim, best.device).unflatten(0, along)
    chosen = wrap((numbers == best).to(soft.dtype), x.spec)
    return chosen - soft.detach() + soft  # type: ignore[no-any-return]
