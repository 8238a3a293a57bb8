"""`fullframe plan`: which strategies fit on which GPUs and how fast they are, without the GPUs."""

import contextlib
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from fullframe.cli.display import require_writable, writing
from fullframe.cli.words import require_counts
from fullframe.errors import DeviceError, RecipeError
from fullframe.strategy import describe
from fullframe.technique import Precision
from fullframe.wording import GIB, figure, plural

if TYPE_CHECKING:
    from fullframe.planning.plan import Planned
    from fullframe.planning.ranking import Plan as OnePlan

_ROWS = 12
_WIDTH = 160  # of a table that goes into a file or a pipe
_WIDE = 120  # columns of a terminal that has room for the kinds of memory
_OTHER = "other: temporary values, workspaces, the device's context, what the allocator cannot use; --json lists each"
_QUIET_SECONDS = 10.0
_NOTHING_FITS, _REFUSED, _OUT_OF_TIME = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Find the fastest strategy for a recipe that fits on given GPUs; no GPU is needed.

    Enumerates splits, microbatches, precision, recompute and sharding, simulates what may fit and be fastest, and
    says of every other why it loses. Rates are those of the data sheets, or what `fullframe calibrate` measured.
    The exit code is 1 where nothing fits, 2 where every strategy is refused, and 3 where the time was over before
    anything was found that fits.
    """

    recipe: Positional[Path]
    """Python file with a function recipe() -> fullframe.Recipe."""
    set: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE")] = ()
    """Values for the recipe: with lr=1e-3 it is called as recipe(lr=1e-3)."""
    gpus: Annotated[str, arg(metavar="NxNAME")]
    """4xV100-16GB: one node of 4; 2x8xA100-80GB: 2 nodes of 8; 2xcpu: ranks on this machine's CPU."""
    batch_size: Annotated[int | None, arg(metavar="N")] = None
    """Samples of one step of the whole job: the recipe's unless given."""
    precision: tuple[Precision, ...] = ()
    """Precisions to choose from: what the device is fast in, and fp32, unless given."""
    allow_optimizer: bool = False
    """Other optimizers may take the recipe's place."""
    allow_compile: bool = False
    """Try the two fastest that fit with compiled blocks too, which is experimental."""
    memory_limit_gib: Annotated[float | None, arg(metavar="GIB")] = None
    """What one rank may use, in place of the device's memory."""
    benchmark: bool = False
    """Time each distinct op on this machine's own device; on the CPU that is always done."""
    seconds: Annotated[float, arg(metavar="S")] = 120.0
    """Limit of the search: a simulation that is not done by then is given up, and what was not tried is said."""
    all: bool = False
    """Also list the strategies that were not simulated."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write the plans as JSON; `fullframe train --plan FILE` trains with the first."""
    html: Annotated[Path | None, arg(metavar="FILE")] = None
    """Draw bytes and seconds of the plans."""
    json: bool = False
    """Print the plans as one JSON list on stdout; everything else goes to stderr."""

    def run(self) -> int:
        """Plan and print; the exit code."""
        from fullframe.planning.plan import PlanRequest, plan_in_full
        from fullframe.planning.ranking import winner
        from fullframe.recipe import load_recipe, values_of

        if not self.seconds > 0:
            raise DeviceError(f"--seconds must be greater than 0, got {self.seconds:g}")
        if self.memory_limit_gib is not None and not 0 < self.memory_limit_gib < math.inf:
            raise DeviceError(f"--memory-limit-gib must be greater than 0, and a number, got {self.memory_limit_gib}")
        require_counts(self, ["batch_size"], RecipeError)
        require_writable(self.out, "--out")
        require_writable(self.html, "--html")
        started = time.monotonic()
        progress = _Progress(self.seconds)
        progress.show()
        with contextlib.redirect_stdout(sys.stderr):  # what the recipe prints is no plan
            request = PlanRequest(
                recipe=load_recipe(self.recipe, values_of(self.set)),
                devices=self.gpus,
                batch_size=self.batch_size,
                precisions=self.precision,
                allow_optimizer=self.allow_optimizer,
                allow_compile=self.allow_compile,
                memory_limit_bytes=None if self.memory_limit_gib is None else int(self.memory_limit_gib * GIB),
                seconds=self.seconds,
                benchmark=self.benchmark or None,
                workers=min(2, len(os.sched_getaffinity(0))),
                progress=progress.show,
            )
            planned = plan_in_full(request)
        progress.clear()
        listed = planned.plans if self.all else [p for p in planned.plans if p.prediction is not None]
        text = json.dumps([plan.as_dict() for plan in listed], indent=1)
        if self.out is not None:
            with writing(self.out, "--out"):
                self.out.write_text(text + "\n")
        if self.html is not None:
            from fullframe.planning.chart import draw

            with writing(self.html, "--html"):
                draw(planned.plans, f"{self.recipe} on {planned.cluster.name}", self.html)
        if self.json:
            print(text)
        self._report(planned, time.monotonic() - started, sys.stderr if self.json else sys.stdout)
        if any(plan.prediction is not None for plan in planned.plans) or planned.untried:
            return 0 if winner(planned.plans) else _OUT_OF_TIME if planned.untried else _NOTHING_FITS
        return _REFUSED

    def _report(self, planned: "Planned", seconds: float, stream: TextIO) -> None:
        from fullframe.planning.ranking import winner
        from fullframe.planning.shortfall import sentences
        from fullframe.simulation.prediction import said_of_host, said_of_layout

        console = Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else _WIDTH)
        simulated = [plan for plan in planned.plans if plan.prediction is not None]
        others = [plan for plan in planned.plans if plan.prediction is None]
        rows = planned.plans if self.all else simulated[:_ROWS]
        is_wide = console.width >= _WIDE
        console.print(_table(planned, rows, is_wide))
        if is_wide and rows:
            console.print(_OTHER, soft_wrap=True)
        if len(simulated) > len(rows):
            console.print(f"and {len(simulated) - len(rows)} more that were simulated; --all lists every strategy")
        for reason, count in Counter(plan.why.value or plan.reason for plan in others).most_common():
            console.print(f"{count} not simulated: {reason}", soft_wrap=True)
        for line in [*_assumptions(planned), *self._of_the_limit(planned), *_notes(simulated)]:
            console.print(line, soft_wrap=True)
        if planned.shortfall is not None:
            for line in sentences(planned.shortfall):
                console.print(line, soft_wrap=True)
        best = winner(planned.plans)
        if best is not None and best.prediction is not None:
            if best.prediction.bound_by_host:
                console.print(f"the best is {said_of_host(best.prediction)}", soft_wrap=True)
            if turning := said_of_layout(best.prediction):
                console.print(f"of the best: {turning}", soft_wrap=True)
        if planned.untried:
            console.print(self._out_of_time(planned), soft_wrap=True)
        verdict = f"best: {describe(best.strategy)}" if best else "nothing fits"
        if best is None and planned.untried:
            verdict = "none of these fits, and others were not tried" if simulated else "nothing was tried"
        elif not simulated:
            verdict = "every one is refused"
        console.print(
            f"{plural(len(planned.plans), 'strategy')} in {seconds:.0f} s, {len(simulated)} simulated; {verdict}",
            soft_wrap=True,
        )

    def _of_the_limit(self, planned: "Planned") -> list[str]:
        from fullframe.simulation.devices.table import parse_cluster

        device = parse_cluster(self.gpus).device
        limit, has = planned.cluster.device.memory_bytes / GIB, device.memory_bytes / GIB
        if not device.is_cuda or limit <= has:
            return []
        return [f"warning: --memory-limit-gib {limit:g} is more than the {has:.2f} GiB of a {device.name}"]

    def _out_of_time(self, planned: "Planned") -> str:
        what = "may be faster" if any(plan.fits for plan in planned.plans) else "may fit"
        return (
            f"the {self.seconds:g} s of --seconds were over before {plural(planned.untried, 'strategy')} could be "
            f"tried that {what}; give --seconds {max(math.ceil(4 * self.seconds), 60)} to try them"
        )


