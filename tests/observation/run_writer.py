"""Run directories as `fullframe train` leaves them, with figures that a test can look for again."""

import json
import math
import os
import random
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

MIB = 2**20
STARTED = datetime(2026, 3, 14, 9, 26).astimezone()
CATEGORIES = {"parameter": 220, "gradient": 220, "optimizer": 440, "activation": 1700, "temporary": 180}
CATEGORIES |= {"communication": 30, "cached": 120}
SECONDS = {"data": 0.004, "forward": 0.11, "exchange": 0.021, "backward": 0.23, "all_reduce": 0.03, "optimizer": 0.015}


def facts(**changes: Any) -> dict[str, Any]:
    """run.json of a run that finished."""
    known = {
        "state": "finished",
        "reason": "",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": STARTED.isoformat(),
        "ended": (STARTED + timedelta(minutes=2, seconds=3)).isoformat(),
        "recipe": "examples/stereo_depth/recipe.py",
        "arguments": ["train", "examples/stereo_depth/recipe.py", "--width", "2"],
        "commit": "0123456789abcdef0123456789abcdef01234567+",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "fullframe": "0.1.0"},
        "device": "NVIDIA H100",
        "world_size": 2,
        "steps": 300,
        "step": 300,
        "restarts": 0,
        "batch_size": 4,
        "environment": {"SLURM_JOB_ID": "4711"},
        "prediction": {
            "peak_bytes": 2850 * MIB,
            "bytes": {name: size * MIB for name, size in CATEGORIES.items() if name != "cached"},
            "step_seconds": 0.4,
            "seconds": {"matmul": 0.3, "exchange": 0.1},
        },
    }
    return known | changes


