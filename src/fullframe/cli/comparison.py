"""Predicted against measured, once, after two steps of a run; the prediction is made beside the run."""

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullframe.cli.simulate import Simulate
from fullframe.cli.words import words
from fullframe.errors import RunError
from fullframe.processes.cores import apart, seconds_without_core
from fullframe.processes.place import TASKS
from fullframe.strategy import Strategy
from fullframe.wording import GIB, plural

_STEPS = 2  # of which the second has the optimizer's state from the start
_TIMED = 3  # steps, where the prediction is there already
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE", *TASKS)


class Comparison:
    """Fed with every record on every rank, it says on rank 0 how far off the prediction of the run was.

    `plan` may hold the prediction already; `batch_size` is the recipe's unless given, `values` are what it is called
    with. Without `strict_share` the run goes on while another process makes it, and a run that ends before is not
    compared; with it the ranks wait, and RunError is raised on all of them when a measured figure of memory is off by a
    larger share, or nothing could be predicted.

    `tracked` gives what the tensors of this rank held at most in the second step, `counted` what a GPU's counters had
    right after it, for an evaluation may follow: allocated and reserved. What a CPU process holds beside its tensors is
    said by itself. Seconds are those of the steps after the second, up to when the prediction is there.
    """

    def __init__(
        self,
        recipe: Path,
        strategy: Strategy,
        say: Callable[[str], None],
        plan: Mapping[str, Any] | None = None,
        strict_share: float | None = None,
        batch_size: int | None = None,
        values: Sequence[str] = (),
        tracked: Callable[[], int | None] = lambda: None,
        counted: Callable[[], tuple[int, int] | None] = lambda: None,
        on_prediction: Callable[[Mapping[str, Any]], None] = lambda predicted: None,
    ):
        self._recipe, self._strategy, self._say, self._strict = recipe, strategy, say, strict_share
        self._plan, self._batch_size, self._values = plan or {}, batch_size, tuple(values)
        self._tracked, self._counted, self._on_prediction = tracked, counted, on_prediction
        self._records = 0
        self._seconds: list[float] = []
        self._waits = False
        self._delayed = 0.0
        self._measured: dict[str, float] = {}
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Comparison":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._waits and error is None:
            self._conclude_known()
        if self._strict is not None and self._records < _STEPS and error is None:
            self._say(
                f"--strict-memory compared nothing: it needs {_STEPS} steps, this took {plural(self._records, 'step')}"
            )
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            if error is None and self._plan:
                self._say("the run ended before a prediction for these devices was made; --strict-memory waits for it")

    def record(self, record: Mapping[str, Any]) -> None:
        """One step; every rank calls it with the same record but for its seconds."""
        self._records += 1
        if self._records > _STEPS:
            self._seconds.append(float(record["step_seconds"]))
        if self._records == _STEPS:
            self._delayed = seconds_without_core()
            self._start(record)
        elif self._child is not None and self._child.poll() is not None:
            self._conclude(self._predicted())
        elif self._waits and len(self._seconds) == _TIMED:
            self._conclude_known()

    def _conclude_known(self) -> None:
        self._waits = False
        if self._known is not None:
            self._conclude(self._known)

    def _start(self, record: Mapping[str, Any]) -> None:
        from fullframe.ranks.agreement import from_all_ranks, is_first_rank, on_first_rank

        mine = measured(self._tracked(), self._counted())
        of_ranks = from_all_ranks({**mine, "step_seconds": float(record["step_seconds"])})
        self._measured = {name: max(rank[name] for rank in of_ranks) for name in of_ranks[0]}
        if self._strict is not None:
            self._require_close(self._conclude(on_first_rank(self._predicted)), self._strict)
        elif self._known is not None:
            self._waits = True  # for steps to be timed
        elif is_first_rank():
            self._child = predicting(self._recipe, self._strategy, self._batch_size, self._values)

    @property
    def _known(self) -> Mapping[str, Any] | None:
        same = self._plan.get("devices") == _here(self._strategy.ranks)
        same = same and self._batch_size in (None, self._plan.get("batch_size", self._batch_size))
        return self._plan.get("prediction") if same else None

    def _predicted(self) -> Mapping[str, Any]:
        if self._known is not None:
            return self._known
        child = self._child or predicting(self._recipe, self._strategy, self._batch_size, self._values)
        self._child = None
        return prediction_of(child)

    def _conclude(self, predicted: Mapping[str, Any]) -> dict[str, float]:
        """Say it on rank 0; by how much memory is off, as a share, positive where more was measured."""
        if "problem" in predicted:
            self._say(f"no prediction to compare with: {predicted['problem']}")
            return {"prediction": float("inf")}
        self._on_prediction(predicted)
        found, without_core = self._measured_now()
        off, parts = {}, []
        for name, key in _MEASURES.items():
            if name in found and predicted.get(key):
                share = found[name] / predicted[key] - 1
                unit, text = (GIB, "GiB") if name != "step_seconds" else (1.0, "s")
                parts.append(
                    f"{name.removesuffix('_bytes').replace('_', ' ')} {predicted[key] / unit:.3g} predicted, "
                    f"{found[name] / unit:.3g} {text} measured ({share:+.0%})"
                )
                if name != "step_seconds":
                    off[name] = share
        if without_core:
            parts[-1] += f" and {without_core:.3g} s more in which others had the core"
        self._say("; ".join(parts))
        if "allocated_bytes" in found and "process_bytes" in self._measured:
            self._say(_beside(self._measured["process_bytes"], found["allocated_bytes"], predicted))
        return off

    def _measured_now(self) -> tuple[dict[str, float], float]:
        """What is held against the prediction; and the seconds of a step in which this rank waited for a core."""
        found = dict(self._measured)
        if "allocated_bytes" in found:
            found.pop("process_bytes", None)
        if not self._seconds:
            return found, 0.0
        step = statistics.median(self._seconds)
        step, stood = apart(step, (seconds_without_core() - self._delayed) / len(self._seconds))
        return found | {"step_seconds": step}, stood

    def _require_close(self, off: Mapping[str, float], strict: float) -> None:
        worst = max(off, key=lambda name: abs(off[name]))
        if abs(off[worst]) > strict:
            raise RunError(
                f"--strict-memory {strict:g}: {worst.removesuffix('_bytes')} memory is off by {off[worst]:+.0%}; "
                "leave the option out to train all the same"
            )


