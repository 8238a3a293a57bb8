"""The loop: build what the recipe names, step, record, evaluate, checkpoint. Prints nothing; callers get records."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from fullframe.errors import RecipeError
from fullframe.model.fsdp import is_sharded, whole_value
from fullframe.model.parallelize import parallelize_for
from fullframe.processes.exit_reasons import restart_reason
from fullframe.processes.stop_signals import Stopped, StopSignals
from fullframe.ranks.agreement import from_all_ranks
from fullframe.ranks.mesh import init_mesh
from fullframe.ranks.randomness import seed_everything
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.techniques.optimizers import build_optimizer
from fullframe.training.checkpoints.state import RunState
from fullframe.training.checkpoints.writer import Checkpoints, load, newest_checkpoint
from fullframe.training.evaluation import evaluating
from fullframe.training.faults.divergence import require_same_numbers
from fullframe.training.faults.watchdog import Watchdog
from fullframe.training.loading.delivery import mesh_device
from fullframe.training.loading.loader import ShardedLoader, require_indexed
from fullframe.training.run_directory import Resume, RunDirectory, open_run, strategy_of_restart
from fullframe.training.step import TrainStep
from fullframe.training.steps import Steps, heard

Record = Mapping[str, Any]  # one step: step, loss, grad_norm, skipped, step_seconds, and what evaluate() measured


def fit(
    recipe: Recipe,
    strategy: Strategy,
    run_dir: str | Path,
    *,
    steps: int | None = None,
    resume: Resume = False,
    checkpoint_every: int = 100,
    keep_checkpoints: int = 3,
    check_every: int = 100,
    max_skipped: int = 10,
    hang_timeout: float = 300.0,
    on_record: Callable[[Record], None] = lambda record: None,
    on_message: Callable[[str], None] = lambda message: None,
) -> nn.Module:
    """Train to `steps` optimizer steps (the recipe's unless given) and return the trained plain model.

    All ranks call it; `run_dir` must be visible to all. `resume` goes on from the newest readable checkpoint, bit
    for bit where the mesh is the same; with "auto", and on ranks that a launcher has started again, if there is one.
    `on_record` and `on_message` are called on every rank, after the run directory was written.

    checkpoint_every: a checkpoint is written every so many steps and after the last one
    check_every:      steps between two comparisons of what all ranks should hold alike, also made before each
                      checkpoint; 0: never
    max_skipped:      steps in a row that may be skipped because the loss or a gradient is not finite
    hang_timeout:     seconds without progress after which the ranks say where they are and end; 0: never

    Asked to stop by SIGTERM, SIGUSR1 or Ctrl-C, it writes a checkpoint after the step and raises `Stopped`, a
    SystemExit. Raises MeshError, StrategyError, RecipeError, RunError or CheckpointError, on all ranks.
    """
    steps = recipe.steps if steps is None else steps
    mesh = init_mesh(height=strategy.height, width=strategy.width)
    reason = next((found for found in from_all_ranks(restart_reason()) if found), "")
    if reason:
        resume, strategy = "auto", strategy_of_restart(Path(run_dir), strategy)
    model, state = build(recipe, strategy, mesh)
    step = TrainStep(model, recipe.loss, state.optimizer, strategy)
    state.scale, state.average = step.scale, step.average
    run, goes_on = open_run(Path(run_dir), strategy, resume)

    def say(message: str) -> None:
        run.log(message)
        on_message(message)

    def written(path: Path) -> None:
        say(f"wrote {path}")

    with (
        StopSignals() as stop,
        Watchdog(run.path, hang_timeout, say) as watchdog,
        Checkpoints(run.checkpoints, keep_checkpoints, written, watchdog.beat) as checkpoints,
    ):
        if reason:
            say(f"started again: {reason}")
        if goes_on:
            _go_on(state, step, run, checkpoints, say)
        checkpoints.require_storable(state)  # now rather than at the first checkpoint
        todo = Steps(
            recipe=recipe,
            strategy=strategy,
            mesh=mesh,
            model=model,
            state=state,
            step=step,
            run=run,
            checkpoints=checkpoints,
            stop=stop,
            watchdog=watchdog,
            say=say,
            max_skipped=max_skipped,
        )
        for number in range(state.step + 1, steps + 1):
            last = number == steps
            record = todo.take(number)
            line = _line(number, record)
            if recipe.evaluate and (_due(number, recipe.evaluate_every) or last):
                line = _joined(line, todo.evaluate(number, last))
            run.append(line)
            on_record(line)
            asked = heard(stop, run) if record.hands or last else 0
            checkpoints.poll()
            saves = _due(number, checkpoint_every) or last or asked
            if _due(number, check_every) or (saves and check_every):
                require_same_numbers(state.model, mesh, number)
            if saves:
                watchdog.beat(f"copying the state of step {number}")
                checkpoints.save(state)
            if asked and not last:
                checkpoints.wait()
                say(f"stopped after step {number} by {signal.Signals(asked).name}; go on with --resume")
                raise Stopped(asked)
    plain = _whole(recipe, state.model)
    if recipe.finish and dist.get_rank() == 0:
        with evaluating(plain):
            recipe.finish(plain, run.path)
    return plain


def build(recipe: Recipe, strategy: Strategy, mesh: DeviceMesh) -> tuple[nn.Module, RunState]:
    """The parallelized model, and the run's state before its first step."""
    seed_everything(recipe.seed)
    plain = recipe.model().to(mesh_device(mesh))
    model = parallelize_for(
        strategy,
        plain,
        mesh,
        unsupported=recipe.unsupported,
        find_unused_parameters=recipe.find_unused_parameters,
    )
    optimizer = build_optimizer(recipe.optimizer, model, strategy)
    data = recipe.data()
    require_indexed(data)
    read = DataLoader(
        data,
        recipe.batch_size,
        shuffle=True,
        drop_last=True,  # every step is one of `batch_size` samples
        num_workers=recipe.workers,
        collate_fn=recipe.collate,
    )
    loader = ShardedLoader(read, mesh, seed=recipe.seed)
    return model, RunState(model=plain, optimizer=optimizer, loader=loader, mesh=tuple(mesh.mesh.shape))


def _whole(recipe: Recipe, model: nn.Module) -> nn.Module:
    """`model`, which one rank can run alone: a new one where its parameters are sharded. All ranks call it."""
    if not any(map(is_sharded, model.parameters())):
        return model
    state = {name: whole_value(value) for name, value in model.state_dict().items()}
    plain = recipe.model().to(next(model.parameters()).device)
    plain.load_state_dict(state)
    return plain


def _go_on(
    state: RunState, step: TrainStep, run: RunDirectory, checkpoints: Checkpoints, say: Callable[[str], None]
) -> None:
    checkpoint, problems = newest_checkpoint(run.checkpoints)
    for problem in problems:
        say(f"warning: {problem}")
    if checkpoint is None:
        say("no checkpoint was written yet; starting from the first step")
        run.forget_after(0)
        return
    if dist.get_world_size() > 2:
        # DDP orders its buckets anew after its first backward, and the order in which more than two ranks are added
        # up depends on it; the run that is resumed has had its first backward.
        step.rehearse(next(iter(state.loader)))
    for message in load(checkpoint, state):
        say(message)
    run.forget_after(state.step)
    checkpoints.forget_after(state.step)
    say(f"resumed after step {state.step}")


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _line(number: int, record: Any) -> dict[str, Any]:
    line = {"step": number, **asdict(record)}
    line["step_seconds"] = line.pop("seconds")
    del line["hands"]
    return line


def _joined(line: dict[str, Any], measured: dict[str, float]) -> dict[str, Any]:
    taken = sorted(set(line) & set(measured))
    if taken:
        raise RecipeError(f"evaluate() measures {', '.join(taken)}, a name that every record has; choose another")
    return line | measured
