"""`fullframe train`: start the local ranks, or join those that torchrun started, and show how the run goes."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from fullframe.cli.comparison import Comparison
from fullframe.cli.mesh_options import place_of
from fullframe.cli.node_options import NodeOptions, NodeWords, nodes_of, options_of, require_whole_replicas
from fullframe.cli.remedies import explain_out_of_memory
from fullframe.cli.report import write_at_end, written
from fullframe.cli.strategy_file import first_plan, require_devices, strategy_of, with_batch_size
from fullframe.cli.words import Count, TechniqueOptions, TechniqueWords, changed, option, require_counts, words
from fullframe.errors import MeshError, RunError, StrategyError
from fullframe.processes.exit_reasons import RESTART_REASON, STOPPED
from fullframe.processes.place import launched_place, require_alone
from fullframe.processes.stop_signals import Stopped
from fullframe.recipe import load_recipe, require_file, values_of
from fullframe.strategy import Strategy, multiplied
from fullframe.wording import plural

if TYPE_CHECKING:
    from fullframe.training.run_directory import Resume


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe; the image plane is split over height x width ranks, the samples over data replicas.

    Volumes (N, C, D, H, W) can be split over depth ranks too.
    """

    recipe: Positional[Path]
    """Python file with a function recipe() -> fullframe.Recipe."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE")] = ()
    """Values for the recipe: with lr=1e-3 it is called as recipe(lr=1e-3)."""
    processes: Count = None
    """Ranks to start on this machine: data x depth x height x width unless given; without any of these, all GPUs."""
    over: NodeWords = field(default_factory=NodeOptions)
    data: Count = None
    """Replicas that read different samples: processes / (depth x height x width) unless given."""
    depth: Count = None
    """Ranks that share the slices of a volume (N, C, D, H, W)."""
    height: Count = None
    """Ranks that share a sample's rows."""
    width: Count = None
    """Ranks that share a sample's columns."""
    plan: Annotated[Path | None, arg(metavar="FILE")] = None
    """Take the strategy from what `fullframe plan --out FILE` wrote, in place of the mesh and the techniques."""
    on_cpu: bool = False
    """Train on the CPU, whatever GPUs there are and the plan is for."""
    batch_size: Count = None
    """Samples of one step of the whole job: the plan's, or the recipe's, unless given."""
    steps: Count = None
    """Optimizer steps of the whole run: the recipe's unless given."""
    run_dir: Annotated[Path | None, arg(metavar="PATH")] = None
    """Where metrics, log and checkpoints go: a new folder in runs/ unless given."""
    resume: bool = False
    """Go on from the newest readable checkpoint in --run-dir."""
    auto_resume: bool = False
    """Go on if --run-dir holds a run, start one if not: for jobs that a scheduler queues again."""
    checkpoint_every: Annotated[int, arg(metavar="K")] = 100
    """Steps between two checkpoints; one more is written after the last step."""
    keep_checkpoints: Annotated[int, arg(metavar="K")] = 3
    """How many of the newest checkpoints stay on the disk, beside the best by the measure that recipe.best names."""
    check_every: Annotated[int, arg(metavar="K")] = 100
    """Steps between two comparisons of what all ranks should hold alike, to the bit; 0: never."""
    max_skipped: Annotated[int, arg(metavar="N")] = 10
    """Steps in a row that may be skipped because the loss or a gradient is not finite."""
    patience: Count = None
    """End the run after so many evaluations in a row without a better value of the measure that recipe.best names."""
    hang_timeout: Annotated[float, arg(metavar="SECONDS")] = 300.0
    """Time without progress after which ranks write their stacks, name who hangs and start again; 0: never."""
    max_restarts: Annotated[int, arg(metavar="N")] = 3
    """Times in a row that ranks are started again after one died, without a later step than before."""
    deterministic: bool = False
    """Take kernels that repeat themselves to the bit, as GPUs' do not: slower, and torch refuses what has none."""
    trace_step: Count = None
    """Write all that this step allocates and frees to trace/ in the run directory, for Perfetto and memory_viz."""
    stopped_code: Annotated[int, arg(metavar="CODE")] = 0
    """Exit code of a run that was asked to stop, for a script that queues it again."""
    techniques: TechniqueWords = field(default_factory=TechniqueOptions)
    strict_memory: Annotated[float | None, arg(metavar="SHARE")] = None
    """Stop when after two steps the memory that was measured is off the prediction by more than this share, say 0.1."""
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Log the records there too; each needs the extra of its name: pip install 'fullframe[tensorboard]'."""
    json: bool = False
    """Print one JSON object with the last step's record on stdout; everything else goes to stderr."""

    def run(self) -> int:
        """Train here as one rank, or start the ranks and wait for them."""
        self._check_counts()
        if self.log:
            from fullframe.observation.loggers import require_loggers

            require_loggers(self.log)
        if self.on_cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        place = launched_place()
        if self.over.nodes is not None:
            if place:
                raise MeshError("this is a rank already (RANK is set), and torchrun says of which nodes; omit --nodes")
            return self._launch_on_nodes(self.over.nodes)
        if changed(self.over):
            names = ", ".join(map(option, changed(self.over)))
            raise MeshError(f"{names} is for a job over several machines; say of how many by --nodes")
        on_this_machine = os.environ.get("LOCAL_WORLD_SIZE", "")  # of several, whose ranks the launcher has started
        if place and self.processes not in (None, place.world) and str(self.processes) != on_this_machine:
            said = f"RANK={place.rank} and WORLD_SIZE={place.world} are set), and --processes is {self.processes}"
            raise MeshError(f"this is a rank already ({said}; unset both where a shell has them left over")
        ranks = place.world if place else self._ranks_to_start()
        strategy = self.strategy_on(ranks)
        run_dir = self._run_dir(joins=place is not None)
        if place is None:
            from fullframe.training.run_directory import check_run_directory

            require_alone()
            check_run_directory(run_dir, self._resume)
        if place is None and ranks > 1:
            return self._reported(run_dir, lambda: self._launch(strategy, run_dir))
        rank = place.rank if place else 0
        train = partial(self._train, strategy, run_dir, rank)
        # Where our launcher started the ranks, it writes the report, when they have ended for good.
        return train() if rank or RESTART_REASON in os.environ else self._reported(run_dir, train)

    def _reported(self, run_dir: Path, train: Callable[[], int]) -> int:
        """Train and, however it ends, write the report of a run that took a step."""
        before = written(run_dir)
        try:
            return train()
        finally:
            explain_out_of_memory(self, run_dir)
            if written(run_dir) != before:
                write_at_end(run_dir, self.json)

    def local_strategy(self) -> Strategy:
        """The strategy of a job that is started on this machine; raises as `run` does where it is wrong."""
        self._check_counts()
        ranks = self._ranks_to_start()
        return self.strategy_on(ranks)

    def _check_counts(self) -> None:
        if self.strict_memory is not None and not self.strict_memory > 0:
            raise StrategyError(f"--strict-memory must be greater than 0, got {self.strict_memory}")
        if self.strict_memory is not None and self.steps == 1:
            raise StrategyError("--strict-memory compares after the second step, and --steps is 1; give 2")
        names = ("batch_size", "steps", "checkpoint_every", "keep_checkpoints", "max_skipped", "patience", "trace_step")
        require_counts(self, ("processes", "data", "depth", "height", "width", *names))
        require_counts(self, ("check_every", "hang_timeout", "max_restarts"), least=0)
        if not 0 <= self.stopped_code <= 255:
            raise RunError(f"--stopped-code must be from 0 to 255, as all exit codes are, got {self.stopped_code}")
        require_file(self.recipe)

    def _ranks_to_start(self) -> int:
        if self.processes is not None:
            return self.processes
        if self.plan is not None:
            return strategy_of(first_plan(self.plan)).ranks
        given = self._one_replica
        if any(self._mesh.values()) or given.ranks > 1:
            return (self.data or 1) * given.ranks
        from fullframe.ranks import device

        device.require_usable()
        return max(device.count(), 1)

    @property
    def _mesh(self) -> dict[str, int | None]:
        """The sizes of the mesh as they are given."""
        return {"data": self.data, "depth": self.depth, "height": self.height, "width": self.width}

    @property
    def _one_replica(self) -> Strategy:
        sizes: dict[str, Any] = {name: size for name, size in self._mesh.items() if size and name != "data"}
        return Strategy(**sizes, **changed(self.techniques))

    def strategy_on(self, ranks: int) -> Strategy:
        """What the plan, or else the options, say for so many ranks; raises MeshError where that is no such mesh."""
        if self.plan is not None:
            return self._planned(ranks)
        one = self._one_replica
        if ranks % one.ranks:
            below = ranks // one.ranks * one.ranks
            fitting = f"{below} or {below + one.ranks}" if below else str(one.ranks)
            split = multiplied({name: size for name, size in one.mesh.items() if name != "data"})
            raise MeshError(f"{ranks} processes are no multiple of {split} = {one.ranks}; use {fitting} processes")
        strategy = replace(one, data=self.data or ranks // one.ranks)
        if strategy.ranks != ranks:
            raise MeshError(
                f"{multiplied(strategy.mesh)} = {strategy.ranks} is not the number of processes, {ranks}; "
                "leave out --data or --processes"
            )
        return strategy

    def _planned(self, ranks: int) -> Strategy:
        assert self.plan is not None
        if any(self._mesh.values()) or changed(self.techniques):
            raise StrategyError("--plan says how to train; leave out the options of the mesh and the techniques")
        plan = first_plan(self.plan)
        strategy, planned = strategy_of(plan), plan.get("batch_size")
        if strategy.ranks != ranks:
            raise MeshError(f"the plan is for {plural(strategy.ranks, 'rank')}, not {ranks}; start {strategy.ranks}")
        if self.batch_size is not None and planned not in (None, self.batch_size):
            raise StrategyError(
                f"the plan is for batches of {planned}, --batch-size says {self.batch_size}; leave it out, or plan "
                f"again with --batch-size {self.batch_size}"
            )
        if not self.on_cpu:
            from fullframe.ranks import device

            here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
            require_devices(plan, here, device.count())
        return strategy

    def _run_dir(self, joins: bool) -> Path:
        if self.run_dir is not None:
            return self.run_dir
        if self.resume or self.auto_resume:
            asked = "--resume" if self.resume else "--auto-resume"
            raise RunError(f"{asked} needs --run-dir, the directory of the run to go on with")
        if joins:
            raise RunError("ranks that were started by torchrun need --run-dir, so that all of them name the same one")
        return new_run_dir(name_of(self.recipe))

    def _launch(self, strategy: Strategy, run_dir: Path) -> int:
        from fullframe.processes.launch import launch
        from fullframe.ranks import device
        from fullframe.training.run_directory import last_step

        device.require_usable()
        device.require_enough(strategy.ranks)
        code = launch(
            strategy.ranks,
            self._of_rank(strategy, run_dir),
            restarts=self.max_restarts,
            progress=lambda: last_step(run_dir),
            patience_seconds=self.hang_timeout or 300.0,
            on_failure=partial(self._failed, run_dir),
            before_restart=partial(explain_out_of_memory, self, run_dir),
        )
        return self.stopped_code if code == STOPPED else code

    def _failed(self, run_dir: Path, reason: str) -> None:
        from fullframe.cli.display import said_of_failure
        from fullframe.training.run_file import note_end

        note_end(run_dir, reason)
        said_of_failure(self.json)(reason)

    def _of_rank(self, strategy: Strategy, run_dir: Path) -> list[str]:
        """The words of Python's command line for a rank."""
        of_rank = replace(self, run_dir=run_dir, over=NodeOptions(), stopped_code=STOPPED)
        if self.plan is None:
            mesh: dict[str, Any] = {name: size for name, size in strategy.mesh.items() if name in self._mesh}
            of_rank = replace(of_rank, **mesh)
        return ["-m", "fullframe.cli", "train", *words(of_rank)]

    def _launch_on_nodes(self, count: int) -> int:
        """Start this machine's ranks of a job over several, and wait for the job's end."""
        from fullframe.processes.nodes import launch_on_nodes
        from fullframe.ranks import device
        from fullframe.training.run_directory import last_step

        run_dir = self.run_dir
        if run_dir is None:
            raise RunError("--nodes needs --run-dir, which all machines see under the same path")
        device.require_usable()
        ranks = math.prod(size or 1 for size in self._mesh.values())
        processes = self.processes or device.count() or -(-ranks // count)
        device.require_enough(processes)
        nodes = replace(nodes_of(self.over, processes), lease=run_dir / "lease", options=self._shared_options())
        whole = self.strategy_on(count * processes)
        require_whole_replicas(nodes, whole)

        def arguments(machines: int) -> list[str]:
            return self._of_rank(replace(whole, data=machines * processes // whole.parts), run_dir)

        launched = partial(
            launch_on_nodes,
            nodes,
            arguments,
            restarts=self.max_restarts,
            progress=lambda: last_step(run_dir),
            patience_seconds=self.hang_timeout or 300.0,
            on_failure=partial(self._failed, run_dir),
        )
        code = self._reported(run_dir, launched)  # by each machine: none knows whether rank 0 is its own
        return self.stopped_code if code == STOPPED else code

    def _shared_options(self) -> dict[str, str]:
        """What all machines are to be given alike: not how each names the same files, nor what it prints."""
        over = replace(self.over, node_rank=None, rendezvous=None)
        shared = replace(self, over=over, processes=None, run_dir=None, resume=False, auto_resume=False, json=False)
        return options_of(words(shared))

    @property
    def _resume(self) -> "Resume":
        return self.resume or ("auto" if self.auto_resume else False)  # asked for both, a run must be there

    def _options(self) -> dict[str, Any]:
        """What `fit` takes as it is given here."""
        names = ("checkpoint_every", "keep_checkpoints", "check_every", "max_skipped", "patience", "hang_timeout")
        return {"resume": self._resume, **{name: getattr(self, name) for name in names}}

    def _about(self, batch_size: int) -> dict[str, Any]:
        """What run.json is to say beside what `fit` knows."""
        from fullframe.training.run_file import commit_of

        commit = commit_of(self.recipe.resolve().parent)
        return {"recipe": str(self.recipe), "commit": commit, "batch_size": batch_size, "values": list(self.set)}

    def _steps(self, of_recipe: int) -> int:
        steps = self.steps or of_recipe
        if self.trace_step is not None and self.trace_step > steps:
            raise RunError(f"--trace-step {self.trace_step} comes after the last step, {steps}; name one before")
        return steps

    def _train(self, strategy: Strategy, run_dir: Path, rank: int) -> int:
        import torch.distributed as dist

        from fullframe.cli.display import Display, print_json
        from fullframe.observation.observers import observers_of_run
        from fullframe.ranks import device
        from fullframe.training.loop import fit
        from fullframe.training.run_file import note_prediction

        if self.deterministic:
            device.repeat_kernels()
        if self.hang_timeout:  # or torch's thread for NCCL aborts the process before it can say what a kernel met
            os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        plan = None if self.plan is None else first_plan(self.plan)
        aside = partial(contextlib.redirect_stdout, sys.stderr) if self.json else contextlib.nullcontext
        with aside():  # what the recipe prints is not the record
            read = load_recipe(self.recipe, values_of(self.set))
        recipe = with_batch_size(read, (plan or {}).get("batch_size") if self.batch_size is None else self.batch_size)
        steps = self._steps(recipe.steps)
        last: dict[str, Any] = {}
        show = Display(steps, sys.stderr if self.json else sys.stdout) if rank == 0 else None
        say = show.message if show is not None else lambda message: None

        def on_record(record: Mapping[str, Any]) -> None:
            last.update(record)
            if show is not None:
                show.record(record)
            comparison.record(record)

        code, (timeline, observers) = 0, observers_of_run(self.trace_step, self.log)
        compared = Comparison(
            *(self.recipe, strategy, say, plan, self.strict_memory, recipe.batch_size, self.set),
            tracked=lambda: timeline.peak_bytes,
            counted=lambda: timeline.counted,
            on_prediction=partial(note_prediction, run_dir) if rank == 0 else lambda predicted: None,
        )
        with aside(), show or contextlib.nullcontext(), compared as comparison:
            place = f"{place_of(strategy)}, on {device.name()}"
            say(f"{self.recipe}: {plural(steps, 'step')} on {place}, writing {run_dir}")
            if recipe.batch_size != read.batch_size:
                say(f"batches of {recipe.batch_size} in place of the recipe's {read.batch_size}")
            try:
                fit(
                    recipe,
                    strategy,
                    run_dir,
                    steps=steps,
                    **self._options(),
                    on_record=on_record,
                    on_message=say,
                    observers=observers,
                    about=self._about(recipe.batch_size),
                )
            except Stopped as stopped:
                code, last["stopped"] = stopped.code or self.stopped_code, stopped.signal.name
        if dist.get_world_size() > 1:
            dist.destroy_process_group()  # NCCL complains of a rank that just goes
        if self.json and rank == 0:
            print_json({"run_dir": str(run_dir), "ranks": strategy.ranks, **last})
        return code


def name_of(recipe: Path) -> str:
    """What the runs of a recipe's file are called: as the file, or its folder where that is but recipe.py.

    A link has the name and the folder that it has, not those of what it leads to.
    """
    return recipe.parent.resolve().name if recipe.stem == "recipe" else recipe.stem


def new_run_dir(name: str) -> Path:
    """A folder for what is started now."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
