"""The steps of a run: read, seeded, taken, taken again where memory ran out, counted where they were skipped."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import RunError
from fullframe.processes.exit_reasons import StartAgain
from fullframe.processes.stop_signals import StopSignals
from fullframe.ranks.agreement import from_all_ranks, on_any_rank
from fullframe.ranks.randomness import mixed_seed, seed_everything
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.techniques.optimizers import set_learning_rate
from fullframe.training.checkpoints.state import RunState
from fullframe.training.checkpoints.writer import Checkpoints
from fullframe.training.evaluation import evaluate
from fullframe.training.faults.nonfinite import origin_of_nonfinite
from fullframe.training.faults.out_of_memory import attempt, batch_norm_warning, by_one_rank, cut_finer
from fullframe.training.faults.watchdog import Watchdog
from fullframe.training.loading.loader import ShardedLoader
from fullframe.training.run_directory import RunDirectory, write_strategy
from fullframe.training.step import StepRecord, TrainStep


@dataclass(kw_only=True)
class Steps:
    """`take(number)` reads the next batch, takes the step and leaves `state` after it.

    Raises RunError on all ranks after `max_skipped` skipped steps in a row, and on the rank that runs out of memory
    where nothing can be cut finer; StartAgain where the launcher is to start the ranks again.
    """

    recipe: Recipe
    strategy: Strategy
    mesh: DeviceMesh
    model: nn.Module  # what `parallelize` returned
    state: RunState
    step: TrainStep
    run: RunDirectory
    checkpoints: Checkpoints
    stop: StopSignals
    watchdog: Watchdog
    say: Callable[[str], None]
    max_skipped: int

    def __post_init__(self) -> None:
        self._batches = _endless(self.state.loader)
        self._skipped_in_a_row = 0

    def take(self, number: int) -> StepRecord:
        """The next step of the run."""
        self.watchdog.beat(f"reading the batch of step {number}")
        self._unread = self.state.loader.state_dict()
        batch = next(self._batches)
        self.watchdog.beat(f"step {number}")
        set_learning_rate(self.state.optimizer, self.recipe.schedule(number))
        record = self._attempt(number, batch)
        self.state.step = number
        self._count(number, record, batch)
        return record

    def evaluate(self, number: int, last: bool) -> dict[str, float]:
        """What the recipe measures after a step; {} when the run is asked to stop meanwhile and goes on later."""

        def progress() -> None:
            self.watchdog.beat(f"evaluating after step {number}")
            if not last and on_any_rank(bool(self.stop.number)):
                raise _LeftOut

        average, precision = self.state.average, self.strategy.precision
        try:
            progress()
            return evaluate(self.recipe, self.model, self.mesh, precision=precision, average=average, progress=progress)
        except _LeftOut:
            self.say(f"the evaluation after step {number} is left out, as the run is asked to stop")
            return {}

    def _attempt(self, number: int, batch: Any) -> StepRecord:
        while True:
            self._seed(number)
            record = attempt(self.step, batch, hand=bool(self.stop.number or self.run.trouble))
            if isinstance(record, StepRecord):
                return record
            self._cut_finer(number, problem=record)

    def _cut_finer(self, number: int, problem: str) -> None:
        """Go on with more microbatches: here, or after a new start from the state before the step."""
        self.strategy = cut_finer(self.strategy, self.recipe.batch_size, problem)
        count = self.strategy.microbatches
        text = f"out of memory in step {number} ({problem}): going on with {count} microbatches"
        text += batch_norm_warning(self.state.model)
        if dist.get_world_size() == 1:
            write_strategy(self.run.path, self.strategy)
            self.step.slice_finer(count)
            self.say(text)
            return
        if self.strategy.shard_parameters or self.strategy.shard_optimizer:
            text += "; from the last checkpoint, for no rank holds the whole state"
            by_one_rank(lambda: write_strategy(self.run.path, self.strategy))
        else:
            by_one_rank(self._write_state)
        raise StartAgain(text, remedy=f"--resume --microbatches {count}")

    def _write_state(self) -> None:
        self.state.loader.load_state_dict(self._unread)
        self.checkpoints.save_alone(self.state)
        write_strategy(self.run.path, self.strategy)

    def _count(self, number: int, record: StepRecord, batch: Any) -> None:
        """Stop when nothing but skipped steps is left; an fp16 scale that is still falling is not that."""
        if not record.skipped:
            self._skipped_in_a_row = 0
            return
        self.say(f"step {number} skipped: loss {record.loss}, gradient norm {record.grad_norm}; nothing was updated")
        if math.isfinite(record.loss) and self.step.scale is not None and self.step.scale.falling:
            return
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.max_skipped:
            self._seed(number)
            origin = origin_of_nonfinite(self.state.model, batch, lambda: self.step.forward(batch))
            raise RunError(
                f"{self._skipped_in_a_row} steps in a row were skipped up to step {number}; {origin}. Lower the "
                "learning rate, clip gradients (clip_norm) or mend the data, and go on with --resume, or allow more "
                "by --max-skipped"
            )

    def _seed(self, number: int) -> None:
        """Dropout follows from seed, step and replica alone, so that a step can be repeated, also by other processes.

        Replicas draw different masks, the ranks of one replica start from the same state.
        """
        seed_everything(mixed_seed(self.recipe.seed, self.mesh.get_local_rank("data"), number))


class _LeftOut(Exception):
    """An evaluation that would keep a run from stopping soon."""


def heard(stop: StopSignals, run: RunDirectory) -> int:
    """Why hands were raised: the signal by which any rank was asked to stop, 0 for none; all ranks call it.

    Raises RunError on all ranks when one cannot write into the run directory.
    """
    asked = 0
    for number, trouble in from_all_ranks((stop.number, run.trouble)):
        if trouble:
            raise RunError(trouble)
        asked = asked or number
    return asked


def _endless(loader: ShardedLoader) -> Iterator[Any]:
    while True:
        yield from loader
