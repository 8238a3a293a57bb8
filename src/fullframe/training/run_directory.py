"""What a run writes beside its checkpoints: strategy.json, metrics.jsonl, log.txt. Rank 0 writes."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullframe.errors import RunError
from fullframe.strategy import Strategy
from fullframe.training.agreement import on_first_rank


class RunDirectory:
    """A run's files under `path`; made on all ranks by `open_run`."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._writes = dist.get_rank() == 0
        self._metrics = path / "metrics.jsonl"

    def append(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; a value that is not finite is written as null, which JSON knows."""
        if self._writes:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            with open(self._metrics, "a") as file:
                file.write(json.dumps(finite) + "\n")

    def log(self, message: str) -> None:
        """One line of log.txt, with the time."""
        if self._writes:
            with open(self.path / "log.txt", "a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def forget_after(self, step: int) -> None:
        """Drop the metrics of later steps, which a resumed run will do again, and a line that a crash cut off."""
        if not self._writes or not self._metrics.exists():
            return
        kept = [line for line in self._metrics.read_text().splitlines() if _step_of(line) <= step]
        partial = self._metrics.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        os.replace(partial, self._metrics)


def open_run(path: Path, strategy: Strategy, resume: bool) -> RunDirectory:
    """The run directory, made or found again; all ranks call it.

    Raises RunError on all ranks when it holds a run and `resume` is not asked for, or the other way round.
    """

    def prepare() -> None:
        try:
            check_run_directory(path, resume)
            path.mkdir(parents=True, exist_ok=True)
            (path / "strategy.json").write_text(strategy.to_json() + "\n")
        except OSError as error:
            raise RunError(f"cannot use the run directory {path}: {error}") from error

    on_first_rank(prepare)
    return RunDirectory(path)


def check_run_directory(path: Path, resume: bool) -> None:
    """Raises RunError unless `path` holds a run exactly when one is to be resumed."""
    has_steps = (path / "metrics.jsonl").exists() or (path / "checkpoints").exists()
    if has_steps and not resume:
        raise RunError(f"{path} already holds a run; go on with it by --resume (resume=True) or name another directory")
    # A run that ended before its first step left nothing worth refusing, but it may be resumed.
    if resume and not has_steps and not (path / "strategy.json").exists():
        raise RunError(f"{path} holds no run to resume; check the path, or start one without --resume")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
