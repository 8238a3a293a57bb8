"""The step in one process: nothing is dropped, by modules or by functions, and each replica begins alike."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullframe.verification.reference import _answers, nothing_dropped, without_dropout


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
    with nothing_dropped():
        assert torch.equal(function(x, 0.7, True), x)
    assert not torch.equal(function(x, 0.7, True), x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_drops_nothing(is_causal: bool) -> None:
    x = torch.rand(2, 3, 5, 4)
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=is_causal)
    with nothing_dropped():
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, None, 0.5, is_causal), expected)
        named = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=is_causal)
    assert torch.equal(named, expected)


def test_attention_with_its_projections_drops_nothing() -> None:
    x, weight, bias = torch.rand(5, 2, 4), torch.rand(12, 4), torch.rand(12)
    words = x, x, x, 4, 2, weight, bias, None, None, False
    expected, _ = F.multi_head_attention_forward(*words, 0.0, weight[:4], bias[:4])
    with nothing_dropped():
        assert torch.equal(F.multi_head_attention_forward(*words, 0.5, weight[:4], bias[:4])[0], expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_backward_runs_again_drops_nothing(use_reentrant: bool) -> None:
    x, engine = torch.rand(64, requires_grad=True), torch.autograd._engine_run_backward
    with nothing_dropped():
        checkpoint(lambda x: F.dropout(x.exp(), 0.5).sin(), x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, x.exp().cos() * x.exp())
    assert torch.autograd._engine_run_backward is engine


def test_modules_drop_nothing_and_are_named() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    model = nn.ModuleDict({"a": nn.Dropout(0.0), "b": nn.FeatureAlphaDropout(0.2), "c": attention})
    assert without_dropout(model) == ["b (p = 0.2)", "c (dropout = 0.5)"]
    assert attention.dropout == 0.0 and without_dropout(model) == []


class Noting(nn.Module):
    """Counts its calls, draws of a generator of its own, and makes buffers by the size of its first image."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(1)), 0
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("single", torch.zeros(1))
        self.register_buffer("index", torch.arange(3).expand(2, 3))

    def forward(self, image: Tensor) -> Tensor:
        self.calls += 1
        if not hasattr(self, "grid"):
            self.register_buffer("grid", torch.arange(3.0))
        self.empty = self.empty if len(self.empty) else torch.arange(3.0)
        self.single = self.single if len(self.single) == 3 else torch.arange(3.0)
        drawn = torch.rand(3, generator=self.generator)
        return image * self.weight * self.calls * drawn + self.grid + self.empty + self.single


def test_each_replica_begins_with_the_model_as_it_was_made(tmp_path: Path) -> None:
    model, image = Noting().double(), torch.ones(2, 3).double()
    recipe = mock.Mock(loss=lambda model, batch: model(batch).square().mean())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"state": state, "parts": [image, image], "seeds": [5, 5]}
    answers = _answers(recipe, model, torch.device("cpu"), given, tmp_path)
    first, second = (torch.load(tmp_path / f"part-{number}" / "1.pt") for number in range(2))  # what comes out
    assert torch.equal(first, second) and not answers.draws
    assert answers.buffers[0].keys() == answers.buffers[1].keys() == {"empty", "single", "grid", "index"}
    assert all(torch.equal(one, answers.buffers[1][name]) for name, one in answers.buffers[0].items())
