"""`fullframe jobs`: how all runs stand, once or as long as one looks."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from fullframe.errors import LaunchError
from fullframe.launching.jobs import STATES, Files, JobRow, jobs, selected
from fullframe.wording import GIB, in_one_line, plural

_WIDTH = 160  # of a table that goes into a file or a pipe
_GAP = 2  # between columns
_COLOURS = {"running": "green", "finished": "blue", "failed": "red", "died": "red", "lost": "red", "unknown": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """A table of runs, of this machine and of Slurm: state, step, loss, speed, memory, requeues, last warning.

    Read from run directories and squeue; accounting need not be on.
    """

    folders: Annotated[Positional[tuple[Path, ...]], arg(metavar="[FOLDER ...]")] = (Path("runs"),)
    """Where runs are looked for, and below."""
    state: Annotated[tuple[str, ...], arg(metavar="STATE")] = ()
    """Only runs in these: running, starting, pending, requeued, stopped, finished, failed, died, lost, unknown."""
    match: Annotated[tuple[str, ...], arg(metavar="PATTERN")] = ()
    """Only runs with such a name: lr=1e-3, or depth*seed=2."""
    follow: bool = False
    """Show it again every few seconds, until Ctrl-C; where that is no terminal, a line for each change of state."""
    every: Annotated[float, arg(metavar="SECONDS")] = 5.0
    """How often --follow looks."""
    json: bool = False
    """Print the runs as one JSON list."""

    def run(self) -> int:
        """Look and print."""
        unknown = [state for state in self.state if state not in STATES]
        if unknown:
            raise LaunchError(f"--state {unknown[0]!r} is none of {', '.join(STATES)}")
        if self.json and self.follow:
            raise LaunchError("--json prints one list; leave out --follow, and call it again")
        if not self.every > 0:
            raise LaunchError(f"--every must be greater than 0, got {self.every:g}")
        files = Files()
        rows, problem = self._rows(files)
        if self.follow:
            self._follow(files, rows)
            return 0
        if problem:
            print(f"warning: {problem}; states are those that the runs wrote", file=sys.stderr)
        if self.json:
            print(json.dumps([asdict(row) for row in rows], indent=1))
            return 0
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH)
        console.print(_table(rows, console.width))
        console.print(_summary(rows))
        return 0

    def _rows(self, files: Files) -> tuple[list[JobRow], str]:
        rows, problem = jobs(self.folders, files)
        return selected(rows, self.state, self.match), problem

    def _follow(self, files: Files, rows: list[JobRow]) -> None:
        console = Console()
        if not console.is_terminal:
            known: dict[str, str] = {}
            while True:
                for row in rows:
                    if known.get(row.run) != row.state:
                        known[row.run] = row.state
                        said = f" ({row.reason})" if row.reason else ""
                        print(in_one_line(f"{time.strftime('%H:%M:%S')} {row.run}: {row.state}{said}"), flush=True)
                time.sleep(self.every)
                rows, _ = self._rows(files)
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                table = _table(rows[: max(console.height - 6, 1)], console.width)
                table.caption = _summary(rows)
                live.update(table, refresh=True)
                time.sleep(self.every)
                rows, _ = self._rows(files)


def _table(rows: list[JobRow], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "job", "state", "step", "loss", "images/s", "peak GiB (predicted)", "requeues", "last warning"):
        right = name not in ("run", "job", "state", "last warning")
        table.add_column(name, justify="right" if right else "left", overflow="fold" if name == "run" else "ellipsis",
                         no_wrap=name != "run")  # fmt: skip
    for row in rows:
        state = f"{row.state}: {row.reason}" if row.reason and row.state in ("pending", "requeued") else row.state
        words = [row.run, row.job or "", state, _step(row), _number(row.loss), _number(row.images_per_second)]
        words += [_memory(row), str(row.requeues or ""), _warning(row)]
        cells = [Text(in_one_line(word)) for word in words]
        cells[2].stylize(_COLOURS.get(row.state, ""))
        table.add_row(*cells)
    *others, warning = table.columns  # which gives way, and names of runs are folded
    taken = sum(max(cell_len(str(text)) for text in (column.header, *column.cells)) + _GAP for column in others)
    warning.max_width = max(width - taken, cell_len(str(warning.header)))
    return table


def _step(row: JobRow) -> str:
    if row.step is None:
        return ""
    return f"{row.step}/{row.steps}" if row.steps else str(row.step)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _memory(row: JobRow) -> str:
    if row.peak_bytes is None:
        return ""
    predicted = f" ({row.predicted_bytes / GIB:.2f})" if row.predicted_bytes else ""
    return f"{row.peak_bytes / GIB:.2f}{predicted}"


def _warning(row: JobRow) -> str:
    return row.reason if row.state in ("failed", "died", "lost", "unknown") and row.reason else row.warning or ""


def _summary(rows: list[JobRow]) -> str:
    counts = {state: sum(row.state == state for row in rows) for state in STATES}
    found = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{plural(len(rows), 'run')}: {found}" if rows else "no runs"
