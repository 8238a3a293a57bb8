"""`fullframe train`: start the local ranks, or join those that torchrun started, and show how the run goes."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from fullframe.cli.comparison import Comparison
from fullframe.cli.strategy_file import first_plan, require_devices, strategy_of, with_batch_size
from fullframe.cli.words import TechniqueOptions, TechniqueWords, changed, words
from fullframe.errors import MeshError, RecipeError, RunError, StrategyError
from fullframe.processes.stop_signals import Stopped
from fullframe.strategy import Strategy, multiplied

if TYPE_CHECKING:
    from fullframe.training.run_directory import Resume

Count = Annotated[int | None, arg(metavar="N")]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe; the image plane is split over height x width ranks, the samples over data replicas.

    Volumes (N, C, D, H, W) can be split over depth ranks too.
    """

    recipe: Positional[Path]
    """Python file with a function recipe() -> fullframe.Recipe."""
    processes: Count = None
    """Ranks to start on this machine: data x depth x height x width unless given; without any of these, all GPUs."""
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
    """How many of the newest checkpoints stay on the disk."""
    check_every: Annotated[int, arg(metavar="K")] = 100
    """Steps between two comparisons of what all ranks should hold alike, to the bit; 0: never."""
    max_skipped: Annotated[int, arg(metavar="N")] = 10
    """Steps in a row that may be skipped because the loss or a gradient is not finite."""
    hang_timeout: Annotated[float, arg(metavar="SECONDS")] = 300.0
    """Time without progress after which ranks write their stacks, name who hangs and start again; 0: never."""
    max_restarts: Annotated[int, arg(metavar="N")] = 3
    """Times in a row that ranks are started again after one died, without a later step than before."""
    deterministic: bool = False
    """Take kernels that repeat themselves to the bit, which GPUs do not by themselves: slower; torch refuses what has
    none."""
    techniques: TechniqueWords = field(default_factory=TechniqueOptions)
    strict_memory: Annotated[float | None, arg(metavar="SHARE")] = None
    """Stop when after two steps the memory that was measured is off the prediction by more than this share, say 0.1."""
    json: bool = False
    """Print one JSON object with the last step's record on stdout; everything else goes to stderr."""

    def run(self) -> int:
        """Train here as one rank, or start the ranks and wait for them."""
        self._check_counts()
        if self.on_cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        ranks = int(os.environ["WORLD_SIZE"]) if joins else self._ranks_to_start()
        strategy = self._strategy(ranks) if self.plan is None else self._planned(ranks)
        run_dir = self._run_dir(joins)
        if joins or ranks == 1:
            return self._train(strategy, run_dir, rank=int(os.environ.get("RANK", "0")))
        return self._launch(strategy, run_dir)

    def _check_counts(self) -> None:
        if self.strict_memory is not None and not self.strict_memory > 0:
            raise StrategyError(f"--strict-memory must be greater than 0, got {self.strict_memory}")
        names = ("batch_size", "steps", "checkpoint_every", "keep_checkpoints", "max_skipped")
        least = dict.fromkeys(("processes", "data", "depth", "height", "width", *names), 1)
        least |= dict.fromkeys(("check_every", "hang_timeout", "max_restarts"), 0)
        for name, value in ((name, getattr(self, name)) for name in least):
            if value is not None and value < least[name]:
                raise MeshError(f"--{name.replace('_', '-')} must be at least {least[name]}, got {value}")
        if not self.recipe.is_file():
            raise RecipeError(f"there is no recipe file {self.recipe}; check the path")

    def _ranks_to_start(self) -> int:
        if self.processes is not None:
            return self.processes
        if self.plan is not None:
            return strategy_of(first_plan(self.plan)).ranks
        if any(self._mesh.values()):
            return math.prod(size or 1 for size in self._mesh.values())
        from fullframe.ranks import device

        device.require_usable()
        return max(device.count(), 1)

    @property
    def _mesh(self) -> dict[str, int | None]:
        """The sizes of the mesh as they are given."""
        return {"data": self.data, "depth": self.depth, "height": self.height, "width": self.width}

    def _strategy(self, ranks: int) -> Strategy:
        mesh: dict[str, Any] = {name: size or 1 for name, size in self._mesh.items() if name != "depth" or size}
        parts = math.prod(mesh.values()) // mesh["data"]
        if ranks % parts:
            below = ranks // parts * parts
            fitting = f"{below} or {below + parts}" if below else str(parts)
            split = multiplied({name: size for name, size in mesh.items() if name != "data"})
            raise MeshError(f"{ranks} processes are no multiple of {split} = {parts}; use {fitting} processes")
        mesh["data"] = self.data or ranks // parts
        if math.prod(mesh.values()) != ranks:
            raise MeshError(
                f"{multiplied(mesh)} = {math.prod(mesh.values())} is not the number of processes, {ranks}; "
                "leave out --data or --processes"
            )
        return Strategy(**mesh, **changed(self.techniques))

    def _planned(self, ranks: int) -> Strategy:
        assert self.plan is not None
        if any(self._mesh.values()) or changed(self.techniques):
            raise StrategyError("--plan says how to train; leave out the options of the mesh and the techniques")
        plan = first_plan(self.plan)
        strategy, planned = strategy_of(plan), plan.get("batch_size")
        if strategy.ranks != ranks:
            raise MeshError(f"the plan is for {strategy.ranks} ranks, there are {ranks}; start {strategy.ranks}")
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
            option = "--resume" if self.resume else "--auto-resume"
            raise RunError(f"{option} needs --run-dir, the directory of the run to go on with")
        if joins:
            raise RunError("ranks that were started by torchrun need --run-dir, so that all of them name the same one")
        recipe = self.recipe.resolve()
        name = recipe.parent.name if recipe.stem == "recipe" else recipe.stem
        return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"

    def _launch(self, strategy: Strategy, run_dir: Path) -> int:
        from fullframe.processes.launch import launch
        from fullframe.ranks import device
        from fullframe.training.run_directory import check_run_directory, last_step

        check_run_directory(run_dir, self._resume)
        device.require_usable()
        device.require_enough(strategy.ranks)
        of_rank = replace(self, run_dir=run_dir)
        if self.plan is None:
            mesh: dict[str, Any] = {**strategy.mesh}
            of_rank = replace(of_rank, **mesh)
        return launch(
            strategy.ranks,
            ["-m", "fullframe.cli", "train", *words(of_rank)],
            restarts=self.max_restarts,
            progress=lambda: last_step(run_dir),
            patience_seconds=self.hang_timeout or 300.0,
        )

    @property
    def _resume(self) -> "Resume":
        return "auto" if self.auto_resume else self.resume

    def _train(self, strategy: Strategy, run_dir: Path, rank: int) -> int:
        import torch.distributed as dist

        from fullframe.cli.display import Display
        from fullframe.ranks import device
        from fullframe.recipe import load_recipe
        from fullframe.training.loop import fit

        if self.deterministic:
            device.repeat_kernels()
        if self.hang_timeout:  # or torch's thread for NCCL aborts the process before it can say what a kernel met
            os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        plan = None if self.plan is None else first_plan(self.plan)
        read = load_recipe(self.recipe)
        recipe = with_batch_size(read, self.batch_size or (plan or {}).get("batch_size"))
        steps = self.steps or recipe.steps
        last: dict[str, Any] = {}
        show = Display(steps, sys.stderr if self.json else sys.stdout) if rank == 0 else None
        say = show.message if show is not None else lambda message: None

        def on_record(record: Mapping[str, Any]) -> None:
            last.update(record)
            if show is not None:
                show.record(record)
            comparison.record(record)

        code = 0
        compared = Comparison(self.recipe, strategy, say, plan, self.strict_memory, recipe.batch_size)
        with show or contextlib.nullcontext(), compared as comparison:
            ranks = f"{strategy.ranks} rank{'s' * (strategy.ranks > 1)}"
            where = f"{ranks} ({multiplied(strategy.mesh)}), on {device.name()}"
            say(f"{self.recipe}: {steps} steps on {where}, writing {run_dir}")
            if recipe.batch_size != read.batch_size:
                say(f"batches of {recipe.batch_size} in place of the recipe's {read.batch_size}")
            try:
                fit(
                    recipe,
                    strategy,
                    run_dir,
                    steps=steps,
                    resume=self._resume,
                    checkpoint_every=self.checkpoint_every,
                    keep_checkpoints=self.keep_checkpoints,
                    check_every=self.check_every,
                    max_skipped=self.max_skipped,
                    hang_timeout=self.hang_timeout,
                    on_record=on_record,
                    on_message=say,
                )
            except Stopped as stopped:
                code, last["stopped"] = stopped.code, stopped.signal.name
        if dist.get_world_size() > 1:
            dist.destroy_process_group()  # NCCL complains of a rank that just goes
        if self.json and rank == 0:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in last.items()}
            print(json.dumps({"run_dir": str(run_dir), "ranks": strategy.ranks, **finite}))
        return code
