"""Arrays of fake tensors: known numbers, or as many times 1 where a loss asks for them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

import fullframe as ff
from fullframe.errors import RecipeError
from fullframe.simulation.fake.arrays import arrays_of_fakes
from fullframe.simulation.fake.outcomes import Outcomes
from fullframe.simulation.simulate import simulate
from tests.simulation.fake.test_outcomes import Remembering

BOXES = 7


def test_known_numbers_are_in_the_array_and_others_are_refused() -> None:
    fake = FakeTensorMode()
    outcomes = Outcomes(fake)
    with fake, Remembering(outcomes), arrays_of_fakes(outcomes.numbers):
        assert numpy.asarray(torch.arange(3)).tolist() == [0, 1, 2]
        with pytest.raises(DataDependentOutputException):
            torch.empty(2, 3).numpy()
        outcomes.in_loss = lambda: True
        assert torch.empty(2, 3).numpy().tolist() == [[1, 1, 1], [1, 1, 1]]
        assert torch.empty(2000, 3000).numpy().shape == (2000, 3000)
    assert "numpy" not in vars(FakeTensor) and torch.ones(2).numpy().tolist() == [1, 1]


def test_numbers_that_decide_of_nothing_are_not_wanted() -> None:
    fake = FakeTensorMode()
    outcomes = Outcomes(fake)
    with fake, Remembering(outcomes), arrays_of_fakes(outcomes.numbers):
        x = torch.empty(3)
        assert f"{x.sum():.2f} {torch.tensor(2.5):.1f} {x.sum()}" == "1.00 2.5 1.0"
        with pytest.raises(TypeError, match="unsupported format string"):
            format(x, ".2f")
        listed: Any = [[x.double().sum(), 2], [torch.tensor(3), x[:1].mean()]]
        made = torch.tensor(listed)
        assert (made.shape, made.dtype, type(made)) == ((2, 2), torch.float64, FakeTensor)
        with pytest.raises(DataDependentOutputException):
            made.tolist()
        assert torch.as_tensor([torch.tensor(3), 4]).tolist() == [3, 4]


class Queries(nn.Module):
    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.lift, self.reads = nn.Conv2d(3, 8, 3, 2, 1), reads

    def forward(self, x: Tensor) -> Tensor:
        found = self.lift(x).flatten(2).softmax(1).transpose(1, 2)
        return found * float(found.detach().numpy().max()) if self.reads else found


def by_scipy(cost: Tensor) -> Any:
    return linear_sum_assignment(cost.detach().cpu().numpy())


def by_number(cost: Tensor) -> Any:
    return numpy.arange(BOXES), numpy.arange(BOXES)


def matched(model: nn.Module, batch: dict[str, Tensor], pairs: Callable[[Tensor], Any] = by_scipy) -> Tensor:
    """As in the DETR family, image by image."""
    losses = []
    for found, boxes in zip(model(batch["image"]), batch["boxes"], strict=True):
        cost = torch.cdist(found[:, :4], boxes)
        rows, columns = map(torch.as_tensor, pairs(cost))
        losses.append((found[rows, :4] - boxes[columns]).abs().sum() + found[:, 4:].square().sum())
    return torch.stack(losses).mean()


def recipe(reads: bool = False, loss: Any = matched) -> ff.Recipe:
    draw = torch.Generator().manual_seed(0)
    sample = {"image": torch.randn(3, 64, 96, generator=draw), "boxes": torch.rand(BOXES, 4, generator=draw)}
    return ff.Recipe(
        model=lambda: Queries(reads),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: [sample] * 4,  # type: ignore[arg-type,return-value]
        batch_size=2,
    )


def test_a_loss_that_matches_by_scipy_is_simulated() -> None:
    found = simulate(recipe(), ff.Strategy(), "1xA100-80GB")
    assert [note.startswith("the loss reads numbers") for note in found.notes] == [True]
    alike = simulate(recipe(loss=partial(matched, pairs=by_number)), ff.Strategy(), "1xA100-80GB")
    assert not alike.notes and found.bytes == alike.bytes


def test_a_model_that_wants_an_array_is_refused_with_its_line() -> None:
    with pytest.raises(RecipeError, match=r"depends on the numbers .* at .*test_arrays.py, line \d+ \(return found \*"):
        simulate(recipe(reads=True), ff.Strategy(), "1xcpu")
