"""A few steps of a recipe on this rank, as `fullframe train` takes them, with everything noted."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset, Subset

from fullframe.doctor.judgement.judge import judge
from fullframe.doctor.probes.notes import (
    End,
    Event,
    Memory,
    Notebook,
    Oddity,
    Repeated,
    Scaling,
    file_of_rank,
    read_notes,
)
from fullframe.doctor.probes.sketches import checksum_of_batch
from fullframe.doctor.probes.training import Probes
from fullframe.doctor.rehearsal.small import is_small, made_small
from fullframe.ranks.agreement import from_all_ranks, on_first_rank
from fullframe.ranks.mesh import init_mesh
from fullframe.ranks.randomness import mixed_seed, seed_everything
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.techniques.optimizers import set_learning_rate
from fullframe.training.evaluation import evaluate
from fullframe.training.session import Session, assemble
from fullframe.training.step import StepRecord
from fullframe.training.steps import endless

SMALL_STEPS, WHOLE_STEPS = 5, 3
SMALL, WHOLE = "small", "whole"  # folders of notes


def rehearse(
    recipe: Recipe,
    strategy: Strategy,
    folder: Path,
    *,
    small: bool = True,
    whole: bool = True,
    measure: Callable[[], dict[str, float]] = dict,
) -> None:
    """Take steps of the recipe made small, then, unless these show an error, of the recipe as it is.

    All ranks call it; they write their notes into `folder`/small and `folder`/whole. `measure` says what a rank has
    held at most, in bytes. Raises what the recipe raises.
    """
    mesh = init_mesh(strategy.height, strategy.width, depth=strategy.depth, stages=strategy.stages)
    shrinks = small and not on_first_rank(lambda: _is_small(recipe))
    steps = WHOLE_STEPS if shrinks else SMALL_STEPS
    if shrinks:
        small_recipe = made_small(recipe, fewer_layers=strategy.recompute == "none" and strategy.stages == 1)
        _steps(small_recipe, strategy, mesh, folder / SMALL, SMALL_STEPS, repeat=True)
        with closing(Notebook(file_of_rank(folder / SMALL, dist.get_rank()))) as notebook:
            notebook.note(End(reason="enough"))
        from_all_ranks(None)  # so that the first rank reads the notes of all
        ranks = dist.get_world_size()
        found = on_first_rank(lambda: judge(read_notes(folder / SMALL, ranks), at_full_size=False))
        whole = whole and not any(finding.severity == "error" for finding in found)
    if whole or not shrinks:
        _steps(recipe, strategy, mesh, folder / WHOLE, steps, repeat=not shrinks, measure=measure)


def _steps(
    recipe: Recipe,
    strategy: Strategy,
    mesh: DeviceMesh,
    folder: Path,
    steps: int,
    *,
    repeat: bool,
    measure: Callable[[], dict[str, float]] = dict,
) -> None:
    rank = dist.get_rank()
    with closing(Notebook(file_of_rank(folder, rank))) as notebook:
        note = notebook.note
        probes = Probes(note, rank=rank, started=dist.get_world_size())
        probes.replica = lambda: mesh.get_local_rank("data")
        session = assemble(recipe, strategy, mesh)
        with probes.attached():
            batches = endless(session.state.loader)
            first, batch = _step(recipe, mesh, session, batches, 1, note)
            contents = checksum_of_batch(batch)
            del batch
            for number in range(2, steps + 1):
                _step(recipe, mesh, session, batches, number, note)
        note(Memory(measured=measure()))
        _evaluate(recipe, strategy, mesh, session)
        if repeat:
            del session, batches
            again = assemble(recipe, strategy, mesh)
            second, batch = _step(recipe, mesh, again, endless(again.state.loader), 1, lambda event: None)
            both = contents, checksum_of_batch(batch)
            note(Repeated(first=_numbers(first), second=_numbers(second), contents=both))


def _step(
    recipe: Recipe,
    mesh: DeviceMesh,
    session: Session,
    batches: Iterator[Any],
    number: int,
    note: Callable[[Event], None],
) -> tuple[StepRecord, Any]:
    batch = next(batches)
    set_learning_rate(session.state.optimizer, recipe.schedule(number))
    seed_everything(mixed_seed(recipe.seed, mesh.get_local_rank("data"), number))
    scale = session.step.scale
    record = session.step(batch)
    if scale is not None:
        for action in ("scale", "step", "update"):
            note(Scaling(action=action, scale=scale.value))
    elif record.skipped:
        text = f"step {number} has loss {record.loss} and gradient norm {record.grad_norm}"
        note(Oddity(kind="nothing updated", text=text))
    return record, batch


def _is_small(recipe: Recipe) -> bool:
    try:
        return is_small(recipe.data())
    except Exception:  # which all ranks will meet together
        return True


def _numbers(record: StepRecord) -> dict[str, float]:
    return {"loss": record.loss, "grad_norm": record.grad_norm}


def _evaluate(recipe: Recipe, strategy: Strategy, mesh: DeviceMesh, session: Session) -> None:
    """One sample on each replica, so that an error shows now and not after the first hundred steps."""
    data = recipe.evaluation_data
    if data is None:
        return
    few = dataclasses.replace(recipe, evaluation_data=lambda: _first(data(), mesh.size(0)))
    evaluate(few, session.model, mesh, precision=strategy.precision, average=session.state.average)


def _first(dataset: Any, samples: int) -> Any:
    if isinstance(dataset, IterableDataset):
        return list(islice(dataset, samples))
    return Subset(dataset, range(min(samples, len(dataset))))
