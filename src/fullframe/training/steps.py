"""The steps of a run: read, seeded, taken, taken again where memory ran out, counted where they were skipped."""

import itertools
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import RunError
from fullframe.model.compiled.blocks import CompiledBlocks
from fullframe.processes.exit_reasons import StartAgain
from fullframe.processes.stop_signals import Stopped, StopSignals
from fullframe.ranks.agreement import from_all_ranks, on_any_rank, on_first_rank
from fullframe.ranks.channel import is_out_of_memory
from fullframe.ranks.randomness import mixed_seed, seed_everything
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.techniques.evaluation_point import at_evaluation_point
from fullframe.techniques.optimizers import set_learning_rate
from fullframe.training.changes import Changes
from fullframe.training.checkpoints.best import Best, better, in_vain
from fullframe.training.checkpoints.writer import Checkpoints
from fullframe.training.evaluation import NEEDS_LESS, evaluate
from fullframe.training.faults.divergence import require_same_numbers
from fullframe.training.faults.nonfinite import origin_of_nonfinite
from fullframe.training.faults.out_of_memory import (
    attempt,
    batch_norm_warning,
    by_one_rank,
    by_one_that_is_through,
    cut_finer,
    free_memory,
    let_go,
)
from fullframe.training.faults.watchdog import Watchdog
from fullframe.training.loading.loader import ShardedLoader
from fullframe.training.microbatches import fresh
from fullframe.training.observers import Observer
from fullframe.training.run_directory import RunDirectory, write_strategy
from fullframe.training.session import Session
from fullframe.training.step import StepRecord
from fullframe.wording import first_line, plural

