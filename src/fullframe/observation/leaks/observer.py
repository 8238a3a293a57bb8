"""The watch on leaks of a run: it warns in the output, in log.txt and in metrics.jsonl."""

from collections.abc import Callable, Mapping
from typing import Any

from fullframe.observation.leaks.report import Leak
from fullframe.observation.leaks.watch import LeakWatch
from fullframe.observation.leaks.workers import WorkerMemory
from fullframe.training.loading.listing import length_of
from fullframe.training.observers import Observed, Observer
from fullframe.training.run_directory import OF_STEP

_WORKERS_EVERY = 3  # steps


class LeakObserver(Observer):
    """Looks into the recipe, its modules, its data and the optimizer, on the rank that writes."""

    def __init__(self) -> None:
        self._watch: LeakWatch | None = None
        self._workers: WorkerMemory | None = None

    def begin(self, run: Observed) -> None:
        """The same on all ranks, whose programs are the same: one watches."""
        if run.rank != 0:
            return
        recipe, state = run.recipe, run.session.state
        data = state.loader.dataset
        functions = {"loss": recipe.loss, "evaluate": recipe.evaluate, "schedule": recipe.schedule}
        model = {"parallelized model": run.session.model, "model": state.model}
        roots = {**functions, "data": data, "optimizer": state.optimizer, **model}
        self._run = run
        self._watch = LeakWatch(roots, self._say, length_of(data), recipe.batch_size)
        self._workers = WorkerMemory(data) if recipe.workers else None

    def _say(self, found: Leak) -> None:
        self._run.say(f"warning: {found.text}")
        self._run.append(found.record())

    def before_step(self, number: int) -> None:
        """Watched closely, where something was found to grow."""
        if self._watch is not None:
            self._careful(lambda watch: watch.before(number))

    def after_step(self, number: int, record: Mapping[str, Any]) -> None:
        """A look, where there is time for one."""
        if self._watch is not None:
            self._careful(lambda watch: watch.after(number, evaluated=not OF_STEP.issuperset(record)))
        if self._workers is not None and number % _WORKERS_EVERY == 0:
            found = self._workers.look(number)
            if found is not None:
                self._workers = None
                self._say(found)

    def end(self) -> None:
        """Whatever was watched closely goes on by itself."""
        if self._watch is not None:
            self._watch.stop()

    def _careful(self, look: Callable[[LeakWatch], None]) -> None:
        """The user's objects may answer in any way; what goes wrong here ends the watch, never the run."""
        watch = self._watch
        assert watch is not None
        try:
            look(watch)
        except Exception as error:
            self._watch = None
            watch.stop()
            self._run.say(f"the watch on leaks has ended: {type(error).__name__}: {error}")
