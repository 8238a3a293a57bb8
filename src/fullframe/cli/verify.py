"""`fullframe verify`: one step split and in one process, compared; the ranks are started here or by torchrun."""

import contextlib
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from fullframe.cli.mesh_options import split_as
from fullframe.cli.words import Count, words
from fullframe.errors import MeshError
from fullframe.processes.place import is_cpu_build, launched_place
from fullframe.recipe import require_file
from fullframe.strategy import Strategy, multiplied

if TYPE_CHECKING:
    from fullframe.verification.verdict import Difference, Verdict

_FOLDER = "FULLFRAME_VERIFY_FOLDER"  # tells ranks that this command started them, and where the verdict goes
_ROWS = 10


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Prove that split ranks compute what one process computes, or name the module where they part.

    Runs one step of the recipe in one process and on split ranks: the same initial weights, the first batch, float64,
    dropout off, weights not updated. Compares the loss, every parameter's gradient, every buffer, and every module's
    inputs and outputs with their gradients; differences are relative to a tensor's largest value. float64 rounding
    leaves 1e-16 to 1e-12; a missing row, a wrong sum or a lost gradient leaves far more.

    What it proves: these numbers, for this batch at this size, on this mesh and kind of device. What it does not:
    other sizes and meshes, code that this batch does not reach, the rounding of float32 or bf16, dropout, the
    optimizer, evaluation, speed. Batch norm sees one data replica's samples in both runs, as in any data-parallel
    training: a difference to the whole batch at once is none of the split, and not shown.

    The whole frame must fit one process in float64, and all module outputs a temporary folder (TMPDIR chooses
    where): take a smaller frame or batch where it does not, in the recipe or by --set.

    Exit code: 0 exact, 1 not exact, 2 refused (an op without an exact rule) or wrong use.
    """

    recipe: Positional[Path]
    """Python file with a function recipe() -> fullframe.Recipe."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE")] = ()
    """Values for the recipe: with height=96 it is called as recipe(height=96)."""
    depth: Count = None
    """Ranks that share the slices of a volume (N, C, D, H, W)."""
    height: Count = None
    """Ranks that share a sample's rows."""
    width: Count = None
    """Ranks that share a sample's columns: 2 when no axis is given, or all of torchrun's ranks."""
    stages: Count = None
    """Ranks with consecutive iterations of ff.unroll, or layers of the longest nn.Sequential, in one microbatch."""
    data: Count = None
    """Replicas that read different samples: 1, or what the other axes leave of torchrun's ranks."""
    unsupported: Literal["error", "gather"] | None = None
    """An op without an exact rule is refused, or runs whole on every rank: as the recipe says unless given."""
    tolerance: Annotated[float, arg(metavar="T")] = 1e-9
    """Largest relative difference that counts as rounding."""
    noise: Annotated[float, arg(metavar="X")] = 0.0
    """Move the weights by noise of X times their size first, in both runs: off kinks, where rounding decides."""
    all: bool = False
    """Print every parameter and buffer, not only the ten that differ most."""
    json: bool = False
    """Print one JSON object on stdout; everything else goes to stderr."""

    def run(self) -> int:
        """Compare here as one rank, or start the ranks and print what they found."""
        place = launched_place()
        strategy = self._strategy(place.world if place else None)
        return self._compare(strategy) if place else self._launch(strategy)

    def _strategy(self, ranks: int | None) -> Strategy:
        axes = ("depth", "height", "width", "stages", "data")
        sizes: dict[str, int | None] = {name: getattr(self, name) for name in axes}
        if not self.tolerance > 0:
            raise MeshError(f"--tolerance must be greater than 0, got {self.tolerance}")
        if not 0 <= self.noise < math.inf:
            raise MeshError(f"--noise must be 0 or more, and finite, got {self.noise}")
        require_file(self.recipe)
        if all(size is None for size in sizes.values()):
            sizes["width"] = ranks or 2
        strategy = split_as(sizes, ranks)
        if strategy.ranks == 1:
            raise MeshError("one rank alone splits nothing, so there is nothing to compare; use --width 2 or more")
        return strategy

    def _launch(self, strategy: Strategy) -> int:
        from fullframe.cli.display import said_of_failure
        from fullframe.processes.launch import launch
        from fullframe.verification.verdict import Verdict

        if not is_cpu_build() and _gpus() < strategy.ranks:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two ranks on one GPU cannot talk; on the CPU they can
        mesh: dict[str, Any] = {**strategy.mesh}
        of_rank = replace(self, **mesh)
        with tempfile.TemporaryDirectory(prefix="fullframe-verify-") as folder:
            os.environ[_FOLDER] = folder
            try:
                code = launch(
                    strategy.ranks,
                    ["-m", "fullframe.cli", "verify", *words(of_rank)],
                    on_failure=said_of_failure(self.json),
                )
            finally:
                del os.environ[_FOLDER]
            if code:
                return code
            verdict = Verdict.from_json((Path(folder) / "verdict.json").read_text())
        self._print(verdict)
        return verdict.exit_code

    def _compare(self, strategy: Strategy) -> int:
        import torch.distributed as dist

        from fullframe.verification.verify import verify

        with contextlib.redirect_stdout(sys.stderr):  # what the recipe prints is not the verdict
            verdict = verify(
                self.recipe,
                strategy,
                values=self.set,
                unsupported=self.unsupported,
                tolerance=self.tolerance,
                noise=self.noise,
            )
        folder = os.environ.get(_FOLDER)
        if dist.get_rank() == 0:
            if folder is None:
                self._print(verdict)
            else:
                (Path(folder) / "verdict.json").write_text(verdict.to_json())
        with contextlib.redirect_stdout(sys.stderr):
            dist.barrier()  # torchrun ends the other ranks when the first one leaves with an exit code
            dist.destroy_process_group()
        # The verdict is not an accident of this rank: where a command started it, that one gives the exit code.
        return 0 if folder is not None else verdict.exit_code

    def _print(self, verdict: "Verdict") -> None:
        if self.json:
            print(verdict.to_json())
            return
        console = Console(highlight=False, markup=False)
        for title, differences in (("gradient of", verdict.parameters), ("buffer", verdict.buffers)):
            if differences:
                _print_table(console, title, differences, None if self.all else _ROWS)
        if verdict.loss is not None:
            loss = verdict.loss
            console.print(
                f"loss {loss.one_process:.17g} in one process, {loss.split:.17g} split: "
                f"off by {loss.max_abs:.1e}, {loss.relative:.1e} relative",
                soft_wrap=True,
            )
        for note in verdict.notes:
            console.print(f"note: {note}", soft_wrap=True)
        console.print(_sentence(verdict, self.recipe), soft_wrap=True)