_runs = itertools.count(1)  # of this process, as of every other rank's: what is done once is done once a run


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is around the steps of a run: where it writes, what can stop it, who watches that it gets on."""

    directory: RunDirectory
    checkpoints: Checkpoints
    stop: StopSignals
    watchdog: Watchdog
    say: Callable[[str], None]

    @property
    def wants_attention(self) -> bool:
        """Whether this rank has something to tell the others."""
        return bool(self.stop.number or self.directory.trouble)

    def heard(self) -> int:
        """Why hands were raised: the signal by which any rank was asked to stop, 0 for none; all ranks call it.

        Raises RunError on all ranks when one cannot write into the run directory.
        """
        asked = 0
        for number, trouble in from_all_ranks((self.stop.number, self.directory.trouble)):
            if trouble:
                raise RunError(trouble)
            asked = asked or number
        return asked


@contextmanager
def watched(
    directory: RunDirectory, keep_checkpoints: int, hang_timeout: float, on_message: Callable[[str], None]
) -> Iterator[Run]:
    """A run in `directory`, watched and able to be stopped; at the end its last checkpoint is on the disk."""

    def say(message: str) -> None:
        directory.log(message)
        on_message(message)

    with (
        StopSignals() as stop,
        Watchdog(directory.path, hang_timeout, say) as watchdog,
        Checkpoints(
            directory.checkpoints, keep_checkpoints, lambda path: say(f"wrote {path}"), watchdog.beat
        ) as checkpoints,
    ):
        yield Run(directory=directory, checkpoints=checkpoints, stop=stop, watchdog=watchdog, say=say)


class Steps:
    """`take(number)` reads the next batch, takes the step and leaves `state` after it.

    It is `stuck` on all ranks after `max_skipped` skipped steps in a row, or all `steps` of the run. Raises RunError on
    the rank that runs out of memory where nothing can be cut finer; StartAgain where the launcher is to start the ranks
    again.
    """

    def __init__(
        self,
        recipe: Recipe,
        strategy: Strategy,
        mesh: DeviceMesh,
        session: Session,
        run: Run,
        steps: int,
        max_skipped: int,
        patience: int | None,
        looking: Observer,
    ):
        self._recipe, self._strategy, self._mesh = recipe, strategy, mesh
        self._session, self._run, self._steps, self._max_skipped = session, run, steps, max_skipped
        self._patience, self._looking = patience, looking
        self._run_number = next(_runs)
        session.state.loader.progress = partial(_read_again, run)  # no method: what a cycle holds outlives the run
        self._batches = endless(session.state.loader)
        self._skipped_in_a_row = 0
        self.stuck = ""  # why the run ends after the step that was taken, which is recorded first
        self._moves_frozen: bool | None = None  # whether a step does; known after the first
        self._is_storable = False  # what the optimizer keeps; known after the first that it takes
        self._best: Best | None = None  # of this process's evaluations; before them, what the folder says
        self._in_vain = 0 if patience is None else self._in_vain_so_far()

    @property
    def done(self) -> int:
        """The last step that was taken."""
        return self._session.state.step

    @property
    def learning_rate(self) -> float:
        """That of the optimizer's first group of parameters, in the last step."""
        return float(self._session.state.optimizer.param_groups[0]["lr"])

    @property
    def compiled(self) -> CompiledBlocks | None:
        """The blocks that run compiled, where the strategy asks for it."""
        return self._session.model.compiled

    def take(self, number: int) -> StepRecord:
        """The next step of the run."""
        state, beat = self._session.state, self._run.watchdog.beat
        beat(f"reading the batch of step {number}")
        unread = state.loader.state_dict()
        batch = next(self._batches)
        beat(f"step {number}")
        set_learning_rate(state.optimizer, self._recipe.schedule(number))
        self._looking.batch_read(number, batch)
        record = self._attempt(number, batch, unread)
        self._looking.step_taken(number)
        state.step = number
        if not (self._is_storable or record.skipped):  # now rather than at the first checkpoint
            self._run.checkpoints.require_storable(state)
            self._is_storable = True
        self._count(number, record, batch)
        return record

    def evaluate(self, number: int, last: bool) -> dict[str, float]:
        """What the recipe measures after a step; {} when the run is asked to stop meanwhile and goes on later.

        Raises RunError on the rank that runs out of memory.
        """

        def progress() -> None:
            self._run.watchdog.beat(f"evaluating after step {number}")
            if not last and on_any_rank(bool(self._run.stop.number)):
                raise _LeftOut

        try:
            progress()
            with at_evaluation_point(self._session.state.optimizer):
                return evaluate(
                    self._recipe,
                    self._session.model,
                    self._mesh,
                    precision=self._strategy.precision,
                    average=self._session.state.average,
                    progress=progress,
                )
        except _LeftOut:
            self._run.say(f"the evaluation after step {number} is left out, as the run is asked to stop")
            return {}
        except Exception as error:
            if not is_out_of_memory(error):
                if self._kept(number):
                    self._run.say(f"the evaluation after step {number} failed; the state is kept, for --resume")
                raise
            self._looking.evaluation_out_of_memory(number, error)
            problem = first_line(error)
        self._end_with_evaluation(number, problem)  # outside, for the traceback holds what was computed

    def better(self, number: int, measured: Mapping[str, float]) -> Best | None:
        """What the recipe has measured after a step, if it is better than all before; all ranks call it."""
        if self._recipe.best is None or not measured:
            return None
        found = better(self._recipe.best, measured, number, self._best or self._run.checkpoints.best)
        self._best = found or self._best
        self._in_vain = 0 if found else self._in_vain + 1
        return found

    def _in_vain_so_far(self) -> int:
        """How many evaluations in a row gave no better value when the run was left."""
        measure, best = self._recipe.best, self._run.checkpoints.best
        return on_first_rank(lambda: in_vain(measure, self._run.directory.records(), best) if measure else 0)

    @property
    def stops_early(self) -> str:
        """Why the run ends before its last step; "" where it goes on. All ranks ask."""
        if self._patience is None or self._in_vain < self._patience:
            return ""
        best, measure = self._best or self._run.checkpoints.best, str(self._recipe.best)
        than = f" than {best.value:.4g} (step {best.step})" if best is not None and best.measure == measure else ""
        return f"{plural(self._in_vain, 'evaluation')} in a row gave no better {measure.removeprefix('-')}{than}"

    def secure(
        self, number: int, asks: bool, last: bool, checkpoint_every: int, check_every: int, best: Best | None
    ) -> None:
        """After a step: compare the ranks and write a checkpoint, where one is due or some rank `asks` to stop.

        Also where it is the `best` so far.

        Raises RunError on all ranks when one cannot write into the run directory, `Stopped` once all is written.
        """
        run, state = self._run, self._session.state
        saves = due(number, checkpoint_every) or last or best is not None
        asked = run.heard() if asks or saves else 0  # a checkpoint goes with the record of its step
        run.checkpoints.poll()
        saves = saves or asked > 0
        if due(number, check_every) or (saves and check_every):
            require_same_numbers(state.model, self._mesh, number)
        if saves:
            run.watchdog.beat(f"copying the state of step {number}")
            run.checkpoints.save(state, best)
        if asked and not last:
            run.checkpoints.wait()
            run.say(f"stopped after step {number} by {signal.Signals(asked).name}; go on with --resume")
            raise Stopped(asked)

    def _attempt(self, number: int, batch: Any, unread: Mapping[str, Any]) -> StepRecord:
        first = self._moves_frozen is None
        while True:
            self._seed(number)
            changes = Changes(batch, self._session.state.model, "frozen" if first else "none")
            lost = partial(self._looking.out_of_memory, number)
            record = attempt(self._session.step, fresh(batch), hand=self._run.wants_attention, on_failure=lost)
            moves_frozen = changes.of_parameters() or bool(self._moves_frozen)
            if isinstance(record, StepRecord):
                self._moves_frozen = moves_frozen
                return record
            self._cut_finer(number, record, unread, moves_frozen, changes.of_batch())

    def _cut_finer(
        self, number: int, problem: str, unread: Mapping[str, Any], moves_frozen: bool, wrote_batch: bool
    ) -> None:
        """Go on with more microbatches: here, or after a new start from the state before the step.

        `unread` is the loader's state before it read the batch. What the step `moves` or `wrote` cannot be put back.
        """
        state, folder = self._session.state, self._run.directory.path
        self._strategy = cut_finer(self._strategy, self._recipe.batch_size, problem)
        count = self._strategy.microbatches
        text = f"out of memory in step {number} ({problem}): going on with {count} microbatches"
        text += batch_norm_warning(state.model)
        if dist.get_world_size() == 1:
            if moves_frozen or wrote_batch:
                raise RunError(
                    f"out of memory in step {number} ({problem}), which cannot be taken again, for it has "
                    f"{'moved frozen parameters' if moves_frozen else 'written into its batch'}; go on from the last "
                    f"checkpoint with --resume --microbatches {count}"
                )
            let_go(self._session.step)
            write_strategy(folder, self._strategy)
            self._session.step.slice_finer(count)
            self._run.say(text)
            return
        sharded = self._strategy.shard_parameters or self._strategy.shard_optimizer
        is_whole = not (sharded or moves_frozen)
        if not is_whole:
            why = "no rank holds the whole state" if sharded else "the step has moved frozen parameters"
            text += f"; from the last checkpoint, for {why}"

        # First, so that a new start from an older checkpoint is no repetition, whatever becomes of the state.
        by_one_rank(f"finer microbatches of run {self._run_number}", lambda: write_strategy(folder, self._strategy))

        def save() -> None:
            let_go(self._session.step)
            state.loader.load_state_dict(unread)
            self._run.checkpoints.save_alone(state)

        if is_whole:
            by_one_that_is_through(f"state before a step of run {self._run_number}", save)
        raise StartAgain(text, remedy=f"--resume --microbatches {count}")

    def _end_with_evaluation(self, number: int, problem: str) -> NoReturn:
        """Keep the state after the step and end: to try again would not help."""
        saved = f"; the state after step {number} is kept, for --resume" if self._kept(number) else ""
        raise RunError(f"out of memory in the evaluation after step {number} ({problem}){saved}. {NEEDS_LESS}")

    def _kept(self, number: int) -> bool:
        """Write the state before the evaluation that failed, if a rank has all of it; whether one has."""
        if self._strategy.shard_parameters or self._strategy.shard_optimizer:
            return False

        def save() -> None:
            free_memory()
            self._run.checkpoints.save_alone(self._session.state)

        by_one_that_is_through(f"state before the evaluation after step {number} of run {self._run_number}", save)
        return True

    def _count(self, number: int, record: StepRecord, batch: Any) -> None:
        """Be stuck when nothing but skipped steps is left; an fp16 scale that is still falling is not that."""
        if not record.skipped:
            self._skipped_in_a_row = 0
            return
        step = self._session.step
        self._run.say(
            f"step {number} skipped: loss {record.loss}, gradient norm {record.grad_norm}; nothing was updated"
        )
        if math.isfinite(record.loss) and step.scale is not None and step.scale.falling:
            return
        self._skipped_in_a_row += 1
        all_of_run = self._skipped_in_a_row == self._steps
        if all_of_run or self._skipped_in_a_row >= self._max_skipped:
            self._seed(number)
            origin = origin_of_nonfinite(self._session.state.model, batch, lambda: step.forward(batch))
            several = f"{self._skipped_in_a_row} steps in a row were skipped up to step {number}"
            met = several if self._skipped_in_a_row > 1 else f"step {number} was skipped"
            self.stuck = (
                f"{'every step of the run was skipped' if all_of_run else met}; {origin}. Lower the learning rate, "
                "clip gradients (clip_norm) or mend the data"
                f"{'' if all_of_run else ', and go on with --resume, or allow more by --max-skipped'}"
            )

    def _seed(self, number: int) -> None:
        """Dropout follows from seed, step and replica alone, so that a step can be repeated, also by other processes.

        Replicas draw different masks, the ranks of one replica start from the same state.
        """
        seed_everything(mixed_seed(self._recipe.seed, self._mesh.get_local_rank("data"), number))


class _LeftOut(Exception):
    """An evaluation that would keep a run from stopping soon."""


def due(number: int, every: int) -> bool:
    """Whether something is done after this step that is done `every` so many steps; 0: never."""
    return every > 0 and number % every == 0


def _read_again(run: Run, number: int, behind: int) -> None:
    """Of a stream that goes on in the middle of an epoch."""
    if not number:
        run.say(f"reading {plural(behind, 'batch')} of the stream again, to go on after them")
    run.watchdog.beat(f"reading batch {number + 1} of {behind} again")


def endless(loader: ShardedLoader) -> Iterator[Any]:
    """Its batches, one epoch after another."""
    while True:
        yield from loader
