"""`fullframe calibrate` as a user runs it, into the cache that the parts after it read."""

import json
import subprocess
import sys

from benchmarks.gpu.found import Found


def calibrate(kind: str) -> Found:
    """As one rank."""
    return _calibrated(1)


def calibrate_link(kind: str) -> Found:
    """As two ranks, with the link between them."""
    return _calibrated(2)


def _calibrated(processes: int) -> Found:
    found = Found()
    words = [sys.executable, "-m", "fullframe.cli", "calibrate", "--processes", str(processes), "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    found.require(done.returncode == 0, f"calibrate ends with {done.returncode}: {done.stderr[-500:]}")
    if done.returncode:
        return found
    rates = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    for what in ("device", "measured_on", "launch_seconds", "context_bytes", "host_bytes_per_second", "host"):
        found.note(what=what, value=rates[what])
    for what in ("copy", "link", "all_reduce"):
        found.note(what=f"{what}: (bytes, 1e9 bytes a second)", value=_giga(rates[what]))
    for what in ("matmul", "convolution", "depthwise"):
        for dtype, points in rates[what].items():
            found.note(what=f"{what} {dtype}: (operations, 1e12 a second)", value=_giga(points, 1e12))
    return found


def _giga(points: list[list[float]], unit: float = 1e9) -> str:
    return ", ".join(f"{size:.2g}: {rate / unit:.3g}" for size, rate in points)
