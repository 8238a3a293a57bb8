"""Predicted against measured, once, after two steps of a run; the prediction is made beside the run."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullframe.cli.simulate import Simulate
from fullframe.cli.words import words
from fullframe.errors import RunError
from fullframe.strategy import Strategy

_STEPS = 2  # of which the second has the optimizer's state from the start
_GIB = 2**30
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE")


class Comparison:
    """Fed with every record on every rank, it says on rank 0 how far off the prediction of the run was.

    `plan` may hold the prediction already; `batch_size` is the recipe's unless given. Without `strict_share` the run
    goes on while another process makes it, and a run that ends before is not compared; with it the ranks wait, and
    RunError is raised on all of them when a measured figure of memory is off by a larger share, or nothing could be
    predicted.
    """

    def __init__(
        self,
        recipe: Path,
        strategy: Strategy,
        say: Callable[[str], None],
        plan: Mapping[str, Any] | None = None,
        strict_share: float | None = None,
        batch_size: int | None = None,
    ):
        self._recipe, self._strategy, self._say, self._strict = recipe, strategy, say, strict_share
        self._plan, self._batch_size = plan or {}, batch_size
        self._records = 0
        self._measured: dict[str, float] = {}
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Comparison":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            if error is None and self._plan:
                self._say("the run ended before a prediction for these devices was made; --strict-memory waits for it")

    def record(self, record: Mapping[str, Any]) -> None:
        """One step; every rank calls it with the same record but for its seconds."""
        self._records += 1
        if self._records == _STEPS:
            self._start(record)
        elif self._child is not None and self._child.poll() is not None:
            self._conclude(self._predicted())

    def _start(self, record: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        from fullframe.ranks.agreement import from_all_ranks, on_first_rank

        of_ranks = from_all_ranks({**measured(), "step_seconds": float(record["step_seconds"])})
        self._measured = {name: max(rank[name] for rank in of_ranks) for name in of_ranks[0]}
        if self._strict is not None:
            self._require_close(self._conclude(on_first_rank(self._predicted)), self._strict)
        elif self._known is not None:
            self._conclude(self._known)
        elif not dist.is_initialized() or dist.get_rank() == 0:
            self._child = self._simulation()

    @property
    def _known(self) -> Mapping[str, Any] | None:
        same = self._plan.get("devices") == cluster_here(self._strategy.ranks)
        same = same and self._batch_size in (None, self._plan.get("batch_size", self._batch_size))
        return self._plan.get("prediction") if same else None

    def _simulation(self) -> "subprocess.Popen[str]":
        quietly = ["nice", "-n", "10"] if shutil.which("nice") else []
        cluster = cluster_here(self._strategy.ranks)
        timed, given = cluster.endswith("cpu"), Path("/dev/stdin")
        command = Simulate(recipe=self._recipe, gpus=cluster, strategy=given, benchmark=timed, json=True)
        command = replace(command, batch_size=self._batch_size)
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a context would take memory from the run
        read, write = os.pipe()
        with os.fdopen(write, "w") as out:
            out.write(self._strategy.to_json())  # a few hundred bytes: they fit into the pipe
        with os.fdopen(read) as strategy:
            started = [*quietly, sys.executable, "-m", "fullframe.cli", "simulate", *words(command)]
            return subprocess.Popen(
                started, env=environment, stdin=strategy, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

    def _predicted(self) -> Mapping[str, Any]:
        if self._known is not None:
            return self._known
        self._child = self._child or self._simulation()
        out, problem = self._child.communicate()
        code, self._child = self._child.returncode, None
        with contextlib.suppress(json.JSONDecodeError):
            if code == 0:
                return dict(json.loads(out))
        reason = problem.strip().splitlines()[-1:] or [f"exit code {code}"]
        return {"problem": reason[0]}

    def _conclude(self, predicted: Mapping[str, Any]) -> dict[str, float]:
        """Say it on rank 0; by how much memory is off, as a share, positive where more was measured."""
        if "problem" in predicted:
            self._say(f"no prediction to compare with: {predicted['problem']}")
            return {"prediction": float("inf")}
        off, parts = {}, []
        for name, key in _MEASURES.items():
            if name in self._measured and predicted.get(key):
                share = self._measured[name] / predicted[key] - 1
                unit, text = (_GIB, "GiB") if name != "step_seconds" else (1.0, "s")
                parts.append(
                    f"{name.removesuffix('_bytes').replace('_', ' ')} {predicted[key] / unit:.3g} predicted, "
                    f"{self._measured[name] / unit:.3g} {text} measured ({share:+.0%})"
                )
                if name != "step_seconds":
                    off[name] = share
        self._say("; ".join(parts))
        return off

    def _require_close(self, off: Mapping[str, float], strict: float) -> None:
        worst = max(off, key=lambda name: abs(off[name]))
        if abs(off[worst]) > strict:
            raise RunError(
                f"--strict-memory {strict:g}: {worst.removesuffix('_bytes')} memory is off by {off[worst]:+.0%}; "
                "leave the option out to train all the same"
            )


# What is measured, and the field of a prediction that it is held against.
_MEASURES = {
    "allocated_bytes": "peak_bytes",
    "reserved_bytes": "reserved_bytes",
    "process_bytes": "device_bytes",
    "step_seconds": "step_seconds",
}


def measured() -> dict[str, float]:
    """The most memory this rank has held: by torch's counters on a GPU, of the whole process on the CPU."""
    from fullframe.ranks import device

    if device.is_in_use():
        allocated, reserved = device.peak_bytes()
        return {"allocated_bytes": float(allocated), "reserved_bytes": float(reserved)}
    return {"process_bytes": _most_resident_bytes()}


def _most_resident_bytes() -> float:
    """Of this process; what getrusage gives counts what the process that started it had, up to the exec."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if found is not None:
            return int(found[1]) * 1024.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def cluster_here(ranks: int) -> str:
    """The name of the devices this job runs on."""
    from fullframe.ranks import device

    nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    name = "cpu"
    if device.accelerator() is not None:
        from fullframe.simulation.devices.table import name_of_gpu

        name = name_of_gpu(*device.properties())
    return f"{nodes}x{ranks // nodes}x{name}" if nodes > 1 else f"{ranks}x{name}"
