"""The loop: build what the recipe names, step, record, evaluate, checkpoint. Prints nothing; callers get records."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.arguments import checked
from fullframe.errors import ArgumentError, RecipeError, RunError, require_count
from fullframe.model.buffers import share_buffers, writable_buffers
from fullframe.model.sharding.values import is_sharded, whole_value
from fullframe.processes.cores import too_few
from fullframe.processes.exit_reasons import restart_reason
from fullframe.ranks import device
from fullframe.ranks.agreement import from_all_ranks, on_first_rank
from fullframe.ranks.last_words import with_last_words
from fullframe.ranks.mesh import init_mesh, start_process_group
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.techniques.evaluation_point import to_evaluation_point
from fullframe.training.checkpoints.writer import load, newest_checkpoint
from fullframe.training.evaluation import evaluating, evaluation_data
from fullframe.training.loading.listing import length_of, listing_of
from fullframe.training.observers import Observed, Observer, Observers
from fullframe.training.run_directory import OF_STEP, Resume, last_step, opened, strategy_of_restart
from fullframe.training.run_file import facts
from fullframe.training.same_start import require_same_options
from fullframe.training.session import Session, assemble
from fullframe.training.steps import Run, Steps, due, watched
from fullframe.wording import plural

_YEAR = 365 * 24 * 3600.0  # seconds
Record = Mapping[str, Any]  # one step: step, loss, grad_norm, skipped, step_seconds, and what evaluate() measured


@checked
@with_last_words()
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
    patience: int | None = None,
    hang_timeout: float = 300.0,
    on_record: Callable[[Record], None] = lambda record: None,
    on_message: Callable[[str], None] = lambda message: None,
    observers: Sequence[Observer] = (),
    about: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Train to `steps` optimizer steps (the recipe's unless given) under `strategy`; returns the trained plain model.

    All ranks call it; `run_dir` must be visible to all. `resume` goes on from the newest readable checkpoint, bit
    for bit where the mesh is the same and the kernels repeat themselves (CPUs' do; GPUs' under
    `torch.use_deterministic_algorithms`); with "auto", and on ranks that a launcher has started again, if there is one.
    `on_record` and `on_message` are called on every rank, after the run directory was written.

    checkpoint_every: a checkpoint is written every so many steps and after the last one
    keep_checkpoints: how many of the newest stay, beside the best by `recipe.best`
    check_every:      steps between two comparisons of what all ranks should hold alike, also made before each
                      checkpoint; 0: never
    max_skipped:      steps in a row that may be skipped because the loss or a gradient is not finite
    patience:         evaluations in a row without a better value of `recipe.best` after which the run ends; None: never
    hang_timeout:     seconds without progress after which the ranks say where they are and end; 0: only after a day
    observers:        told of each step on every rank, as `training.observers.Observer` says
    about:            what run.json is to say beside what is known here, e.g. {"recipe": path}

    Asked to stop by SIGTERM, SIGUSR1 or Ctrl-C, it writes a checkpoint after the step and raises `Stopped`, a
    SystemExit. Raises ArgumentError, MeshError, StrategyError, RecipeError, RunError or CheckpointError, on all ranks.
    """
    steps = recipe.steps if steps is None else steps
    every = _counts(steps=steps, checkpoint_every=checkpoint_every, check_every=check_every, max_skipped=max_skipped)
    start_process_group(_group_timeout(hang_timeout))
    about = {**facts(device=device.name(), world_size=dist.get_world_size(), steps=steps), **(about or {})}
    reason = _met(recipe, strategy, {"run_dir": str(run_dir), "resume": resume, "patience": patience, **every}, about)
    mesh = _mesh(strategy, hang_timeout)
    if reason:
        resume, strategy = "auto", strategy_of_restart(Path(run_dir), strategy, recipe.batch_size)
    session = assemble(recipe, strategy, mesh)
    place = opened(Path(run_dir), strategy, resume, recipe=str(about["recipe"]))
    with place as (directory, goes_on), directory.file.standing(about):
        with watched(directory, keep_checkpoints, hang_timeout, on_message) as run:
            if reason:
                run.say(f"started again: {reason}")
            _take_up(session, run, strategy, goes_on, steps)
            looking = Observers(observers)
            todo = Steps(recipe, strategy, mesh, session, run, steps, max_skipped, patience, looking)
            with looking.looking_on(_observed(recipe, session, strategy, mesh, run)):
                _train(recipe, todo, steps, run, looking, checkpoint_every, check_every, on_record)
        to_evaluation_point(session.state.optimizer)
        plain = _finished(recipe, session.state.model, strategy, directory.path)
    return plain


