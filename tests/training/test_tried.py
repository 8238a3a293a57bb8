"""What is wrong with a recipe's `evaluate` is said before the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullframe as ff
from fullframe.errors import RecipeError
from fullframe.ranks.mesh import init_mesh
from fullframe.strategy import Strategy
from fullframe.training.loop import fit
from fullframe.training.tried import names_measured
from tests.training import tiny


def measured_as(value: Any) -> Any:
    def evaluate(model: nn.Module, batch: Any) -> Any:
        return value

    return evaluate


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"iou": torch.tensor(0.5)},
            r"evaluate\(\) must give \(sum, count\) or a torchmetrics Metric for 'iou'",
        ),
        ({"loss": (1.0, 1)}, r"evaluate\(\) measures loss, a name that every record has; choose another"),
        (0.5, r"evaluate\(\) must return a dict"),
    ],
)
def test_before_the_first_step(value: Any, said: str, tmp_path: Path) -> None:
    recipe = tiny.recipe(evaluate=measured_as(value), evaluation_data=tiny.Frames)
    with pytest.raises(RecipeError, match=said):
        fit(recipe, Strategy(), tmp_path / "run", steps=3)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_names_are_told_and_nothing_is_kept() -> None:
    model, before = tiny.Network(), torch.get_rng_state()
    mesh = init_mesh()
    try:
        recipe = tiny.recipe(evaluate=tiny.evaluate, evaluation_data=tiny.Frames)
        found = names_measured(recipe, ff.parallelize(model, mesh), mesh, "fp32")
    finally:
        dist.destroy_process_group()
    assert found == {"entropy", "accuracy"} and model.training and torch.equal(torch.get_rng_state(), before)
