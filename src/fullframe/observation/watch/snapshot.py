"""A run at one moment, for scripts: plain data, or a line of text."""

import math
from dataclasses import asdict
from typing import Any

from fullframe.observation.run_files import RunFiles
from fullframe.observation.summary import Summary
from fullframe.observation.units import duration_text, number_text, seconds_text, size_text


def as_data(run: RunFiles, summary: Summary) -> dict[str, Any]:
    """What `fullframe watch --json` prints; None where something is not known."""
    peak = summary.peak
    facts, prediction = run.known, run.prediction
    return {
        "run": str(run.path),
        "state": run.state,
        "reason": facts.reason,
        "level": summary.level,
        "step": summary.step,
        "steps": summary.steps,
        "loss": summary.loss,
        "best_loss": summary.best_loss,
        "measures": {name: _newest(run, name) for name in run.table.names if name not in ("loss", "skipped")},
        "step_seconds": summary.step_seconds,
        "images_per_second": summary.images_per_second,
        "seconds_left": summary.seconds_left,
        "lasted_seconds": summary.lasted_seconds,
        "skipped": summary.skipped,
        "restarts": facts.restarts,
        "peak_bytes": peak[1].peak_bytes if peak is not None else None,
        "slowest_rank": summary.slowest[0] if summary.slowest is not None else None,
        "ranks": [asdict(rank) for rank in summary.ranks],
        "prediction": asdict(prediction) if prediction is not None else None,
        "leaks": list(run.leaks),
        "findings": [finding._asdict() for finding in summary.findings],
    }


def _newest(run: RunFiles, name: str) -> float | None:
    found = run.table.newest(name)
    return None if found is None or math.isnan(found) else found


def as_line(run: RunFiles, summary: Summary) -> str:
    """The run in one line."""
    parts = [f"step {summary.step}" + (f"/{summary.steps}" if summary.steps else "")]
    if summary.loss is not None:
        parts.append(f"loss {number_text(summary.loss)}")
    if summary.step_seconds is not None:
        parts.append(f"{seconds_text(summary.step_seconds)} a step")
    if summary.images_per_second is not None:
        parts.append(f"{number_text(summary.images_per_second)} images/s")
    if summary.peak is not None and summary.peak[1].peak_bytes:
        parts.append(f"peak {size_text(summary.peak[1].peak_bytes)}")
    if summary.seconds_left is not None:
        parts.append(f"{duration_text(summary.seconds_left)} left")
    return "  ".join([*parts, *([run.state] if run.state != "running" else [])])
