"""A recipe on its ranks, ready to train: the one place that reads a whole `Strategy`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fullframe.errors import RecipeError
from fullframe.model.parallelize import ParallelModel
from fullframe.model.parallelize_for import parallelize_for
from fullframe.ranks.randomness import seed_everything
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.techniques.optimizers import build_optimizer
from fullframe.training.checkpoints.state import RunState
from fullframe.training.host import StepHost
from fullframe.training.loading.delivery import mesh_device
from fullframe.training.loading.listing import length_of
from fullframe.training.loading.loader import ShardedLoader, require_readable
from fullframe.training.step import TrainStep
from fullframe.wording import described


@dataclass(frozen=True, kw_only=True)
class Session:
    """What trains: the parallelized model, its step, and the run's state, all of the same parameters."""

    model: ParallelModel
    step: TrainStep
    state: RunState


def assemble(recipe: Recipe, strategy: Strategy, mesh: DeviceMesh) -> Session:
    """The session before its first step, from the recipe's seed; all ranks call it."""
    seed_everything(recipe.seed)
    plain = recipe.training_model().to(mesh_device(mesh))
    model, optimizer, step = prepare(recipe, strategy, mesh, plain)
    state = RunState(
        model=plain,
        optimizer=optimizer,
        loader=_loader(recipe, mesh),
        mesh=tuple(size for name, size in strategy.mesh.items() if name != "stages"),
        stages=strategy.stages,
        precision=strategy.precision,
        scale=step.scale,
        average=step.average,
    )
    return Session(model=model, step=step, state=state)


def prepare(
    recipe: Recipe,
    strategy: Strategy,
    mesh: DeviceMesh,
    plain: nn.Module,
    *,
    host: StepHost | None = None,
    data_parallel: Callable[..., nn.Module] = DistributedDataParallel,
) -> tuple[ParallelModel, Optimizer, TrainStep]:
    """`plain`, the recipe's model, parallelized, with its optimizer and its step, all as the strategy wants them."""
    if isinstance(plain, torch.jit.ScriptModule):
        raise RecipeError(
            "recipe.model() gives a ScriptModule, which takes no hooks and whose ops no rule can see; give the module "
            "that torch.jit.script was given"
        )
    model = parallelize_for(
        strategy,
        plain,
        mesh,
        unsupported=recipe.unsupported,
        find_unused_parameters=recipe.find_unused_parameters,
        data_parallel=data_parallel,
    )
    optimizer = build_optimizer(recipe.optimizer, model, strategy)
    return model, optimizer, TrainStep(model, recipe.loss, optimizer, strategy, cut=recipe.cut, host=host)


def _loader(recipe: Recipe, mesh: DeviceMesh) -> ShardedLoader:
    data = recipe.data()
    require_readable(data)
    if length_of(data) == 0:  # a DataLoader that shuffles says so in other words
        raise RecipeError("recipe.data() has no samples; does its folder or file list exist?")
    return ShardedLoader(host_loader(recipe, data), mesh, seed=recipe.seed)


def host_loader(recipe: Recipe, data: Dataset[Any], read: Dataset[Any] | None = None) -> "DataLoader[Any]":
    """What one process would read the recipe's data by, or `read`, which has the same samples under their numbers."""
    is_stream = isinstance(data, IterableDataset)
    if is_stream and recipe.sampler is not None:
        raise RecipeError(
            f"recipe.sampler gives numbers of samples, and recipe.data() a {type(data).__name__}, whose samples have "
            "none and come in an order of their own; leave the sampler out"
        )
    sampler = None if recipe.sampler is None else recipe.sampler(data)
    if recipe.sampler is not None and not isinstance(sampler, Iterable):
        raise RecipeError(
            f"recipe.sampler(data) must give a Sampler or a list, of numbers of samples, got {described(sampler)}"
        )
    return DataLoader(
        data if read is None else read,
        recipe.batch_size,
        shuffle=sampler is None and not is_stream,
        sampler=sampler,
        drop_last=True,  # every step is one of `batch_size` samples
        num_workers=recipe.workers,
        collate_fn=recipe.collate,
    )
