"""`fullframe report`: a run, or several side by side, as one HTML file."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fullframe.cli.display import writing
from fullframe.errors import RunError


@dataclass(frozen=True, kw_only=True)
class Report:
    """Draw a run as one HTML file that needs no network: loss, memory, time, leaks, what was predicted, strategy.

    `fullframe train` does it by itself when a run ends. With several runs the page compares them side by side.
    """

    run_dirs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")]
    """Run directories; a run that still goes on is shown as far as it is."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Where the page goes: report.html in the run directory unless given; comparison.html for several."""
    json: bool = False
    """Print one JSON object with the page's path and what was found on stdout."""

    def run(self) -> int:
        """Write the page and print where it is."""
        from fullframe.observation.report.page import write_report
        from fullframe.observation.run_files import read_run
        from fullframe.observation.summary import summarize

        if not self.run_dirs:
            raise RunError("name a run directory: fullframe report runs/first")
        runs = [read_run(folder) for folder in self.run_dirs]
        out = self.out or self.run_dirs[0] / ("report.html" if len(runs) == 1 else "comparison.html")
        with writing(out, "--out"):
            write_report(runs, out)
        if self.json:
            found = [
                {"run": str(run.path), "state": run.state, "findings": [f._asdict() for f in summarize(run).findings]}
                for run in runs
            ]
            print(json.dumps({"report": str(out), "runs": found}))
        else:
            print(out)
        return 0


def written(run_dir: Path) -> tuple[int, int]:
    """Changes with every step that the run in `run_dir` records."""
    try:
        found = (run_dir / "metrics.jsonl").stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def write_at_end(run_dir: Path, json_only: bool) -> None:
    """Write the page of a run that has ended and say where; what goes wrong here does not undo the run."""
    from fullframe.observation.report.page import write_report
    from fullframe.observation.run_files import read_run
    from fullframe.processes.lock import is_held
    from fullframe.training.run_file import LOCK

    if is_held(run_dir / LOCK):  # by another run, beside which this one was refused
        return
    stream = sys.stderr if json_only else sys.stdout
    try:
        print(f"report: {write_report([read_run(run_dir)], run_dir / 'report.html')}", file=stream, flush=True)
    except Exception as error:
        print(f"warning: no report was written: {type(error).__name__}: {error}", file=stream, flush=True)
