"""`fullframe simulate`: what one strategy needs in memory and time on a device that need not be there."""

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from tyro.conf import Positional, arg

from fullframe.cli.display import require_writable, writing
from fullframe.cli.strategy_file import first_plan, strategy_of, with_batch_size
from fullframe.cli.words import TechniqueOptions, TechniqueWords, changed, require_counts
from fullframe.errors import RecipeError, StrategyError
from fullframe.strategy import Strategy
from fullframe.wording import GIB, figure

if TYPE_CHECKING:
    from fullframe.simulation.memory.trace import Trace
    from fullframe.simulation.prediction import Prediction

_MODULES = 10


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Take two steps of a recipe on fake tensors, and say what a rank holds at its peak and how long a step takes."""

    recipe: Positional[Path]
    """Python file with a function recipe() -> fullframe.Recipe."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE")] = ()
    """Values for the recipe: with lr=1e-3 it is called as recipe(lr=1e-3)."""
    gpus: Annotated[str, arg(metavar="NxNAME")]
    """4xV100-16GB: one node of 4; 2x8xA100-80GB: 2 nodes of 8; 2xcpu: ranks on this machine's CPU."""
    strategy: Annotated[Path | None, arg(metavar="FILE")] = None
    """A run's strategy.json, or what `fullframe plan --out` wrote, in place of the options below."""
    batch_size: Annotated[int | None, arg(metavar="N")] = None
    """Samples of one step of the whole job: the plan's, or the recipe's, unless given."""
    data: Annotated[int, arg(metavar="N")] = 1
    """Replicas that read different samples."""
    depth: Annotated[int, arg(metavar="N")] = 1
    """Ranks that share the slices of a volume (N, C, D, H, W)."""
    height: Annotated[int, arg(metavar="N")] = 1
    """Ranks that share a sample's rows."""
    width: Annotated[int, arg(metavar="N")] = 1
    """Ranks that share a sample's columns."""
    techniques: TechniqueWords = field(default_factory=TechniqueOptions)
    benchmark: bool = False
    """Time each distinct op on this machine's own device in place of counting operations and bytes."""
    trace: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write all that the two steps allocate and free to FILE.jsonl, FILE.perfetto.json and FILE.pickle (memory_viz)."""
    json: bool = False
    """Print the prediction as one JSON object on stdout; everything else goes to stderr."""

    def run(self) -> int:
        """Simulate and print."""
        from fullframe.recipe import load_recipe, values_of
        from fullframe.simulation.devices.table import parse_cluster
        from fullframe.simulation.simulate import simulate

        strategy, batch_size = self._asked()
        require_writable(self.trace, "--trace")
        with contextlib.redirect_stdout(sys.stderr):  # what the recipe prints is no prediction
            cluster = parse_cluster(self.gpus)
            recipe = with_batch_size(load_recipe(self.recipe, values_of(self.set)), batch_size)
            prediction = simulate(
                recipe, strategy, cluster, timings={} if self.benchmark else None, on_trace=self._write_trace
            )
        if self.json:
            print(prediction.to_json())
        else:
            _report(prediction, cluster.device.memory_bytes, sys.stdout)
        return 0

    def _asked(self) -> tuple[Strategy, int | None]:
        """The strategy, and the batch size where one is given."""
        require_counts(self, ["batch_size"], RecipeError)
        mesh: dict[str, Any] = {name: getattr(self, name) for name in ("data", "depth", "height", "width")}
        if self.strategy is None:
            return Strategy(**mesh, **changed(self.techniques)), self.batch_size
        if set(mesh.values()) != {1} or changed(self.techniques):
            raise StrategyError("--strategy says how to train; leave out the options of the mesh and the techniques")
        plan = first_plan(self.strategy)
        planned = plan.get("batch_size") if self.batch_size is None else self.batch_size
        return strategy_of(plan), planned

    def _write_trace(self, trace: "Trace") -> None:
        from fullframe.observation.memory.export import write_trace

        if self.trace is not None:
            with writing(self.trace, "--trace"):
                files = ", ".join(str(path) for path in write_trace(trace, self.trace))
            print(f"wrote {files}", file=sys.stderr)


def _report(prediction: "Prediction", memory_bytes: int, stream: TextIO) -> None:
    from fullframe.simulation.prediction import KEPT_FREE, said_of_evaluation, said_of_host, said_of_layout

    def gib(bytes: int) -> str:
        return f"{bytes / GIB:.3f}"

    moment, usable = prediction.moment, int(memory_bytes * (1 - KEPT_FREE))
    fits = f"fits, with less than the {KEPT_FREE:.0%} free that a plan keeps, as predictions are off by up to as much"
    if prediction.device_bytes <= usable:
        fits = "fits"
    elif prediction.device_bytes > memory_bytes:
        fits = "does not fit"
    where = f", in {moment.module}" if moment.module else ""
    lines = [
        f"{gib(prediction.device_bytes)} of {gib(memory_bytes)} GiB: {fits}",
        *filter(None, [said_of_evaluation(prediction)]),
        f"in GiB: allocated {gib(prediction.peak_bytes)}, "
        f"reserved {gib(prediction.reserved_bytes)}; the peak is in the {moment.phase} of step {moment.step}{where}",
        "at the peak: " + ", ".join(f"{kind} {gib(size)}" for kind, size in prediction.bytes.items()),
        "what no tensor shows: " + (", ".join(f"{n} {gib(b)}" for n, b in prediction.terms.items()) or "nothing"),
        f"{figure(1e3 * prediction.step_seconds)} ms a step: "
        + ", ".join(f"{kind} {figure(1e3 * seconds)}" for kind, seconds in prediction.seconds.items() if seconds),
        *filter(None, [said_of_host(prediction), said_of_layout(prediction)]),
        "the largest tensors at the peak, GiB:",
    ]
    for tensor in prediction.largest:
        shape = "x".join(map(str, tensor.shape))
        lines.append(f"  {gib(tensor.bytes)}  {tensor.category}  {shape} {tensor.dtype}  {tensor.module}")
    lines.append("modules that hold most activations, GiB:")
    lines += [f"  {gib(size)}  {name or '(the loss)'}" for name, size in list(prediction.modules.items())[:_MODULES]]
    lines += [f"note: {note}" for note in prediction.notes]
    print("\n".join(lines), file=stream)