class _Progress:
    """On a terminal one line on stderr that the next one overwrites; anywhere else a line now and then.

    No thread draws it: simulations are forked.
    """

    def __init__(self, limit: float):
        self._started = self._spoke = time.monotonic()
        self._limit = limit

    def show(self, simulated: int = 0, fitting: int = 0) -> None:
        """Say how far the search is."""
        now = time.monotonic()
        text = f"{simulated} simulated, {fitting} fit, {now - self._started:.0f} of at most {self._limit:g} s"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif now - self._spoke >= _QUIET_SECONDS:
            self._spoke = now
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Wipe out the line of a terminal."""
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _table(planned: "Planned", plans: "list[OnePlan] | tuple[OnePlan, ...]", is_wide: bool) -> Table:
    from fullframe.planning.ranking import by_category

    limit, of = planned.limit_bytes / GIB, planned.cluster.device.memory_bytes / GIB
    table = Table(title=f"{planned.cluster.name}: {limit:.2f} GiB of {of:.2f} to be used", title_justify="left")
    kinds = ("weights", "gradients", "optimizer", "activations", "other") if is_wide else ()
    names = ("GiB", *kinds, "free", "ms/step", "samples/s")
    for name in ("", "strategy", *names, "why"):
        table.add_column(name, justify="right" if name in names else "left", overflow="fold")
    for number, plan in enumerate(plans, start=1):
        row = [str(number) if plan.fits else "", describe(plan.strategy)]
        if plan.prediction is None or plan.headroom_bytes is None:
            table.add_row(*map(Text, [*row, *[""] * len(names), plan.reason]))
            continue
        bytes = by_category(plan.prediction)
        known = [bytes.get(kind, 0) for kind in ("parameter", "gradient", "optimizer", "activation")]
        total = plan.prediction.device_bytes
        sizes = (total, *((*known, total - sum(known)) if is_wide else ()), plan.headroom_bytes)
        row += [f"{size / GIB:.2f}" for size in sizes]
        row += [figure(1e3 * plan.prediction.step_seconds), figure(plan.samples_per_second or 0.0)]
        table.add_row(*map(Text, [*row, plan.reason]))
    return table


def _notes(simulated: "list[OnePlan]") -> list[str]:
    """What simulations took for granted, each said once."""
    notes = {note for plan in simulated if plan.prediction is not None for note in plan.prediction.notes}
    return [f"note: {note}" for note in sorted(notes)]


def _assumptions(planned: "Planned") -> list[str]:
    device = planned.cluster.device
    source = device.source["matmul_flops_per_second"]
    lines = [f"rates as {source}" if device.measured else f"rates of {device.name} from: {source}"]
    if not device.is_cuda:
        lines.append(
            "on a CPU malloc keeps up to 0.6 GiB more than is listed: leave that room below --memory-limit-gib"
        )
    return lines
