"""Scaled dot-product attention: queries stay split, keys and values are gathered along the queries' split."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.registry import Refused, rule
from fullframe.spatial.tensor import Layout, SpatialTensor, aligned, gather_axes, local_of, wrap


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
    if dropout_p:
        raise Refused(f"attention dropout {dropout_p} is not split", "Set the attention dropout to 0.")
    if is_causal:
        raise Refused("causal attention over image positions is not split")
    layout = query._layout if isinstance(query, SpatialTensor) else None
    if layout is not None and layout.is_split(-1):
        raise Refused("the channels of the queries are split")
    key, value = (_whole_sequence(t, layout) for t in (key, value))
    if layout is None:
        raise_if_split = [t for t in (key, value, attn_mask) if isinstance(t, SpatialTensor)]
        if raise_if_split:
            raise Refused("keys are split over samples or heads but queries are whole")
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    batch = tuple(p for p in layout.placements if p.dim < len(layout.shape) - 2)
    k, v = (aligned(t, layout.with_(tuple(t.shape), batch)) for t in (key, value))
    mask = attn_mask
    if mask is not None:
        mask = aligned(mask, layout.with_((*layout.shape[:-1], key.shape[-2]), layout.placements))
    out = F.scaled_dot_product_attention(local_of(query), k, v, mask, scale=scale, enable_gqa=enable_gqa)  # type: ignore[arg-type]
    return wrap(out, layout.with_((*layout.shape[:-1], value.shape[-1]), layout.placements))


def _whole_sequence(t: Tensor, queries: Layout | None) -> Tensor:
    """Keys or values, whole along their sequence and wherever the queries' split does not match theirs."""
    if not isinstance(t, SpatialTensor):
        return t
    count = t.dim()
    matching = {p for p in queries.placements if p.dim < count - 2} if queries is not None else set()
    axes = [p.axis for p in t._layout.placements if p.dim >= count - 2 or p not in matching]
    return wrap(*gather_axes(local_of(t), t._layout, axes))
