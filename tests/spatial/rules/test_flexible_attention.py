"""`flex_attention` on split tokens; torch has no backward for it on a CPU, so the tests take its check away."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import fullframe as ff
from tests.exactness import differences_from, mesh, one_process
from tests.rank_group import rank_group
from tests.spatial.rules.test_attention import tokens

TOKENS = 5 * 7


def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Which keys a query sees: none for the first, and none of the right half for the second head of image 1."""
    return ((q * 7 + k) % 3 > 0) & (q > 0) & ((k % 7 < 3) | (b * h < 1))


def steeper(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score * (1 + b) + h * (q - k) / 9


def everything(x: Tensor, bias: Tensor) -> list[Any]:
    """A learned table of offsets under a mask; shared heads; whole queries; whole keys."""
    q, four = tokens(x), tokens(x, 4)

    def learned(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + bias[h, q - k + TOKENS]

    mask, few = (create_block_mask(near, 2, 2, count, TOKENS, "cpu") for count in (TOKENS, 3))
    whole = bias[:3, :2].expand(2, 2, 3, 2)
    return [
        flex_attention(q, q.sin(), q, learned, mask, return_aux=AuxRequest(lse=True)),
        flex_attention(four, q[..., :1], q[..., :1], steeper, scale=0.3, enable_gqa=True),
        flex_attention(whole, q, q.sin(), steeper, few, return_aux=AuxRequest(lse=True)),
        flex_attention(q, whole, whole.cos()),
    ]


def _operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 5, 7, generator=generator, dtype=torch.float64)
    return x, torch.randn(4, 2 * TOKENS, generator=generator, dtype=torch.float64)


def _alone() -> dict[str, Tensor]:
    x, bias = _operands()
    with mock.patch.object(flex, "_validate_device"):
        return one_process(everything, [x], [bias])


def _differences(here: dict[str, Tensor], height: int, width: int) -> dict[str, float]:
    x, bias = _operands()
    with mock.patch.object(flex, "_validate_device"):
        return differences_from(here, everything, [x], [bias], height, width)


@pytest.mark.filterwarnings("ignore")
def test_as_in_one_process() -> None:  # on one mesh and alone once, as Dynamo takes its time on each rank
    (here,) = rank_group(1).run(_alone)
    for found in rank_group(4).run(_differences, here, 2, 2):
        assert {name: error for name, error in found.items() if not error <= 1e-11} == {}
        assert "gradient 1" in found


def _outcomes() -> list[Any]:
    x = torch.arange(2 * 4 * TOKENS).cos().view(2, 4, 5, 7)
    q = tokens(ff.shard(x, mesh(1, 2)))
    found: list[Any] = []
    for attend in (torch.compile(flex_attention), torch.compile(flex_attention, fullgraph=True)):
        found.append(float((attend(q, q, q).full() - flex_attention(*(tokens(x),) * 3)).abs().max()))
    row = q[0, 0, :, 0]
    short = create_block_mask(near, 2, 2, 3, TOKENS, "cpu")
    for refused in (
        lambda: flex_attention(q, q, q, lambda score, b, h, i, k: score + row[i]),
        lambda: flex_attention(q, q, q, block_mask=short),
        lambda: flex_attention(q.requires_grad_(), q, q),
    ):
        try:
            refused()
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


@pytest.mark.filterwarnings("ignore")
def test_compiled_it_runs_as_it_is_and_what_it_cannot_do_is_refused_by_name() -> None:
    for eager, whole, *refused in rank_group(2).run(_outcomes):
        assert eager < 1e-6 and whole < 1e-6
        assert [name for name, _ in refused] == ["UnsupportedOp", "ValueError", "NotImplementedError"]
        assert "flex_attention: " in refused[0][1] and "x.full()" in refused[0][1]