def _gpus() -> int:
    from fullframe.ranks import device  # which loads torch

    return device.count()


def _print_table(console: Console, title: str, differences: "tuple[Difference, ...]", rows: int | None) -> None:
    shown = [d for d in differences if rows is None or d.problem or d.max_abs][:rows]
    table = Table(title, "shape", "max abs", "relative")
    table.columns[0].overflow = "fold"
    for column in table.columns[2:]:
        column.justify = "right"
    for d in shown:
        numbers = (d.problem, "") if d.problem else (f"{d.max_abs:.1e}", f"{d.relative:.1e}")
        table.add_row(Text(d.name), Text(str(d.shape)), *numbers)
    if shown:
        console.print(table)
    if rest := len(differences) - len(shown):
        said = f"and {rest} more that differ less" if shown else f"{title} {rest} tensors: equal bit for bit"
        console.print(f"{said}; --all prints them")


def _sentence(verdict: "Verdict", recipe: Path) -> str:
    mesh = multiplied(verdict.mesh)
    if verdict.refused is not None:
        return f"refused: {verdict.refused.message}"
    if verdict.first_difference is not None:
        return f"NOT exact on {mesh} ({verdict.device}): {verdict.first_difference.message}"
    largest = max((d.relative for d in verdict.parameters), default=0.0)
    return (
        f"exact: one step of {recipe} on {mesh} ({verdict.device}) computes what one process computes; of "
        f"{len(verdict.parameters)} gradients, {len(verdict.buffers)} buffers and {verdict.values} module inputs and "
        f"outputs none is off by more than {verdict.tolerance:g}, no gradient by more than {largest:.1e}"
    )
