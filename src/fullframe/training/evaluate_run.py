"""A run's checkpoint, evaluated as the training did it, without training: on the run's mesh or on another."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fullframe.errors import RecipeError, RunError
from fullframe.ranks.channel import is_out_of_memory
from fullframe.ranks.mesh import init_mesh
from fullframe.ranks.randomness import seed_everything
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.training.checkpoints.state import has_averages
from fullframe.training.checkpoints.writer import checkpoint_of, load_weights
from fullframe.training.evaluation import NEEDS_LESS, evaluate, evaluation_data
from fullframe.training.loading.delivery import mesh_device
from fullframe.training.loading.listing import length_of
from fullframe.training.session import prepare
from fullframe.wording import first_line


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What `evaluate_run` measured; equal on all ranks."""

    step: int  # after which the weights are
    averaged: bool  # the parameters were their moving averages
    measured: dict[str, float]
    problems: list[str]  # what is wrong with newer checkpoints


def evaluate_run(
    recipe: Recipe,
    strategy: Strategy,
    run_dir: Path,
    *,
    step: int | None = None,
    best: bool = False,
    raw: bool = False,
    progress: Callable[[int, int | None], None] = lambda done, samples: None,
) -> Evaluated:
    """What `recipe.evaluate` measures of the run's newest readable checkpoint, the one after `step` or the `best`.

    All ranks call it; of `strategy` what `forward_only` keeps is taken. The parameters are their moving averages where
    the run keeps them, as in training, unless their `raw` last values are asked for. `progress` is told of how many
    samples are done, and of how many where the data tells, on all ranks equally often.

    Raises RecipeError when the recipe evaluates nothing, RunError when there is no such checkpoint or memory runs out,
    CheckpointError when it is unreadable or of another model, on all ranks but where one alone runs out of memory.
    """
    recipe = _evaluating_only(recipe)
    mesh = init_mesh(strategy.height, strategy.width, depth=strategy.depth, stages=strategy.stages)
    data = evaluation_data(recipe)
    samples, done = length_of(data), 0
    checkpoint, problems = checkpoint_of(run_dir, step=step, best=best)
    averaged = not raw and has_averages(checkpoint.manifest)
    seed_everything(recipe.seed)
    plain = recipe.model().to(mesh_device(mesh)).requires_grad_(False)
    model, _, _ = prepare(recipe, forward_only(strategy), mesh, plain)
    load_weights(checkpoint, plain, averaged)

    def advance() -> None:
        nonlocal done
        done += strategy.data
        done = done if samples is None else min(done, samples)
        progress(done, samples)

    recipe = replace(recipe, evaluation_data=lambda: data)
    try:
        measured = evaluate(recipe, model, mesh, precision=strategy.precision, progress=advance)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = first_line(error)
        raise RunError(f"out of memory in the evaluation ({problem}). {NEEDS_LESS}") from error
    return Evaluated(step=checkpoint.manifest.step, averaged=averaged, measured=measured, problems=problems)


def _evaluating_only(recipe: Recipe) -> Recipe:
    """The recipe with an optimizer that keeps no state; nothing is updated."""
    if recipe.evaluate is None:
        raise RecipeError("the recipe evaluates nothing; give it evaluate and evaluation_data")
    return replace(recipe, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))


def forward_only(strategy: Strategy) -> Strategy:
    """The strategy without what bears on gradients, their update and the memory for both."""
    kept = ("precision", "shard_parameters", "compile")
    fields: dict[str, Any] = {**strategy.mesh, **{name: getattr(strategy, name) for name in kept}}
    return Strategy(**fields)
