"""`fullframe evaluate`: a run's checkpoint, evaluated without training; the ranks are started here or by torchrun."""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from fullframe.cli.mesh_options import place_of, require_ranks, split_as
from fullframe.cli.words import Count, words
from fullframe.errors import RecipeError, RunError
from fullframe.processes.place import launched_place
from fullframe.strategy import Strategy
from fullframe.technique import Precision

if TYPE_CHECKING:
    from fullframe.training.evaluate_run import Evaluated


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate a run's newest readable checkpoint, as its training did, without training.

    The recipe's `evaluate` measures the whole of its `evaluation_data`. On the mesh that the run had the numbers are
    those that it wrote after that step, on another they differ by rounding. Where the run keeps a moving average of the
    parameters (--ema-decay), that is evaluated. Nothing is written.
    """

    run_dir: Positional[Path]
    """The --run-dir of a run that has written a checkpoint."""
    step: Annotated[int | None, arg(metavar="N")] = None
    """Take the checkpoint after this step in place of the newest."""
    best: bool = False
    """Take the best checkpoint, by the measure that recipe.best names, in place of the newest."""
    raw: bool = False
    """The parameters' last values also where the run keeps their moving averages."""
    recipe: Annotated[Path | None, arg(metavar="FILE")] = None
    """The recipe: the run's, as it is now, unless given."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE")] = ()
    """Values for the recipe, in place of those that the run was given under the same names."""
    data: Count = None
    """Replicas that read different samples. With one axis given the others are 1; the run's mesh without any."""
    depth: Count = None
    """Ranks that share the slices of a volume (N, C, D, H, W)."""
    height: Count = None
    """Ranks that share a sample's rows."""
    width: Count = None
    """Ranks that share a sample's columns."""
    stages: Count = None
    """Ranks with consecutive iterations of ff.unroll, or layers of the longest nn.Sequential."""
    precision: Precision | None = None
    """The run's unless given."""
    on_cpu: bool = False
    """Evaluate on the CPU, whatever GPUs there are."""
    json: bool = False
    """Print one JSON object on stdout; everything else goes to stderr."""

    def run(self) -> int:
        """Evaluate here as one rank, or start the ranks and wait for them."""
        if self.on_cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        place = launched_place()
        strategy = self._strategy(place.world if place else None)
        path, values = self._recipe()
        if place or strategy.ranks == 1:
            return self._evaluate(strategy, path, values)
        return self._launch(strategy)

    def _strategy(self, ranks: int | None) -> Strategy:
        from fullframe.observation.run_files import require_run
        from fullframe.training.evaluate_run import forward_only

        require_run(self.run_dir)
        try:
            strategy = forward_only(Strategy.from_json((self.run_dir / "strategy.json").read_text()))
        except OSError as error:
            raise RunError(f"cannot read {self.run_dir / 'strategy.json'}: {error.strerror}") from error
        axes = ("data", "depth", "height", "width", "stages")
        sizes: dict[str, int | None] = {name: getattr(self, name) for name in axes}
        if any(size is not None for size in sizes.values()):
            split = split_as(sizes, ranks)
            strategy = replace(strategy, **{name: getattr(split, name) for name in axes})
        require_ranks(strategy, ranks)
        return strategy if self.precision is None else replace(strategy, precision=self.precision)

    def _recipe(self) -> tuple[Path, dict[str, Any]]:
        """The recipe's file, and the values it is called with."""
        from fullframe.recipe import values_of
        from fullframe.training.run_file import read_run_file

        told = read_run_file(self.run_dir)
        path = self.recipe or (Path(told["recipe"]) if told.get("recipe") else None)
        if path is None:
            raise RunError(f"{self.run_dir} was trained by a script of its own and names no recipe; give --recipe FILE")
        if not path.is_file():
            where = "" if self.recipe else ", which the run names as seen from where it was started; give --recipe FILE"
            raise RecipeError(f"there is no recipe file {path}{where}")
        return path, values_of(told.get("values") or ()) | values_of(self.set)

    def _launch(self, strategy: Strategy) -> int:
        from fullframe.cli.display import said_of_failure
        from fullframe.processes.launch import launch
        from fullframe.ranks import device

        device.require_usable()
        device.require_enough(strategy.ranks)
        mesh: dict[str, Any] = {**strategy.mesh}
        return launch(
            strategy.ranks,
            ["-m", "fullframe.cli", "evaluate", *words(replace(self, **mesh))],
            on_failure=said_of_failure(self.json),
        )

    def _evaluate(self, strategy: Strategy, path: Path, values: Mapping[str, Any]) -> int:
        import torch.distributed as dist

        from fullframe.cli.display import Display
        from fullframe.ranks import device
        from fullframe.recipe import load_recipe
        from fullframe.training.evaluate_run import evaluate_run

        is_first = os.environ.get("RANK", "0") == "0"
        show = Display(0, sys.stderr if self.json else sys.stdout) if is_first else None
        with contextlib.redirect_stdout(sys.stderr) if self.json else contextlib.nullcontext():
            recipe = load_recipe(path, values)
            with show or contextlib.nullcontext():
                if show is not None:
                    show.message(f"{path}: evaluating {self.run_dir} on {place_of(strategy)}, on {device.name()}")
                found = evaluate_run(
                    recipe,
                    strategy,
                    self.run_dir,
                    step=self.step,
                    best=self.best,
                    raw=self.raw,
                    progress=show.samples if show is not None else lambda done, samples: None,
                )
            if dist.get_world_size() > 1:
                dist.destroy_process_group()
        if show is not None:
            self._print(found, strategy)
        return 0

    def _print(self, found: "Evaluated", strategy: Strategy) -> None:
        from fullframe.cli.display import measures, print_json

        for problem in found.problems:
            print(f"warning: {problem}", file=sys.stderr)
        if self.json:
            about = {"run_dir": str(self.run_dir), "ranks": strategy.ranks, "averaged": found.averaged}
            print_json({**about, "step": found.step, **found.measured})
        else:
            averaged = ", of the moving averages" if found.averaged else ""
            print(f"after step {found.step}{averaged}: {measures(found.measured)}")
