"""Scaled dot-product attention: where queries and keys are split, queries stay so, and keys and values are gathered.

They are not kept whole for backward. Where only the keys are split, each rank attends to its own, and what the ranks
find becomes one result.
"""

import string
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.redistribute import gather_axes, sliced
from fullframe.spatial.refetch import fetching_again
from fullframe.spatial.rules.convolution import autocast_inputs
from fullframe.spatial.rules.matmul import Shared, result_spec, shared
from fullframe.spatial.rules.partial_attention import How, partial_attention
from fullframe.spatial.rules.registry import rule
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
    """Queries (..., L, E), keys (..., S, E), values (..., S, F), mask (..., L, S), each split anyhow or whole.

    Dropout draws differently on each part. Split channels are gathered first, and heads that share keys.
    """
    query, key, value = autocast_inputs(query, key, value)
    grouped = enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]
    whole = (-1, -3) if grouped else (-1,)
    query, key, value = (_whole_in(t, *whole) for t in (query, key, value))
    attn_mask = _whole_in(attn_mask, -3) if grouped and attn_mask is not None else attn_mask
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


def _whole_in(t: Tensor, *dims: int) -> Tensor:
    """`t` made whole along the mesh axes that cut one of the dims."""
    if not isinstance(t, SpatialTensor):
        return t
    axes = [p.axis for p in t.spec.placements if p.dim - t.dim() in dims]
    return wrap(*gather_axes(local_of(t), t.spec, axes)) if axes else t


def _causal(parts: Shared, queries: int, keys: int) -> Tensor:
    """(L, S), True where a query sees a key, of the queries and keys that this rank has."""
    device = parts.locals[0].device
    rows, columns = (_held(parts, "L", queries, device), _held(parts, "S", keys, device))
    return rows[:, None] >= columns


def _held(parts: Shared, letter: str, size: int, device: torch.device) -> Tensor:
    """The positions that this rank has of a dim."""
    cuts = tuple(p.at(0) for own, p in parts.cuts.values() if own == letter)
    return sliced(torch.arange(size, device=device), parts.spec.with_((size,), cuts))


def _partial(parts: Shared, mask: Tensor | None, dropout: float, scale: float | None, grouped: bool) -> Tensor:
    """Local attention whose parts, of keys, are put together over the ranks."""
    q, k, v = parts.locals[:3]
    spatial = parts.spec.spatial
    axes = [axis for axis, (letter, _) in parts.cuts.items() if letter == "S"]
    seed = spatial.draw_seed(None) + spatial.coordinate_along(list(parts.cuts)) if dropout else 0
    how = How(q.shape[-1] ** -0.5 if scale is None else scale, spatial.group(axes) if axes else None, dropout, seed)
    if grouped:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    return partial_attention(q, k, v, mask, how)


@rule(F.multi_head_attention_forward)
def _multi_head(func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Torch's own steps, on (L, N, E) or (L, E), written with functions that have rules; `is_causal` is a hint."""
    call = _SIGNATURE.bind(query, key, value, *args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    if query.dim() == 3:
        return _on_batch(**options)
    options |= {name: options[name].unsqueeze(1) for name in ("query", "key", "value")}
    padding = options["key_padding_mask"]
    out, weights = _on_batch(**options | {"key_padding_mask": None if padding is None else padding.unsqueeze(0)})
    return out.squeeze(1), None if weights is None else weights.squeeze(0)


_SIGNATURE = signature(F.multi_head_attention_forward)


def _on_batch(num_heads: int, attn_mask: Any, key_padding_mask: Any, **given: Any) -> tuple[Tensor, Tensor | None]:
    """Queries (L, N, E), keys and values (S, N, E): the result, and the weights (N, L, S) or (N, heads, L, S)."""
    q, k, v = _projected(num_heads, **given)
    more = k.shape[2] - given["key"].shape[0] if given["static_k"] is None else int(given["add_zero_attn"])
    mask = _additive(attn_mask, key_padding_mask, num_heads, q.shape[0], more, q.dtype)
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if given["need_weights"]:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout, dropout > 0)
        heads = weights @ v
        weights = weights.mean(1) if given["average_attn_weights"] else weights
    else:
        heads = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    return F.linear(heads.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"]), weights


def _projected(num_heads: int, **given: Any) -> list[Tensor]:
    """Queries, keys and values (N, heads, L, d), with the learned and the zero key that belong to them."""
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else bias.chunk(3)
    found = []
    for name, letter, weight, bias in zip(("query", "key", "value"), "qkv", weights, biases, strict=True):
        t, learned, static = (given.get(which) for which in (name, f"bias_{letter}", f"static_{letter}"))
        assert t is not None
        samples = t.shape[1]
        t = F.linear(t, weight, bias)
        t = t if learned is None else torch.cat([t, learned.expand(1, samples, -1)])
        t = (
            t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
            if static is None
            else static.unflatten(0, (samples, -1))
        )
        if given["add_zero_attn"] and letter != "q":
            t = torch.cat([t, t.new_zeros(samples, num_heads, 1, t.shape[-1])], 2)
        found.append(t)
    return found


def _additive(
    attn_mask: Tensor | None, padding: Tensor | None, heads: int, samples: int, more: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one to add to the scores (N, heads, L, S); the last `more` keys are seen by all."""
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
    return F.pad(total, (0, more)) if total is not None and more else total
