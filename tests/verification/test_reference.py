"""Nothing is dropped in a step that is held against another: neither by modules nor by functions."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullframe.verification.reference import NothingDropped, without_dropout


@pytest.mark.parametrize(
    "function",
    [
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
        lambda x, p, training: torch.dropout(x, p, training),
        lambda x, p, training: torch.dropout(x, p=p, train=training),
        lambda x, p, training: F.dropout(x, p=p, training=training),
        lambda x, p, training: F.dropout(x, training=training),
    ],
)  # fmt: skip
def test_a_function_drops_nothing(function: Callable[..., Tensor]) -> None:
    x = torch.rand(2, 64, 3, 4, 5)[..., 0] if function is F.dropout2d else torch.rand(2, 64, 3, 4, 5)
    x = x[..., 0, 0] if function is F.dropout1d else x
    with NothingDropped():
        assert torch.equal(function(x, 0.7, True), x)
    assert not torch.equal(function(x, 0.7, True), x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_drops_nothing(is_causal: bool) -> None:
    x = torch.rand(2, 3, 5, 4)
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=is_causal)
    with NothingDropped():
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, None, 0.5, is_causal), expected)
        named = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=is_causal)
    assert torch.equal(named, expected)


def test_modules_drop_nothing_and_are_named() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    model = nn.ModuleDict({"a": nn.Dropout(0.0), "b": nn.FeatureAlphaDropout(0.2), "c": attention})
    assert without_dropout(model) == ["b (p = 0.2)", "c (dropout = 0.5)"]
    assert attention.dropout == 0.0 and without_dropout(model) == []
