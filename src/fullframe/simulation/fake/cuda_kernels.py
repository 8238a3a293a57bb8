"""What a GPU runs where the CPU runs something else that keeps other tensors: fused attention, dropout's mask of bytes.

Replaces torch's choice of kernels for CPU tensors; the kernels chosen exist for fake tensors only.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.simulation.fake.replaced import replaced, replaced_kernels
from fullframe.spatial.rules import convolution, narrow_bf16
from fullframe.spatial.rules.convolution import JOINED_BYTES

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_FLASH = 256  # most channels of a head
_ALIGNMENT = 8  # of channels, in elements: what is less is padded


@contextmanager
def cuda_kernels(has_flash_attention: bool) -> Iterator[None]:
    """Inside, fake CPU tensors take CUDA's kernels; flash attention needs compute capability 8.0."""
    kernels = {"dropout": _dropout, "scaled_dot_product_attention": partial(_attention, has_flash_attention)}
    limits: dict[str, int] = defaultdict(lambda: JOINED_BYTES["cuda"])
    joined, right = replaced(convolution, "JOINED_BYTES", limits), replaced(narrow_bf16, "HAS_AVX512", False)
    with replaced_kernels("AutogradCPU", kernels), joined, right:
        yield


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not x.numel():
        return _aten.alias(x)  # type: ignore[no-any-return]
    return x * 0 if p == 1 else _aten.native_dropout(x, p, True)[0]


def _attention(
    has_flash: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In the order of torch's `_fused_sdp_choice` on CUDA, without cuDNN's, which holds as much as flash."""
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    # Elements of a row have to lie side by side, or the scores are there whole.
    by_rows = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (query, key, value))
    fused = query.dim() == 4 and query.dtype != torch.float64 and query.is_floating_point() and by_rows
    alike = len(set(sizes)) == 1 and query.dtype == key.dtype == value.dtype
    if fused and alike and attn_mask is None and has_flash and query.dtype in _HALF and sizes[0] <= _FLASH:
        scale = sizes[0] ** -0.5 if scale is None else scale
        q, k, v = (_padded(t, _ALIGNMENT) for t in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        return out[..., : sizes[0]] if q is not query else out  # type: ignore[no-any-return]
    if fused and not enable_gqa and all(size % 4 == 0 for size in sizes):
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, bias, trains, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores, (N, heads, L, S); its rows lie at aligned addresses."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    columns = mask.shape[-1]
    if columns % _ALIGNMENT:
        mask = _padded(mask, 2 * _ALIGNMENT)[..., :columns]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor
