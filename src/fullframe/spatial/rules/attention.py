"""Scaled dot-product attention: where queries and keys are split, queries stay so, and keys and values are gathered.

They are not kept whole for backward. Where only the keys are split, each rank attends to its own, and what the ranks
find becomes one result.
"""

import string
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.refetch import fetching_again
from fullframe.spatial.rules.autocast import autocast_inputs
from fullframe.spatial.rules.matmul import Shared, result_spec, shared, whole_in
from fullframe.spatial.rules.partial_attention import How, partial_attention
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.tensor import SpatialTensor, wrap


@rule(F.scaled_dot_product_attention)
def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Queries (..., L, E), keys (..., S, E), values (..., S, F), mask (..., L, S), each split anyhow or whole.

    Dropout draws differently on each part. Split channels are gathered first, and heads that share keys.
    """
    query, key, value = autocast_inputs(query, key, value)
    grouped = enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]
    whole = (-1, -3) if grouped else (-1,)
    query, key, value = (whole_in(t, *whole) for t in (query, key, value))
    attn_mask = whole_in(attn_mask, -3) if grouped and attn_mask is not None else attn_mask
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    operands = [t for t in (query, key, value, attn_mask) if t is not None]
    if not any(isinstance(t, SpatialTensor) for t in operands):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    shapes = [(*t.shape[:-3], query.shape[-3]) if grouped else t.shape[:-2] for t in operands[:3]]
    batch = torch.broadcast_shapes(*shapes)
    letters = string.ascii_lowercase[: len(batch)]
    rows = ("LE", "SE", "SF", "LS")
    terms = [letters[len(letters) - t.dim() + 2 :] + row for t, row in zip(operands, rows, strict=False)]
    parts = shared(operands, terms)
    cuts, (q, k, v, *masks) = parts.cuts, parts.locals
    mask = masks[0] if masks else None
    split = {letter for letter, _ in cuts.values()}
    if is_causal and split & {"L", "S"}:
        mask, is_causal = _causal(parts, query.shape[-2], key.shape[-2]), False
    if "S" in split or dropout_p or (mask is not None and mask.requires_grad):
        mask = _causal(parts, query.shape[-2], key.shape[-2]) if is_causal else mask
        attend = partial(_partial, parts, mask, dropout_p, scale, grouped)
    else:
        attend = partial(F.scaled_dot_product_attention, q, k, v, mask, is_causal=is_causal, **options)
    out = fetching_again(parts.loans, attend)
    sizes = dict(zip(letters, batch, strict=True)) | {"L": query.shape[-2], "F": value.shape[-1]}
    return wrap(out, result_spec(parts.spec, letters + "LF", sizes, cuts))


def _causal(parts: Shared, queries: int, keys: int) -> Tensor:
    """(L, S), True where a query sees a key, of the queries and keys that this rank has."""
    return parts.places("L", queries)[:, None] >= parts.places("S", keys)


def _partial(parts: Shared, mask: Tensor | None, dropout: float, scale: float | None, grouped: bool) -> Tensor:
    """Local attention whose parts, of keys, are put together over the ranks."""
    q, k, v = parts.locals[:3]
    spatial = parts.spec.spatial
    axes = parts.axes_of("S")
    seed = spatial.draw_seed(None) + spatial.coordinate_along(list(parts.cuts)) if dropout else 0
    how = How(q.shape[-1] ** -0.5 if scale is None else scale, spatial.group(axes) if axes else None, dropout, seed)
    if grouped:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    return partial_attention(q, k, v, mask, how)
