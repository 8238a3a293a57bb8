"""One sample is evaluated before the first step: what a recipe's `evaluate` gives wrongly is heard at once."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import RunError
from fullframe.ranks.channel import is_out_of_memory
from fullframe.recipe import Recipe
from fullframe.technique import Precision
from fullframe.training.evaluation import NEEDS_LESS, Tally, evaluation_data, measuring
from fullframe.training.loading.delivery import mesh_device
from fullframe.training.loading.loader import evaluation_batches
from fullframe.wording import first_line


def names_measured(recipe: Recipe, model: nn.Module, mesh: DeviceMesh, precision: Precision) -> set[str]:
    """The names that `recipe.evaluate` gives for the first sample; what it measures is dropped. All ranks call it.

    Raises RecipeError when a value is neither (sum, count) nor a torchmetrics Metric, RunError on the rank that runs
    out of memory.
    """
    assert recipe.evaluate is not None
    tally, data = Tally(), evaluation_data(recipe)
    try:
        with measuring(model, mesh_device(mesh).type, precision, None):
            batch, _ = next(iter(evaluation_batches(data, mesh, recipe.seed, collate=recipe.collate)))
            tally.add(recipe.evaluate(model, batch))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = first_line(error)
    else:
        return set(tally.of_part)
    finally:
        tally.reset()
    raise RunError(
        f"out of memory in the evaluation, tried on one sample before the first step ({problem}). {NEEDS_LESS}"
    )
