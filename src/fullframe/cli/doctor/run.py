"""`fullframe doctor run`: a few steps with probes on real ranks, and what they show."""

import os
import shlex
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from tyro.conf import Positional, arg

from fullframe.cli.comparison import predicting, prediction_of
from fullframe.cli.doctor.report import exit_code, print_answers, print_findings, summary
from fullframe.cli.train import Train
from fullframe.cli.words import Count, TechniqueOptions, TechniqueWords, changed, option, words
from fullframe.errors import MeshError, RecipeError, RunError
from fullframe.processes.place import launched_place
from fullframe.recipe import function_in

if TYPE_CHECKING:
    from fullframe.doctor.finding import Finding
    from fullframe.doctor.rehearsal.job import Outcome
    from fullframe.strategy import Strategy

# What may be given for a script; that there are techniques says nothing of whether any is chosen.
_OF_SCRIPTS = {"program", "arguments", "processes", "on_cpu", "techniques", "steps", "patience", "json"}


@dataclass(frozen=True, kw_only=True)
class DoctorRun:
    """Take a few steps with probes on real ranks and say what is wrong, with evidence.

    PROGRAM is a recipe, or a training script of your own that runs under torchrun. Compared over all ranks: weights,
    gradients, samples, learning rates; on each: what gets no gradient, what never changes, graphs that are kept,
    batch norm's statistics, loss scaling, waiting for the loader. The probes send nothing and change no number. A
    recipe is first run on frames of at most 128 x 128 with repeated layers once, so that a wrong set-up shows in
    seconds, then three steps as it is; its first step is taken twice, and its memory held against the prediction.
    A script is run unchanged and ended after --steps updates; what it writes until then it writes.

    docs/findings.md lists what can be found. Exit code: 0 nothing found, 1 something found, 2 wrong use.
    """

    program: Annotated[Positional[Path], arg(metavar="PROGRAM")]
    """Python file: a recipe, or a training script."""
    arguments: Annotated[Positional[tuple[str, ...]], arg(metavar="[-- ARGUMENT ...]")] = ()
    """The script's own."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE")] = ()
    """Values for the recipe: with lr=1e-3 it is called as recipe(lr=1e-3)."""
    processes: Count = None
    """Ranks to start on this machine: as for train; for a script 2, or all GPUs, unless given."""
    data: Count = None
    """Replicas that read different samples."""
    depth: Count = None
    """Ranks that share the slices of a volume (N, C, D, H, W)."""
    height: Count = None
    """Ranks that share a sample's rows."""
    width: Count = None
    """Ranks that share a sample's columns."""
    plan: Annotated[Path | None, arg(metavar="FILE")] = None
    """Take the strategy from what `fullframe plan --out FILE` wrote."""
    on_cpu: bool = False
    """Run on the CPU, whatever GPUs there are."""
    batch_size: Count = None
    """Samples of one step of the whole job: the recipe's unless given."""
    techniques: TechniqueWords = field(default_factory=TechniqueOptions)
    steps: Annotated[int, arg(metavar="N")] = 6
    """Updates after which a script is ended."""
    small_only: bool = False
    """Of a recipe, only the small frames: the simplified example."""
    whole_only: bool = False
    """Of a recipe, only the steps at full size."""
    patience: Annotated[float, arg(metavar="SECONDS")] = 300.0
    """Time without progress on any rank after which they are asked where they stand, and ended."""
    json: bool = False
    """Print one JSON list of findings on stdout; everything else goes to stderr."""

    def run(self) -> int:
        """Start the ranks, judge their notes, print."""
        return exit_code(self.findings(), self.json)

    def findings(self) -> "list[Finding]":
        """What was found, the worst first; printed unless it is to be JSON."""
        if launched_place() is not None:
            raise MeshError("doctor run starts its ranks itself; run it without torchrun or srun")
        if not self.program.is_file():
            is_folder = self.program.is_dir()
            remedy = "name the recipe; of a run tell fullframe watch and report" if is_folder else "check the path"
            raise RecipeError(f"there is no file {self.program}; {remedy}")
        if self.on_cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if self.steps < 1 or not self.patience > 0:
            raise RunError(f"--steps {self.steps} and --patience {self.patience:g} must be greater than 0")
        if self.small_only and self.whole_only:
            raise RunError("--small-only and --whole-only are both given; leave one out")
        return self._run_recipe() if is_recipe(self.program) else self._run_script()

    def _run_recipe(self) -> "list[Finding]":
        if self.arguments:
            raise RecipeError(f"{self.program} is a recipe, which takes no arguments; leave out {self.arguments[0]!r}")
        if "steps" in changed(self):
            raise RecipeError(f"{self.program} is a recipe, of which a few steps are taken; leave out --steps")
        mesh: dict[str, Any] = {name: getattr(self, name) for name in ("processes", "data", "depth", "height", "width")}
        options: dict[str, Any] = {"plan": self.plan, "batch_size": self.batch_size, "techniques": self.techniques}
        strategy = Train(recipe=self.program, on_cpu=self.on_cpu, **options, **mesh).local_strategy()
        from fullframe.doctor.judgement.memory import judged_memory, said_of_prediction

        child = None if self.small_only else predicting(self.program, strategy, self.batch_size, self.set)
        try:
            outcome, remark = self._rehearsed(strategy)
            predicted = {} if child is None else prediction_of(child)
        finally:
            if child is not None:
                child.kill()
        extra = list(judged_memory(outcome.whole, predicted))
        return self._conclude(outcome, extra, predicted=said_of_prediction(predicted), remark=remark)

    def _rehearsed(self, strategy: "Strategy") -> "tuple[Outcome, str]":
        """The recipe's steps; where its small form fails and the whole one does not, what it failed of."""
        from fullframe.doctor.probes.notes import Failure

        small = not self.whole_only
        outcome = self._outcome(strategy.ranks, strategy, small=small)
        failed_small = [rank.one(Failure) for rank in outcome.whole if len(rank.events) == 1]
        if self.small_only or not (small and any(failed_small) and any(rank.events for rank in outcome.small)):
            return outcome, ""
        again = self._outcome(strategy.ranks, strategy, small=False)
        problem = next(failure for failure in failed_small if failure is not None)
        says = f"it does not run on small frames ({problem.kind}: {problem.text.splitlines()[0]})"
        return again, "" if any(rank.one(Failure) for rank in again.whole) else says

    def _run_script(self) -> "list[Finding]":
        given = [name for name in (*changed(self), *changed(self.techniques)) if name not in _OF_SCRIPTS]
        if given:
            raise MeshError(f"{self.program} is a script, which makes its own mesh; leave out {option(given[0])}")
        from fullframe.ranks import device

        outcome = self._outcome(self.processes or device.count() or 2, None, small=False)
        return self._conclude(outcome, [], predicted="", remark="")

    def _outcome(self, ranks: int, strategy: "Strategy | None", *, small: bool) -> "Outcome":
        from fullframe.doctor.rehearsal.job import rehearsal
        from fullframe.doctor.rehearsal.rank import Request

        with tempfile.TemporaryDirectory(prefix="fullframe-doctor-") as folder:
            request = Request(
                program=str(self.program),
                folder=folder,
                ranks=ranks,
                steps=self.steps,
                strategy=None if strategy is None else strategy.to_json(),
                arguments=self.arguments,
                values=self.set,
                batch_size=self.batch_size,
                small=small,
                whole=not self.small_only,
            )
            file = Path(folder) / "request.json"
            file.write_text(request.to_json())
            words_of_rank = ["-m", "fullframe.cli.doctor.rank", str(file)]
            return rehearsal(request, words_of_rank, patience_seconds=self.patience)

    def _conclude(self, outcome: "Outcome", extra: "list[Finding]", *, predicted: str, remark: str) -> "list[Finding]":
        from fullframe.doctor.judgement.checklist import checklist
        from fullframe.doctor.judgement.judge import judge, ordered
        from fullframe.doctor.probes.notes import Failure, Update
        from fullframe.wording import plural

        took_steps = any(rank.of(Update) for rank in outcome.whole)
        ran_small = any(rank.events for rank in outcome.small)
        failed = any(rank.one(Failure) for rank in outcome.whole)
        small = judge(outcome.small, at_full_size=False) if ran_small and not failed else []
        whole = judge(outcome.whole, outcome.stacks) if took_steps or failed or not ran_small else []
        findings = ordered([*whole, *small, *extra])
        if self.json:
            return findings
        console = Console(highlight=False, markup=False)
        notes = outcome.whole if took_steps else outcome.small or outcome.whole
        again, at_full_size = simplified(self), notes is outcome.whole
        print_answers(console, checklist(notes, findings, predicted, again, at_full_size))
        if remark:
            console.print(f"note: {remark}", soft_wrap=True)
        print_findings(console, findings)
        steps = max((len(rank.of(Update)) for rank in notes), default=0)
        where = f"{self.program}, {plural(steps, 'step')} on {plural(len(notes), 'rank')}"
        console.print(summary(findings, where), soft_wrap=True)
        return findings


def simplified(command: DoctorRun) -> str:
    """The words that run the simplified example; of a script, which has none, its own."""
    again = replace(command, json=False, small_only=is_recipe(command.program), whole_only=False)
    return f"fullframe doctor run {shlex.join(words(again))}"


def is_recipe(program: Path) -> bool:
    """Whether the file has a function recipe() at its top level."""
    return function_in(program) is not None
