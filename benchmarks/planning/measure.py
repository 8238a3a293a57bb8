"""Runs: `fullframe plan` by the clock, and strategies of the stereo example for real, memory by the kernel's count."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from fullframe.recipe import load_recipe
from fullframe.simulation.simulate import simulate
from fullframe.strategy import Strategy

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WARM_UP = 3  # steps whose seconds do not count


class Run(NamedTuple):
    """A real run: the median step, and the most that any rank's process held."""

    step_seconds: float
    process_bytes: int


def environment(cache: Path) -> dict[str, str]:
    """Stored rates are read from `cache` and from nowhere else."""
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}


def planned(gpus: str, cache: Path) -> dict[str, Any]:
    """`fullframe plan` for ConvNeXt-XL on `gpus`: its seconds, what it tried, the winner and its simulation."""
    command = [sys.executable, "-m", "fullframe.cli", "plan", str(HERE / "convnext_xl.py"), "--gpus", gpus, "--json"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment(cache), cwd=ROOT)
    seconds = time.monotonic() - started
    if done.returncode > 1:
        raise SystemExit(done.stderr)
    plans = json.loads(done.stdout)
    tried = re.search(r"(\d+) strategies in \d+ s, (\d+) simulated; (.*)", done.stderr)
    assert tried is not None, done.stderr
    first = plans[0]
    recipe, strategy = load_recipe(HERE / "convnext_xl.py"), Strategy.from_json(json.dumps(first["strategy"]))
    simulations = []
    for _ in range(3):  # the first one in a process loads and compiles things
        began = time.process_time()
        simulate(recipe, strategy, gpus)
        simulations.append(time.process_time() - began)
    return {
        "gpus": gpus,
        "seconds": seconds,
        "simulation_seconds": min(simulations),
        "strategies": int(tried[1]),
        "simulated": int(tried[2]),
        "fits": first["fits"],
        "winner": tried[3].removeprefix("fastest: "),
        "precisions": sorted({plan["strategy"]["precision"] for plan in plans}),
        "gib": first["prediction"]["device_bytes"] / 2**30,
        "step_seconds": first["prediction"]["step_seconds"],
    }


def trained(strategy: Strategy, steps: int, cache: Path) -> Run:
    """`fullframe train` of the stereo example with `strategy`."""
    with tempfile.TemporaryDirectory() as folder:
        plan, run_dir = Path(folder) / "strategy.json", Path(folder) / "run"
        plan.write_text(strategy.to_json())
        words = [
            "train",
            str(HERE / "stereo.py"),
            "--plan",
            str(plan),
            "--steps",
            str(steps),
            "--run-dir",
            str(run_dir),
        ]
        process = psutil.Popen(
            [sys.executable, "-m", "fullframe.cli", *words],
            env=environment(cache),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        most: dict[int, int] = {}
        while process.poll() is None:
            ranks = [process] if strategy.ranks == 1 else process.children()
            for rank in ranks:
                most[rank.pid] = max(most.get(rank.pid, 0), _high_water(rank.pid))
            time.sleep(0.2)
        if process.returncode:
            raise SystemExit(f"{strategy}: {process.stderr.read()}")
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [record["step_seconds"] for record in records[WARM_UP:]]
    return Run(statistics.median(seconds), max(most.values()))


def _high_water(pid: int) -> int:
    """The most that a process has held so far, by the kernel; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0
