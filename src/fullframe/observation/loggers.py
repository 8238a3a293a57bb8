"""Records of a run for TensorBoard, Weights & Biases and MLflow, beside the JSON lines that are always written.

Rank 0 logs. A logger that fails, because its server is gone say, is left out from then on, and the run goes on.
"""

import importlib.util
import json
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from fullframe.errors import FullframeError
from fullframe.observation.json_files import read_object
from fullframe.processes.stop_signals import Stopped
from fullframe.training.observers import Observed, Observer

Name = Literal["tensorboard", "wandb", "mlflow"]
Status = Literal["finished", "stopped", "failed"]
_PROJECT = "fullframe"  # of Weights & Biases, and the experiment of MLflow, unless the environment names another
_KNOWN_RUNS = "loggers.json"  # by which a run that is resumed goes on where it logged before
_BATCH_SECONDS = 5.0  # MLflow's server is asked no more often
_LOGIN_SECONDS = 30.0  # the other ranks wait meanwhile
_MLFLOW_MOST = 1000  # metrics of one request


class Logger(ABC):
    """One place where a run is logged."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step."""

    @abstractmethod
    def close(self, status: Status) -> None:
        """Nothing more comes."""


class TensorBoard(Logger):
    """Event files in `tensorboard` of the run directory: `tensorboard --logdir runs`."""

    def __init__(self, run: Observed, known: dict[str, str]):
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.run_dir / "tensorboard"
        self._make: Any = SummaryWriter
        self._writer: Any = None
        self._text = json.dumps(asdict(run.strategy), indent=1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Steps that were logged before, and come again after a resume, are dropped from the display."""
        if self._writer is None:
            self._writer = self._make(log_dir=str(self._folder), purge_step=step)
            self._writer.add_text("strategy", f"```\n{self._text}\n```")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: Status) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(Logger):
    """A run of Weights & Biases; WANDB_MODE, WANDB_PROJECT and the like work as ever."""

    def __init__(self, run: Observed, known: dict[str, str]):
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", run.run_dir.name),
            id=known.get("wandb"),
            resume="allow",
            dir=str(run.run_dir),
            config={"strategy": asdict(run.strategy)},
            settings=wandb.Settings(console="off", quiet=True, login_timeout=_LOGIN_SECONDS),
        )
        known["wandb"] = str(self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Sent by a process of its own."""
        self._run.log(dict(values), step=step)

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


class MLflow(Logger):
    """A run of MLflow, at MLFLOW_TRACKING_URI, or in `mlruns` of the run directory."""

    def __init__(self, run: Observed, known: dict[str, str]):
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            address = (run.run_dir / "mlruns").resolve().as_uri()
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        self._client: Any = MlflowClient(tracking_uri=address)
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        if "mlflow" in known:
            self._id = known["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._id = known["mlflow"] = self._client.create_run(experiment, run_name=run.run_dir.name).info.run_id
        self._client.log_batch(self._id, params=[Param(k, str(v)) for k, v in asdict(run.strategy).items()])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Kept for a few seconds, for each request waits for its answer."""
        now = int(time.time() * 1000)
        self._waiting += [self._metric(name, value, now, step) for name, value in values.items()]
        if time.monotonic() - self._sent >= _BATCH_SECONDS or len(self._waiting) >= _MLFLOW_MOST - len(values):
            self._send()

    def close(self, status: Status) -> None:
        self._send()
        named = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[status]
        self._client.set_terminated(self._id, status=named)

    def _send(self) -> None:
        if self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting)
        self._waiting, self._sent = [], time.monotonic()


LOGGERS: dict[Name, tuple[Callable[[Observed, dict[str, str]], Logger], str]] = {  # and the module that each needs
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WandB, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}


def require_loggers(names: Sequence[Name]) -> None:
    """Raises FullframeError where the package of one is not installed."""
    for name in names:
        if importlib.util.find_spec(LOGGERS[name][1]) is None:
            raise FullframeError(f"--log {name} needs a package; pip install 'fullframe[{name}]'")


class Loggers(Observer):
    """Those of `names`, on rank 0 alone."""

    def __init__(self, names: Sequence[Name]):
        self._names = names
        self._open: dict[Name, Logger] = {}
        self._say: Callable[[str], None] = print

    def begin(self, run: Observed) -> None:
        """Open them; a run that goes on is logged where it was."""
        if run.rank != 0 or not self._names:
            return
        self._say = run.say
        kept = run.run_dir / _KNOWN_RUNS
        known = {name: str(value) for name, value in (read_object(kept) or {}).items()}
        for name in self._names:
            self._guarded(name, partial(self._add, name, run, known))
        if known:
            self._guarded(self._names[0], lambda: kept.write_text(json.dumps(known) + "\n"))

    def after_step(self, number: int, record: Mapping[str, Any]) -> None:
        values = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for name, logger in list(self._open.items()):
            self._guarded(name, partial(logger.write, number, values))

    def end(self) -> None:
        """Close them, with how the run ended."""
        error = sys.exc_info()[1]
        status: Status = "finished" if error is None else "stopped" if isinstance(error, Stopped) else "failed"
        for name, logger in list(self._open.items()):
            self._guarded(name, partial(logger.close, status))
        self._open.clear()

    def _add(self, name: Name, run: Observed, known: dict[str, str]) -> None:
        self._open[name] = LOGGERS[name][0](run, known)

    def _guarded(self, name: Name, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self._open.pop(name, None)
            self._say(f"warning: {name} is left out from here: {type(error).__name__}: {error}")
