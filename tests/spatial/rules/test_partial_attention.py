"""Dropout in attention, with split and with whole queries; values and gradients are in `test_attention.py`."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.corners import noise
from tests.spatial.rules.test_attention import tokens


def _dropped(height: int, width: int) -> list[Any]:
    """How much is kept; whether parts drop differently; the gradient's error against the slope; later draws."""
    found: list[Any] = []
    value = noise(1, 4, 12, 10)
    for whole_queries in (False, True):

        def attended(shift: Tensor | float, queries: Tensor, memory: Tensor) -> Tensor:
            torch.manual_seed(5)
            k = tokens(ff.shard(memory, mesh(height, width))) + shift
            q = tokens(queries if whole_queries else ff.shard(queries, mesh(height, width)))  # noqa: B023
            out = F.scaled_dot_product_attention(q, k.sin(), k, dropout_p=0.25)
            return out.full() if isinstance(out, ff.SpatialTensor) else out

        ones = attended(1.0, value * 0, value * 0)
        grid = ones[0, 0, :, 0].view(12, 10)
        differ = not torch.equal(grid[:6], grid[6:]) and not torch.equal(grid[:, :5], grid[:, 5:])
        slope = (attended(1e-6, value, value) - attended(-1e-6, value, value)).sum() / 2e-6
        shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
        attended(shift, value, value).sum().backward()
        error = abs(float(shift.grad - slope)) if shift.grad is not None else 1.0
        found += [float(ones.mean()), float(ones.std()), differ, error]
    return [*found, float(torch.rand(()))]


@pytest.mark.parametrize("height,width", [(1, 2), (2, 1), (2, 2)])
def test_dropout_has_torchs_distribution(height: int, width: int) -> None:
    answers = rank_group(height * width).run(_dropped, height, width)
    assert all(answer == answers[0] for answer in answers)
    spread = (0.25 / 0.75 / 120) ** 0.5  # of the mean of 120 weights that are kept with 0.75 and divided by it
    for mean, std, differ, error in (answers[0][:4], answers[0][4:8]):
        assert abs(mean - 1) < 0.02 and 0.7 < std / spread < 1.3 and differ and error < 1e-5
