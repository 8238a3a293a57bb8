"""Multi-head attention and what the transformer modules of torch.nn ask for: written with functions that have rules.

Torch's C++ kernels of whole layers are not taken, as torch itself leaves them out for tensors like split ones.
"""

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.registry import COMPOSED, Unsupported, kept_back, rule
from fullframe.spatial.tensor import whole

COMPOSED.add(F.multi_head_attention_forward)


@rule(F.multi_head_attention_forward)
def _multi_head(func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Torch's own steps, on (L, N, E) or (L, E), written with functions that have rules."""
    call = _SIGNATURE.bind(query, key, value, *args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    options["is_causal"] = options["is_causal"] or bool(kept_back(F.multi_head_attention_forward, "is_causal"))
    if options["is_causal"] and options["attn_mask"] is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
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
        trusted = given["is_causal"] and key_padding_mask is None  # then torch does not look at the mask
        heads = F.scaled_dot_product_attention(q, k, v, None if trusted else mask, dropout, trusted)
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


@rule(torch._nested_tensor_from_mask_left_aligned)
def _left_aligned(func: Any, x: Tensor, mask: Tensor) -> bool:
    """False, so that `nn.TransformerEncoder` does without nested tensors; refuses padding for which they give zeros."""
    if torch.is_grad_enabled() and x.requires_grad:
        return False  # torch then does without them too
    mask = whole(mask)
    if bool(mask.all()) or not bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return False
    fix = "Make the encoder with enable_nested_tensor=False."
    raise Unsupported("in evaluation torch leaves out what is padded, and gives zeros there", fix)
