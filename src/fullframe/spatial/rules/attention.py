"""Scaled dot-product attention: queries stay split, keys and values are gathered along the queries' split."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.operands import aligned
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


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
    """Queries (..., L, E), keys and values (..., S, E); refuses dropout, causality, split query channels."""
    if dropout_p:
        raise Unsupported(f"attention dropout {dropout_p} is not split", "Set the attention dropout to 0.")
    if is_causal:
        raise Unsupported("causal attention over image positions is not split")
    spec = query.spec if isinstance(query, SpatialTensor) else None
    if spec is not None:
        spec.require_whole("the channels of the queries are split", -1)
    key, value = (_whole_sequence(t, spec) for t in (key, value))
    if spec is None:
        if any(isinstance(t, SpatialTensor) for t in (key, value, attn_mask)):
            raise Unsupported("keys are split over samples or heads but queries are whole")
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    batch = tuple(p for p in spec.placements if p.dim < len(spec.shape) - 2)
    k, v = (aligned(t, spec.with_(tuple(t.shape), batch)) for t in (key, value))
    mask = None if attn_mask is None else aligned(attn_mask, spec.resized(-1, key.shape[-2]))
    out = F.scaled_dot_product_attention(local_of(query), k, v, mask, scale=scale, enable_gqa=enable_gqa)  # type: ignore[arg-type]
    return wrap(out, spec.resized(-1, value.shape[-1]))


def _whole_sequence(t: Tensor, queries: Spec | None) -> Tensor:
    """Keys or values, whole along their sequence and wherever the queries' split does not match theirs."""
    if not isinstance(t, SpatialTensor):
        return t
    count = t.dim()
    matching = {p for p in queries.placements if p.dim < count - 2} if queries is not None else set()
    axes = [p.axis for p in t.spec.placements if p.dim >= count - 2 or p not in matching]
    return wrap(*gather_axes(local_of(t), t.spec, axes))


@rule(F.multi_head_attention_forward)
def _multi_head(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Torch's own steps, on (L, N, E) or (L, E), written with functions that have rules."""
    given = {"bias_k": bias_k, "bias_v": bias_v, "static_k": static_k, "static_v": static_v}
    odd = [name for name, value in given.items() if value is not None]
    if odd or add_zero_attn or is_causal or (dropout_p and training) or query.dim() != 3:
        raise Unsupported(
            f"multi-head attention with {odd or 'zero attention, causality, dropout or no batch'} is not split"
        )
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_proj_weight is not None
        weights = list(in_proj_weight.chunk(3))
    biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))
    projected = [F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases, strict=True)]  # type: ignore[arg-type]
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in projected)  # (N, heads, L, d)
    mask = _additive(attn_mask, key_padding_mask, num_heads, q.shape[0], q.dtype)
    if need_weights:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        weights_ = (scores if mask is None else scores + mask).softmax(-1)
        heads = weights_ @ v
    else:
        weights_, heads = None, F.scaled_dot_product_attention(q, k, v, mask)
    out = F.linear(heads.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if weights_ is not None and average_attn_weights:
        weights_ = weights_.mean(1)
    return out, weights_


def _additive(
    attn_mask: Tensor | None, padding: Tensor | None, heads: int, samples: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one to add to the scores (N, heads, L, S)."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (samples, heads)))
    if padding is not None:
        masks.append(padding[:, None, None, :])
    total = None
    for mask in masks:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
        total = mask if total is None else total + mask
    return total
