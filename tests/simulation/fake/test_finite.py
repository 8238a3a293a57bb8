"""Questions that have one answer as long as numbers are finite are answered, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fullframe.simulation.fake.finite import certain
from fullframe.simulation.fake.outcomes import Outcomes
from tests.simulation.fake.test_outcomes import Remembering

Program = Callable[[Tensor], Any]

ANSWERED: dict[str, Program] = {
    "isfinite": lambda x: bool(torch.isfinite(x.mean())),
    "all finite": lambda x: [bool(torch.isfinite(x).all()), bool((~torch.isfinite(x)).any())],
    "isnan": lambda x: [bool(torch.isnan(x).any()), int(torch.isnan(x).sum()), torch.isnan(x).any().item()],
    "isinf": lambda x: bool((torch.isinf(x) | torch.isnan(x)).any()),
    "itself": lambda x: [bool((x == x).all()), bool((x != x).any())],
    "infinity": lambda x: [bool((x.abs() < float("inf")).all()), bool((x == float("-inf")).any())],
    "counted": lambda x: [int(torch.isfinite(x).sum()) == x.numel(), bool(torch.isfinite(x).sum(1).eq(3).all())],
    "as bytes": lambda x: bool(torch.isnan(x).to(torch.uint8).any()),
}
UNANSWERED: dict[str, Program] = {
    "another": lambda x: bool((x > 0).any()),
    "of two": lambda x: bool((x == x + 1).any()),
    "beside one": lambda x: bool((torch.isnan(x) | (x > 0)).any()),
    "written to": lambda x: [found := torch.isnan(x), found.copy_(x > 0), bool(found.any())],
    "written to a view": lambda x: [found := torch.isnan(x), found[0].copy_(x[0] > 0), bool(found.any())],
}


@pytest.mark.parametrize("name", ANSWERED)
def test_the_answer_is_that_of_finite_numbers_and_nothing_is_taken_for_granted(name: str) -> None:
    real = ANSWERED[name](torch.ones(2, 3))
    outcomes = Outcomes(fake := FakeTensorMode())
    with fake, Remembering(outcomes):
        for _ in range(2):
            assert ANSWERED[name](torch.empty(2, 3)) == real
        assert certain(torch.empty(2, 3)) is None
    assert not outcomes.notes


@pytest.mark.parametrize("name", UNANSWERED)
def test_what_depends_on_finite_numbers_is_not_answered(name: str) -> None:
    fake = FakeTensorMode()
    with fake, Remembering(Outcomes(fake)), pytest.raises(DataDependentOutputException):
        UNANSWERED[name](torch.empty(2, 3))
