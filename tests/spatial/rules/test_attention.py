"""Attention: queries split, keys and values whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, raised
from tests.spatial.corners import Corners, noise, require_no_faults, spoiled

ODD = ((7, 11), (9, 13))
FEW = ((8, 12), (11, 13))  # an even cut and an uneven one; scores are as many as tokens squared


def attention_by_hand(x: Tensor, w: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2) @ w
    scores = (tokens @ tokens.transpose(1, 2)).softmax(-1)
    return scores @ tokens


def class_token(x: Tensor, token: Tensor) -> Any:
    tokens = torch.cat([token.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1)
    tokens = F.scaled_dot_product_attention(tokens, tokens.sin(), tokens)
    return tokens[:, 0], tokens[:, 1:].transpose(1, 2).reshape(x.shape)


def multi_head(x: Tensor, w: Tensor, b: Tensor, out: Tensor) -> Any:
    tokens = x.flatten(2).permute(2, 0, 1)
    options = {"in_proj_weight": w, "in_proj_bias": b, "bias_k": None, "bias_v": None, "add_zero_attn": False,
               "dropout_p": 0.0, "out_proj_weight": out, "out_proj_bias": None}  # fmt: skip
    quiet = F.multi_head_attention_forward(tokens, tokens, tokens, 4, 2, **options, need_weights=False)[0]
    return quiet, *F.multi_head_attention_forward(tokens, tokens, tokens, 4, 2, **options)


def tokens(x: Tensor, heads: int = 2) -> Tensor:
    """(N, C, H, W) as tokens of heads, (N, heads, H * W, C / heads)."""
    return x.flatten(2).transpose(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2)


def near(count: int, keys: int) -> Tensor:
    """(count, keys), which key each query sees: none for the first query."""
    seen = (torch.arange(count)[:, None] * 7 + torch.arange(keys)) % 3 > 0
    seen[0] = False
    return seen


def masks(x: Tensor) -> list[Tensor]:
    q, count = tokens(x), x.shape[2] * x.shape[3]
    seen = near(count, count)
    split = x[:, :1].flatten(2)  # (N, 1, H * W), of the keys
    return [
        F.scaled_dot_product_attention(q, q.sin(), q, mask)
        for mask in (seen, seen.double(), seen[:1, :].logical_not(), split[:, None] > 0, split.transpose(1, 2)[:, None])
    ]


def options(x: Tensor) -> list[Tensor]:
    q, four = tokens(x), tokens(x, 4)
    return [
        F.scaled_dot_product_attention(q, q.sin(), q, is_causal=True),
        F.scaled_dot_product_attention(q, q.sin(), q.cos()[..., :1], scale=0.3),
        F.scaled_dot_product_attention(four[..., :1], q[..., :1], q, enable_gqa=True),
        F.scaled_dot_product_attention(four[..., :1], q[:, :1, :, :1], q[:, :1], enable_gqa=True),
    ]


def neighbours(x: Tensor) -> list[Tensor]:
    """Each pixel attends to the 3 x 3 around it, its keys and values cut out by `F.unfold` and by `Tensor.unfold`."""
    n, c, h, w = x.shape
    k, v = (F.unfold(t, 3, padding=1).view(n, c, 9, h, w) for t in (x.sin(), x.cos()))
    scores = torch.einsum("nchw,nckhw->nkhw", x, k).softmax(1)
    padded = F.pad(x, (1, 1, 1, 1))
    views = padded.unfold(2, 3, 1).unfold(3, 3, 1)  # (N, C, H, W, 3, 3)
    weights = (x[..., None, None] * views).sum(1, keepdim=True).flatten(-2).softmax(-1)
    return [torch.einsum("nkhw,nckhw->nchw", scores, v), (weights * views.flatten(-2)).sum(-1)]


def windows(x: Tensor) -> Tensor:
    """Attention within windows of 3 x 4 pixels."""
    n, c, h, w = x.shape
    t = x.view(n, c, h // 3, 3, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 12, c)
    out = F.scaled_dot_product_attention(t, t.sin(), t).view(n, h // 3, w // 4, 3, 4, c)
    return out.permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


def objects(x: Tensor, queries: Tensor, seen: Tensor) -> list[Tensor]:
    """Whole queries attend to split memory."""
    k, count = tokens(x), x.shape[2] * x.shape[3]
    mask = near(queries.shape[-2], count)
    return [
        F.scaled_dot_product_attention(queries, k, k.sin()),
        F.scaled_dot_product_attention(queries[0], k, k.sin(), mask),
        F.scaled_dot_product_attention(queries, k, k.sin(), mask * seen, scale=2.0),
        F.scaled_dot_product_attention(queries, k, k.sin(), is_causal=True),
        F.scaled_dot_product_attention(torch.cat([queries, queries.cos()], 1), k, k, enable_gqa=True),
        F.scaled_dot_product_attention(queries, k, k, x[:, :1].flatten(2)[:, None]),
    ]


def objects_of(x: Tensor, queries: Tensor) -> list[Tensor]:
    return objects(x, queries, torch.ones(1, dtype=x.dtype))[:4]


def crossed(x: Tensor, y: Tensor, memory: Tensor) -> list[Tensor]:
    """Two lists of tokens that are split differently, and whole keys."""
    small = F.avg_pool2d(y, 3)
    return [
        F.scaled_dot_product_attention(tokens(x), tokens(small), tokens(small).sin()),
        F.scaled_dot_product_attention(tokens(small), tokens(x), tokens(x).sin()),
        F.scaled_dot_product_attention(tokens(x), memory, memory.sin()),
        F.scaled_dot_product_attention(x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)),
        F.scaled_dot_product_attention(x, y, x),
        F.scaled_dot_product_attention(
            torch.cat([memory[0, 0], memory[0, 1]], 1), x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1)
        ),
    ]


def all_dropped(x: Tensor, queries: Tensor) -> list[Tensor]:
    k = tokens(x)
    return [F.scaled_dot_product_attention(q, k, k, dropout_p=1.0) for q in (k, queries)]


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    q = tokens(x)
    return F.scaled_dot_product_attention(q, q.sin(), q, bias)


CASES: dict[str, Case] = {
    "attention by hand": Case(attention_by_hand, whole=((4, 4),), sizes=FEW),
    "scaled_dot_product_attention": Case(
        lambda x: F.scaled_dot_product_attention(*(x.flatten(2).transpose(1, 2)[:, None] * s for s in (1, 2, 3))),
        sizes=FEW,
    ),
    "class token": Case(class_token, whole=((1, 1, 4),), sizes=FEW),
    "multi-head attention": Case(multi_head, whole=((12, 4), (12,), (4, 4)), sizes=FEW),
    "neighbours": Case(neighbours, sizes=ODD),
    "windows": Case(windows, sizes=((9, 16), (12, 12))),
    "masks": Case(masks, sizes=ODD),
    "options": Case(options, sizes=ODD),
    "objects": Case(objects, whole=((2, 2, 5, 2), (1,)), sizes=ODD),
    "crossed": Case(crossed, split=((2, 4), (2, 4)), whole=((2, 2, 5, 2),), sizes=ODD),
    "all dropped": Case(all_dropped, whole=((2, 2, 5, 2),), sizes=((7, 11),)),
    "a bias with a gradient": Case(biased, whole=((2, 77, 77),), sizes=((7, 11),)),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)


def unseen(x: Tensor, queries: Tensor) -> list[Tensor]:
    """No key of a rank may be seen, or none at all."""
    k, count = tokens(x), x.shape[2] * x.shape[3]
    columns = torch.arange(count) % x.shape[3]
    seen = torch.stack([columns < 2, columns > x.shape[3] - 3, columns < 0])
    return [
        F.scaled_dot_product_attention(queries[..., :3, :], k, k, seen),
        F.scaled_dot_product_attention(queries[..., :3, :], k, k, seen.double().log()),
        F.scaled_dot_product_attention(k[..., :3, :], k, k, seen),
    ]


CORNERS = Corners()
CORNERS.add("unseen", unseen, [noise(1, 4, 7, 5)], [noise(1, 2, 5, 2)])
for value in (float("nan"), float("inf")):
    CORNERS.add(f"objects see {value}", objects_of, [spoiled(2, 4, 7, 5, value=value)], [noise(2, 2, 5, 2)])
    CORNERS.add(f"tokens see {value}", lambda x: biased(x, None), [spoiled(2, 4, 7, 5, value=value)])
for dtype in (torch.float32, torch.bfloat16):
    CORNERS.add(f"objects in {dtype}", objects_of, [noise(2, 4, 7, 5, dtype=dtype)], [noise(2, 2, 5, 2, dtype=dtype)])


@pytest.mark.parametrize("height,width", [(1, 2), (2, 2)])
def test_corners_are_torchs(height: int, width: int) -> None:
    require_no_faults(__name__, height, width)


def test_softmax_is_refused_where_torch_refuses() -> None:
    """Both a mask and causality."""
    assert rank_group(2).run(_refused) == [["RuntimeError"]] * 2


def _refused() -> list[str]:
    q = tokens(ff.shard(noise(1, 4, 6, 5), mesh(1, 2)))
    mask = torch.ones(30, 30, dtype=torch.bool)
    return raised([lambda: F.scaled_dot_product_attention(q, q, q, mask, is_causal=True)])
