"""Likeness and distance of vectors, whose dim may be split."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.operands import aligned, merged
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.matmul import contract
from fullframe.spatial.rules.reduction import without
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.rules.transposing import moved_from
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

_MANY = 25  # vectors, from which on torch takes the distance from products


@rule(F.cosine_similarity)
def _cosine_similarity(func: Any, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Along a dim, which is removed; of a split one the ranks add up norms and products."""
    spec = merged([x1, x2])
    dim %= len(spec.shape)
    a, b = aligned(x1, spec), aligned(x2, spec)
    if not spec.is_split(dim):
        return wrap(func(a, b, dim, eps), without(spec, (dim,), False))
    a, b = torch.broadcast_tensors(a, b)
    kind = torch.promote_types(a.dtype, b.dtype)
    one, other = (_directed(wrap(t.to(kind), spec), dim, eps) for t in (a, b))
    return (one * other).sum(dim)


def _directed(x: Tensor, dim: int, eps: float) -> Tensor:
    """`x` over its norm along `dim`, which is at least `eps` and has its own slope there too, as in torch."""
    norm = torch.linalg.vector_norm(x, 2, dim, True)
    fixed = norm.detach()
    return x / torch.where(fixed < eps, norm - fixed + eps, norm)


@rule(torch.cdist)
def _cdist(func: Any, x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    """(..., P, M) and (..., R, M) to the distances (..., P, R), split as the first; the second is made whole."""
    many = p == 2 and max(x1.shape[-2], x2.shape[-2]) > _MANY
    if compute_mode in (None, "use_mm_for_euclid_dist_if_necessary"):
        compute_mode = ("use" if many else "donot_use") + "_mm_for_euclid_dist"
    x1 = moved_from(x1, -1) if isinstance(x1, SpatialTensor) else x1
    if isinstance(x2, SpatialTensor):
        taken = [q.axis for q in x2.spec.placements if q.dim >= x2.dim() - 2]
        x2 = wrap(*gather_axes(local_of(x2), x2.spec, taken))
    letters = "abcdefghijkl"[: max(x1.dim(), x2.dim()) - 2]
    terms = [letters[len(letters) - t.dim() + 2 :] + last for t, last in ((x1, "pm"), (x2, "rm"))]
    if not any(isinstance(t, SpatialTensor) for t in (x1, x2)):
        return func(x1, x2, p, compute_mode)  # type: ignore[no-any-return]

    def of_parts(a: Tensor, b: Tensor) -> Tensor:
        if a.shape[-2] and b.shape[-2]:
            return func(a, b, p, compute_mode)  # type: ignore[no-any-return]
        return (a.unsqueeze(-2) - b.unsqueeze(-3)).sum(-1)  # torch's has no second derivative where there are no rows

    return contract([x1, x2], terms, letters + "pr", of_parts)


@rule(F.pdist, torch.pdist)
def _pdist(func: Any, x: SpatialTensor, p: float = 2.0) -> Tensor:
    """(N, M) to the distances (N * (N - 1) / 2,) of all pairs; the vectors are made whole."""
    return func(x.full(), p)  # type: ignore[no-any-return]


@rule(F.glu)
def _glu(func: Any, input: Tensor, dim: int = -1) -> Tensor:
    """The first half along a dim, gated by the second."""
    if isinstance(input, SpatialTensor) and not input.spec.is_split(dim):
        return wrap(func(local_of(input), dim), input.spec.resized(dim, input.shape[dim] // 2))
    kept, gate = torch.chunk(input, 2, dim)
    return kept * torch.sigmoid(gate)


@rule(F.local_response_norm)
def _local_response_norm(
    func: Any, input: SpatialTensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """Each channel over the mean square of those around it; the channels may be split."""
    if not input.spec.is_split(1):
        return wrap(func(local_of(input), size, alpha, beta, k), input.spec)
    squares = F.pad((input * input).movedim(1, -1), (size // 2, (size - 1) // 2))
    around = F.avg_pool2d(squares.flatten(0, max(0, input.dim() - 4)), (1, size), 1)
    around = around.reshape(*squares.shape[:-1], input.shape[1]).movedim(-1, 1)
    return input / (around * alpha + k) ** beta