def predicting(
    recipe: Path, strategy: Strategy, batch_size: int | None, values: Sequence[str]
) -> "subprocess.Popen[str]":
    """A process that simulates the recipe, called with `values`, on the devices that are here, beside the run."""
    quietly = ["nice", "-n", "10"] if shutil.which("nice") else []
    cluster = _here(strategy.ranks)
    timed, given = cluster.endswith("cpu"), Path("/dev/stdin")
    command = Simulate(recipe=recipe, gpus=cluster, strategy=given, benchmark=timed, json=True)
    command = replace(command, batch_size=batch_size, set=tuple(values))
    read, write = os.pipe()
    with os.fdopen(write, "w") as out:
        out.write(strategy.to_json())  # a few hundred bytes: they fit into the pipe
    with os.fdopen(read) as stdin:
        started = [*quietly, sys.executable, "-m", "fullframe.cli", "simulate", *words(command)]
        return subprocess.Popen(
            started, env=environment_beside(), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def environment_beside() -> dict[str, str]:
    """That of a process beside a run's ranks, which is none of them and leaves the GPUs to them."""
    own = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    return own | {"CUDA_VISIBLE_DEVICES": ""}  # a context would take memory from the run


def last_line(said: str, code: int | None) -> str:
    """Why a process that ended with this code failed, as the end of what it said has it."""
    return (said.strip().splitlines() or [f"exit code {code}"])[-1]


def prediction_of(child: "subprocess.Popen[str]") -> dict[str, Any]:
    """What such a process has found, once it has: a prediction as a dict, or {"problem": reason}."""
    out, problem = child.communicate()
    with contextlib.suppress(json.JSONDecodeError):
        if child.returncode == 0:
            return dict(json.loads(out))
    return {"problem": last_line(problem, child.returncode)}


# What is measured, and the field of a prediction that it is held against.
_MEASURES = {
    "allocated_bytes": "peak_bytes",
    "reserved_bytes": "reserved_bytes",
    "process_bytes": "step_bytes",
    "step_seconds": "step_seconds",
}


def measured(tracked: int | None = None, counted: tuple[int, int] | None = None) -> dict[str, float]:
    """The most memory this rank has held: by torch's counters on a GPU, on the CPU of the process and `tracked`.

    `counted` is what the counters had earlier.
    """
    from fullframe.ranks import device

    if device.is_in_use():
        allocated, reserved = counted or device.peak_bytes()
        return {"allocated_bytes": float(allocated), "reserved_bytes": float(reserved)}
    of_tensors = {} if tracked is None else {"allocated_bytes": float(tracked)}
    return {**of_tensors, "process_bytes": _most_resident_bytes()}


def _here(ranks: int) -> str:
    from fullframe.simulation.devices.table import cluster_here

    return cluster_here(ranks)


def _beside(process: float, tensors: float, predicted: Mapping[str, Any]) -> str:
    """What a process on the CPU holds that is no tensor."""
    libraries = float(predicted.get("terms", {}).get("context", 0))
    rest = max(process - tensors - libraries, 0.0)
    return (
        f"beside its tensors a rank's process held {(process - tensors) / GIB:.3g} GiB at most: Python with what it "
        f"has loaded, {libraries / GIB:.3g} GiB when it was calibrated; the other {rest / GIB:.3g} GiB are freed "
        "memory that malloc keeps for the next tensor, and samples being read"
    )


def _most_resident_bytes() -> float:
    """Of this process; what getrusage gives counts what the process that started it had, up to the exec."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if found is not None:
            return int(found[1]) * 1024.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
