"""Attention: queries split, keys and values whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spatial.cases import Case, one, require_the_numbers_of_one_process


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


CASES: dict[str, Case] = {
    "attention by hand": Case(attention_by_hand, whole=((4, 4),)),
    "scaled_dot_product_attention": one(
        lambda x: F.scaled_dot_product_attention(*(x.flatten(2).transpose(1, 2)[:, None] * s for s in (1, 2, 3)))
    ),
    "class token": Case(class_token, whole=((1, 1, 4),)),
    "multi-head attention": Case(multi_head, whole=((12, 4), (12,), (4, 4))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    require_the_numbers_of_one_process(__name__, name)
