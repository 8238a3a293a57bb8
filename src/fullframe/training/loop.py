"""The loop: build what the recipe names, step, record, evaluate, checkpoint. Prints nothing; callers get records."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from fullframe.errors import RecipeError
from fullframe.spatial.mesh import init_mesh
from fullframe.spatial.parallelize import parallelize
from fullframe.strategy import Recipe, Strategy
from fullframe.training.agreement import from_all_ranks
from fullframe.training.checkpoint import RunState, load_newest_checkpoint, save_checkpoint
from fullframe.training.loader import ShardedLoader, evaluation_batches, mesh_device
from fullframe.training.randomness import kept_random_state, mixed_seed, seed_everything
from fullframe.training.run_directory import RunDirectory, open_run
from fullframe.training.step import TrainStep

Record = Mapping[str, Any]  # one step: step, loss, grad_norm, skipped, step_seconds, and what evaluate() measured


def fit(
    recipe: Recipe,
    strategy: Strategy,
    run_dir: str | Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    checkpoint_every: int = 100,
    keep_checkpoints: int = 3,
    on_record: Callable[[Record], None] = lambda record: None,
    on_message: Callable[[str], None] = lambda message: None,
) -> nn.Module:
    """Train to `steps` optimizer steps (the recipe's unless given) and return the trained plain model.

    All ranks call it; `run_dir` must be visible to all. `resume` goes on from the newest readable checkpoint, bit
    for bit where the mesh is the same. `on_record` and `on_message` are called on every rank, after the
    run directory was written. A checkpoint is written every `checkpoint_every` steps and after the last one.

    Raises MeshError, StrategyError, RecipeError, RunError or CheckpointError, on all ranks.
    """
    steps = recipe.steps if steps is None else steps
    mesh = init_mesh(height=strategy.height, width=strategy.width)
    model, state = build(recipe, mesh)
    step = TrainStep(model, recipe.loss, state.optimizer, strategy)
    run = open_run(Path(run_dir), strategy, resume)

    def say(message: str) -> None:
        run.log(message)
        on_message(message)

    if resume:
        _go_on(state, step, run, say)
    for number, batch in zip(range(state.step + 1, steps + 1), _endless(state.loader), strict=False):
        _set_learning_rate(state.optimizer, recipe.schedule(number))
        seed_everything(_step_seed(recipe.seed, mesh, number))
        record = step(batch)
        state.step = number
        line = _line(number, record)
        if record.skipped:
            say(f"step {number} skipped: loss {record.loss}, gradient norm {record.grad_norm}; nothing was updated")
        if recipe.evaluate and (number % recipe.evaluate_every == 0 or number == steps):
            line = _joined(line, evaluate(recipe, state.model, mesh))
        run.append(line)
        on_record(line)
        if number % checkpoint_every == 0 or number == steps:
            say(f"wrote {save_checkpoint(state, run.checkpoints, keep_checkpoints)}")
    if recipe.finish and dist.get_rank() == 0:
        with _evaluating(state.model):
            recipe.finish(state.model, run.path)
    return state.model


def build(recipe: Recipe, mesh: DeviceMesh) -> tuple[nn.Module, RunState]:
    """The parallelized model, and the run's state before its first step."""
    seed_everything(recipe.seed)
    plain = recipe.model().to(mesh_device(mesh))
    model = parallelize(
        plain, mesh, unsupported=recipe.unsupported, find_unused_parameters=recipe.find_unused_parameters
    )
    optimizer = recipe.optimizer(model.parameters())
    read = DataLoader(recipe.data(), recipe.batch_size, shuffle=True, num_workers=recipe.workers)
    loader = ShardedLoader(read, mesh, seed=recipe.seed)
    return model, RunState(model=plain, optimizer=optimizer, loader=loader)


def evaluate(recipe: Recipe, model: nn.Module, mesh: DeviceMesh) -> dict[str, float]:
    """What `recipe.evaluate` measures over the whole of its data, the same on all ranks; {} without one."""
    if recipe.evaluate is None or recipe.evaluation_data is None:
        return {}
    mine: dict[str, list[float]] = {}  # name: [sum, count] of this replica's samples
    with _evaluating(model):
        for batch in evaluation_batches(recipe.evaluation_data(), mesh, recipe.seed):
            for name, (value, count) in recipe.evaluate(model, batch).items():
                _add(mine, name, float(value), float(count))
    # The ranks of a replica all hold their replica's sum and count, so their number cancels out.
    totals: dict[str, list[float]] = {}
    for measured in from_all_ranks(mine):
        for name, total in measured.items():
            _add(totals, name, *total)
    return {name: total / count if count else float("nan") for name, (total, count) in totals.items()}


def _add(totals: dict[str, list[float]], name: str, value: float, count: float) -> None:
    before = totals.setdefault(name, [0.0, 0.0])
    totals[name] = [before[0] + value, before[1] + count]


def _go_on(state: RunState, step: TrainStep, run: RunDirectory, say: Callable[[str], None]) -> None:
    contents, problems = load_newest_checkpoint(run.checkpoints)
    for problem in problems:
        say(f"warning: {problem}")
    if contents is None:
        say("no checkpoint was written yet; starting from the first step")
        run.forget_after(0)
        return
    if dist.get_world_size() > 2:
        # DDP orders its buckets anew after its first backward, and the order in which more than two ranks are added
        # up depends on it; the run that is resumed has had its first backward.
        step.rehearse(next(iter(state.loader)))
    state.load_state_dict(contents)
    run.forget_after(state.step)
    say(f"resumed after step {state.step}")


def _set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def _endless(loader: ShardedLoader) -> Iterator[Any]:
    while True:
        yield from loader


def _line(number: int, record: Any) -> dict[str, Any]:
    line = {"step": number, **asdict(record)}
    line["step_seconds"] = line.pop("seconds")
    return line


def _joined(line: dict[str, Any], measured: dict[str, float]) -> dict[str, Any]:
    taken = sorted(set(line) & set(measured))
    if taken:
        raise RecipeError(f"evaluate() measures {', '.join(taken)}, a name that every record has; choose another")
    return line | measured


def _step_seed(seed: int, mesh: DeviceMesh, step: int) -> int:
    """Dropout follows from seed, step and replica alone, so that a step can be repeated, also by other processes.

    Replicas draw different masks, the ranks of one replica start from the same state.
    """
    return mixed_seed(seed, mesh.get_local_rank("data"), step)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards modes and random states are as before."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), kept_random_state():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