def records(steps: int, start: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    """metrics.jsonl: a loss that falls, with noise."""
    draw = random.Random(seed)
    found = []
    for step in range(start, start + steps):
        loss = 18 * math.exp(-step / 60) + 1.2 + draw.gauss(0, 0.25) * math.exp(-step / 200)
        record = {"step": step, "loss": max(loss, 0.3), "grad_norm": 20 * math.exp(-step / 90) + draw.random()}
        record |= {"skipped": False, "step_seconds": 0.41 * (1 + 0.1 * draw.random())}
        if step % 25 == 0:
            record["end_point_error"] = 9 * math.exp(-step / 80) + 1.1
        found.append(record)
    return found


def observations(rank: int, steps: Sequence[int], slower: float = 1.0, limit_mib: int | None = 4096) -> list[Any]:
    """observed/rank<k>.jsonl; `slower` stretches what the rank works itself."""
    draw = random.Random(rank)
    found = []
    for step in steps:
        work = {kind: value * slower for kind, value in SECONDS.items()}
        wait = 0.3 * (slower - 1) * sum(SECONDS.values())
        work["exchange"] = max(SECONDS["exchange"] - wait, 0.002)
        sizes = {name: round(size * MIB * (1 + 0.01 * rank)) for name, size in CATEGORIES.items()}
        sizes["activation"] += round(60 * MIB * draw.random())
        row = {"step": step, "time": STARTED.timestamp() + 0.41 * step, "seconds": work, "bytes": sizes}
        row |= {"peak_bytes": sum(sizes.values()), "reserved_bytes": sum(sizes.values()) + 150 * MIB}
        row |= {"limit_bytes": limit_mib and limit_mib * MIB, "host_bytes": (900 + rank) * MIB, "gpu_percent": 93.0}
        if step % 50 == 0:
            row["modules"] = {f"encoder.stages.{n}.blocks.0": round(300 * MIB / (n + 1)) for n in range(7)}
        found.append(row)
    return found


LEAK = {
    "leak": "graph",
    "path": "recipe.py",
    "line": 41,
    "kept_at": "recipe.py:12",
    "bytes_per_step": 3 * MIB,
    "after_step": 12,
    "text": "leak: `total_loss` grows with every step by 3.0 MiB; made at recipe.py:41 (total_loss += loss)",
}


def out_of_memory(**changes: Any) -> dict[str, Any]:
    """oom/rank1.json of a GPU, without what would fit."""
    known = {
        "step": 201,
        "attempt": 0,
        "rank": 1,
        "time": STARTED.timestamp() + 99,
        "error": "CUDA out of memory. Tried to allocate 600.00 MiB.",
        "devices": "2xV100-16GB",
        "batch_size": 4,
        "strategy": {"data": 1, "height": 1, "width": 2, "microbatches": 1, "precision": "bf16"},
        "phase": "forward",
        "line": "examples/stereo_depth/recipe.py:41",
        "source": "cost = correlation(left, right)",
        "module": "encoder.stages.0 (Stage)",
        "asked_bytes": 600 * MIB,
        "allocated_bytes": 13200 * MIB,
        "reserved_bytes": 14900 * MIB,
        "limit_bytes": 16128 * MIB,
        "free_bytes": 300 * MIB,
        "others_bytes": 512 * MIB,
        "live": {
            "when": "the peak of step 2, which was followed",
            "peak_bytes": sum(CATEGORIES.values()) * MIB,
            "bytes": {name: size * MIB for name, size in CATEGORIES.items()},
            "modules": {f"encoder.stages.{n}.blocks.0": round(300 * MIB / (n + 1)) for n in range(7)},
        },
    }
    return known | changes


WAYS = [
    {
        "words": words,
        "command": f"fullframe train examples/stereo_depth/recipe.py {options} --run-dir runs/first --resume",
        "device_bytes": size * MIB,
        "step_seconds": seconds,
    }
    for words, options, size, seconds in (
        ("width 2, bf16, 2 microbatches", "--width 2 --precision bf16 --microbatches 2", 11900, 0.43),
        ("width 2, bf16, recompute blocks", "--width 2 --precision bf16 --recompute blocks", 9700, 0.52),
        ("height 2, bf16, 4 microbatches", "--height 2 --precision bf16 --microbatches 4", 8100, 0.61),
    )
]


def write_run(
    path: Path,
    *,
    run: Mapping[str, Any] | None = None,
    metrics: Sequence[Mapping[str, Any]] | None = None,
    observed: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    log: str = "",
    strategy: Mapping[str, Any] | None = None,
) -> Path:
    """A run directory with these files; those that are None are not written."""
    path.mkdir(parents=True, exist_ok=True)
    if run is not None:
        (path / "run.json").write_text(json.dumps(run))
    if strategy is not None:
        (path / "strategy.json").write_text(json.dumps(strategy))
    if metrics is not None:
        write_lines(path / "metrics.jsonl", metrics)
    for rank, rows in (observed or {}).items():
        write_lines(path / "observed" / f"rank{rank}.jsonl", rows)
    if log:
        (path / "log.txt").write_text(log)
    return path


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]], mode: str = "w") -> None:
    """JSON lines."""
    path.parent.mkdir(exist_ok=True)
    with open(path, mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def good_run(path: Path, ranks: int = 2, steps: int = 300, **changes: Any) -> Path:
    """A run that is well in every way."""
    every = range(1, steps + 1, max(steps // 100, 1))
    return write_run(
        path,
        run=facts(world_size=ranks, steps=steps, step=steps, **changes),
        metrics=records(steps),
        observed={rank: observations(rank, every) for rank in range(ranks)},
        log=f"2026-03-14 09:28:03 wrote {path}/checkpoints/step-{steps:08d}\n",
        strategy={"data": 1, "height": 1, "width": ranks, "microbatches": 2, "precision": "bf16", "offload": False},
    )


def troubled_run(path: Path, ranks: int = 4) -> Path:
    """A run that leaks, skips, restarts, is nearly full, and waits for rank 2."""
    metrics = [*records(200, seed=3), LEAK]
    for record in metrics[90:93]:
        record |= {"loss": None, "grad_norm": None, "skipped": True}
    rows = {rank: observations(rank, range(1, 201, 2), 1.3 if rank == 2 else 1.0, 3170) for rank in range(ranks)}
    return write_run(
        path,
        run=facts(state="failed", reason="RunError: 3 steps in a row were skipped", world_size=ranks, restarts=2),
        metrics=metrics,
        observed=rows,
        log="2026-03-14 09:27:01 warning: rank 3 died (SIGKILL)\n"
        f"2026-03-14 09:27:20 warning: {LEAK['text']}\n"
        f"2026-03-14 09:27:20 warning: {LEAK['text']}\n2026-03-14 09:27:31 resumed after step 100\n",
        strategy={"data": 1, "height": 2, "width": 2, "microbatches": 4, "precision": "bf16", "offload": True},
    )