def _counts(**numbers: int) -> dict[str, int]:
    """The numbers by name; raises ArgumentError where one is no whole number, or less than 0."""
    for name, value in numbers.items():
        require_count(ArgumentError, name, value, least=0)
    return numbers


def _met(recipe: Recipe, strategy: Strategy, options: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Why the ranks were started again, "" where they were not; once all are known to be started alike."""
    reason = next((found for found in from_all_ranks(restart_reason()) if found), "")
    known = {**options, "resume": "auto"} if reason else options  # a machine may have come later, by other words
    if recipe.evaluate is not None:  # now rather than at the first evaluation
        data: Any = evaluation_data(recipe)
        known = {
            **known,
            "len(recipe.evaluation_data())": length_of(data),
            "the checksum of what recipe.evaluation_data() lists": listing_of(data),
        }
    require_same_options(recipe, strategy, known, about)
    _require_measure(recipe, options["patience"])
    return reason


def _finished(recipe: Recipe, model: nn.Module, strategy: Strategy, run_dir: Path) -> nn.Module:
    """The trained plain model, the same on all ranks, after the recipe's own end with it on rank 0."""
    if strategy.data > 1:  # each replica has its own running statistics
        share_buffers(model)
    plain = _whole(recipe, model, strategy)
    if recipe.finish and dist.get_rank() == 0:
        with evaluating(plain):
            recipe.finish(plain, run_dir)
    return plain


def _train(
    recipe: Recipe,
    todo: Steps,
    steps: int,
    run: Run,
    looking: Observer,
    checkpoint_every: int,
    check_every: int,
    on_record: Callable[[Record], None],
) -> None:
    run.directory.file.step(todo.done, now=True)
    if todo.done >= steps:
        done = f"the run has all of its {plural(steps, 'step')} already"
        run.say(f"{done}; more steps go on, `fullframe export` writes the weights")
    elif _made_up_for(recipe, todo, run, looking) and (ended := todo.stops_early):
        _stop_early(run, todo.done, ended)
        return
    elif ended := todo.stops_early:
        run.directory.file.update(reason=f"stopped early: {ended}")
        run.say(f"nothing is left to do: {ended}; a larger --patience goes on")
        return
    first, compiled, told = todo.done + 1, todo.compiled, ""
    if compiled is not None:
        compiled.programs.tell = run.say
    for number in range(first, steps + 1):
        last = number == steps
        looking.before_step(number)
        record = todo.take(number)
        line = {**_line(number, record), "learning_rate": todo.learning_rate}
        best, left_out = None, False
        if recipe.evaluate and (due(number, recipe.evaluate_every) or last) and not todo.stuck:
            try:
                measured = todo.evaluate(number, last)
                line, left_out = _joined(line, measured), not measured
                best = todo.better(number, measured)
            except BaseException:
                run.directory.append(line)  # the step itself was taken
                raise
        run.directory.append(line)
        ended = "" if last else todo.stops_early
        last = last or bool(ended)
        run.directory.file.step(number, now=last)
        looking.after_step(number, line)
        on_record(line)
        if todo.stuck:
            raise RunError(todo.stuck)
        if compiled is not None and todo.done <= first + 1 and compiled.summary != told:
            told = compiled.summary  # a block that changes itself at its first call is compiled at the second
            run.say(told)
        todo.secure(number, record.hands > 0 or left_out, last, checkpoint_every, check_every, best)
        if ended:
            _stop_early(run, number, ended)
            return


def _made_up_for(recipe: Recipe, todo: Steps, run: Run, looking: Observer) -> bool:
    """Make the evaluation after the last step, where it was due and the run was stopped, or out of memory, in it.

    Without it the best checkpoint, and where the run ends early, would be others than those of a run that went through.
    """
    number, line = todo.done, on_first_rank(run.directory.last_record)
    was_due = recipe.evaluate is not None and due(number, recipe.evaluate_every)
    if not was_due or line.get("step") != number or not OF_STEP.issuperset(line):
        return False
    run.say(f"making the evaluation after step {number}, which the run had left out")
    measured = todo.evaluate(number, last=False)
    best = todo.better(number, measured)
    if measured:
        run.directory.put_in_place(_joined(line, measured))
        looking.after_step(number, line | measured)
    todo.secure(number, asks=True, last=False, checkpoint_every=0, check_every=0, best=best)
    return bool(measured)


def _stop_early(run: Run, number: int, why: str) -> None:
    """Say it where it will be looked for, once all is written."""
    run.checkpoints.wait()
    run.directory.append({"after_step": number, "stopped_early": why})
    run.directory.file.update(reason=f"stopped early: {why}")
    run.say(f"stopped early after step {number}: {why}")


def _require_measure(recipe: Recipe, patience: int | None) -> None:
    """Raises RecipeError where `patience` cannot be counted."""
    if patience is None:
        return
    require_count(RecipeError, "patience", patience)
    if recipe.best is None:
        raise RecipeError(
            f"patience is {patience}, and no measure says what is better; name one, as in Recipe(best='miou')"
        )


def _observed(recipe: Recipe, session: Session, strategy: Strategy, mesh: DeviceMesh, run: Run) -> Observed:
    return Observed(
        recipe=recipe,
        session=session,
        strategy=strategy,
        mesh=mesh,
        run_dir=run.directory.path,
        rank=dist.get_rank(),
        say=run.say,
        append=run.directory.append,
    )


def _mesh(strategy: Strategy, hang_timeout: float) -> DeviceMesh:
    sizes = {"depth": strategy.depth, "stages": strategy.stages}
    return init_mesh(strategy.height, strategy.width, **sizes, timeout_seconds=_group_timeout(hang_timeout))


def _group_timeout(hang_timeout: float) -> float:
    """How long a rank waits in the process group: for one that gets on, and until after the watch on hangs."""
    if not 0 <= hang_timeout <= _YEAR:
        raise ArgumentError(f"hang_timeout must be seconds from 0, which is never, to {_YEAR:.0f}, got {hang_timeout}")
    return max(1800.0, 2 * hang_timeout) if hang_timeout else 24 * 3600.0


def _whole(recipe: Recipe, model: nn.Module, strategy: Strategy) -> nn.Module:
    """`model`, which one rank can run alone: a new one where it is sharded or on stages. All ranks call it."""
    if strategy.stages == 1 and not any(map(is_sharded, model.parameters())):
        return model
    state = {name: whole_value(value) for name, value in model.state_dict().items()}
    plain = recipe.model().to(next(model.parameters()).device)
    trained = dict(model.named_modules())
    for path, module in plain.named_modules():
        owner = trained.get(path, module)
        for name in owner._buffers.keys() - module._buffers.keys():  # which a forward has made
            module.register_buffer(name, owner._buffers[name], name not in owner._non_persistent_buffers_set)
    with writable_buffers(plain):
        plain.load_state_dict(state)
    return plain


def _take_up(session: Session, run: Run, strategy: Strategy, goes_on: bool, steps: int) -> None:
    if goes_on:
        _go_on(session, run)
    for trouble in _troubles_of_machine(strategy):
        run.say(f"warning: {trouble}")
    run.checkpoints.require_storable(session.state)  # now rather than at the first checkpoint
    if goes_on and session.state.step >= steps:
        run.directory.file.is_done = True
    elif (changed := run.directory.take_up(strategy)) and goes_on:
        run.say(f"warning: the run goes on otherwise than it was started: {changed}")


def _troubles_of_machine(strategy: Strategy) -> Iterator[str]:
    if strategy.precision == "tf32" and device.kind_of_job() == "cpu":
        yield "the CPU has no TF32 units, so precision tf32 computes in fp32 here"
    if device.is_in_use() and (few := too_few(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))):
        yield few


def _go_on(session: Session, run: Run) -> None:
    state = session.state
    checkpoint, problems = newest_checkpoint(run.directory.checkpoints)
    for problem in problems:
        run.say(f"warning: {problem}")
    if checkpoint is None:
        run.say("no checkpoint was written yet; starting from the first step")
        run.directory.forget_after(0)
        return
    if dist.get_world_size() > 2 and session.model.average_gradients:  # else it would hold all gradients at once
        # DDP orders its buckets anew after its first backward, and the order in which more than two ranks are added
        # up depends on it; the run that is resumed has had its first backward.
        session.step.rehearse(next(iter(state.loader)))
    for message in load(checkpoint, state):
        run.say(message)
    run.directory.forget_after(state.step)
    run.checkpoints.forget_after(state.step)
    run.say(f"resumed after step {state.step}")
    recorded = on_first_rank(lambda: last_step(run.directory.path))
    if recorded < state.step:  # a folder that was copied under way, or a machine that lost its power
        run.say(f"warning: metrics.jsonl ends with step {recorded}; what was recorded of the steps since is lost")


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
