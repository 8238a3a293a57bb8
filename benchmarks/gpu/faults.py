"""What `fullframe train` makes of a label out of range, of SIGTERM, and of a device whose memory is over."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.found import Found

_RECIPE = Path(__file__).parent / "recipe.py"
_LIMIT_SECONDS = 60
_CHANNELS, _BYTES = 512, 320 * 2**20  # maps of 8 x 512 x 64 x 128 in fp32 are 128 MiB, and three are there at once


class Run(NamedTuple):
    """How a training run ended."""

    code: int
    text: str
    losses: list[float]

    @property
    def starts(self) -> int:
        """How often the ranks were started, as far as the run says."""
        return 1 + self.text.count("starting the ranks again") + self.text.count("started again")


def faults(kind: str) -> Found:
    """Each in a run of its own."""
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        plain = _train(kind, Path(folder) / "plain")
        found.require(
            plain.code == 0 and len(plain.losses) == 6, f"a plain run ends with {plain.code}: {plain.text[-300:]}"
        )
        _label(found, kind, Path(folder))
        _stopped(found, kind, Path(folder), plain)
        if kind != "cpu":
            _memory(found, kind, Path(folder))
    return found


def _label(found: Found, kind: str, folder: Path) -> None:
    """The recipe's own fault: said once, and not tried again."""
    run = _train(kind, folder / "label", FAULT="label")
    found.note(fault="label out of range", code=run.code, starts=run.starts, said=_last_line(run.text))
    found.require(run.code not in (0, 75), f"a label out of range ends with exit code {run.code}")
    found.require(run.starts == 1, f"a label out of range was tried {run.starts} times")


def _stopped(found: Found, kind: str, folder: Path, plain: Run) -> None:
    """SIGTERM in a step: a checkpoint, from which the run goes on to the same numbers."""
    run = _train(kind, folder / "stopped", stop_after=2, FAULT="slow")
    again = _train(kind, folder / "stopped", "--resume")
    worst = max((abs(a / b - 1) for a, b in zip(again.losses, plain.losses, strict=False)), default=1.0)
    found.note(fault="SIGTERM", code=run.code, steps_before=len(run.losses), steps_after=len(again.losses), worst=worst)
    found.require(again.code == 0 and len(again.losses) == 6, f"after SIGTERM --resume ends with {again.code}")
    found.require(worst < 1e-5, f"after SIGTERM losses differ from a plain run's by {worst:.1e}")


def _memory(found: Found, kind: str, folder: Path) -> None:
    """Out of memory, really: the batch is cut finer, and the losses are those of enough memory."""
    enough = _train(kind, folder / "enough", FAULT_CHANNELS=str(_CHANNELS))
    run = _train(kind, folder / "memory", FAULT="memory", FAULT_CHANNELS=str(_CHANNELS), FAULT_BYTES=str(_BYTES))
    worst = max((abs(a / b - 1) for a, b in zip(run.losses, enough.losses, strict=False)), default=1.0)
    strategy = json.loads((folder / "memory" / "strategy.json").read_text())
    found.note(fault="out of memory", code=run.code, microbatches=strategy["microbatches"], worst=worst)
    found.require(run.code == 0 and len(run.losses) == 6, f"out of memory ends with {run.code}: {_last_line(run.text)}")
    found.require(strategy["microbatches"] > 1, "memory was enough: the fault was not met")
    found.require(worst < 1e-3, f"after running out of memory losses differ by {worst:.1e}")


def _train(kind: str, run_dir: Path, *words: str, stop_after: int | None = None, **environment: str) -> Run:
    """`fullframe train` as one rank; with `stop_after`, SIGTERM once so many steps are written."""
    changed = {**os.environ, **environment} | ({"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {})
    command = [sys.executable, "-m", "fullframe.cli", "train", str(_RECIPE), "--run-dir", str(run_dir)]
    command += ["--processes", "1", *words]
    process = subprocess.Popen(command, env=changed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        if stop_after is not None:
            _wait_for_steps(process, run_dir, stop_after)
            process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=_LIMIT_SECONDS)
    finally:
        process.kill()
    return Run(process.returncode, text, _losses(run_dir))


def _wait_for_steps(process: subprocess.Popen[str], run_dir: Path, steps: int) -> None:
    until = time.monotonic() + _LIMIT_SECONDS
    while process.poll() is None and len(_losses(run_dir)) < steps and time.monotonic() < until:
        time.sleep(0.02)


def _losses(run_dir: Path) -> list[float]:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
