"""What this machine's device really does: matrix products, convolutions, copies, launches and the link, timed once.

The code for CUDA is written with care and has never run on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import torch
import torch.nn.functional as F

from fullframe.errors import DeviceError
from fullframe.simulation.devices.host_costs import HostCosts
from fullframe.techniques.precision import Fp32Math, fp32_math

Points = tuple[tuple[float, float], ...]  # (size of the work, rate reached at that size), by size

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
          "fp16": torch.float16}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured of one device; sizes and rates in operations or bytes, and per second.

    matmul, convolution, depthwise: by dtype, (operations, operations a second) of square products, 3x3 convolutions,
        and 7x7 depthwise convolutions, forward and backward
    copy:             (bytes read and written, bytes a second)
    launch_seconds:   of one small op in a forward and a backward pass, host's side
    context_bytes:    of the process beside its tensors: CUDA's context, or on the CPU what Python has loaded
    link, all_reduce: (bytes sent, bytes a second) between two ranks; empty where there was one
    host:             what Python takes on the processor; None in files of before 2026-11-22
    """

    device: str
    measured_on: str
    date: str
    memory_bytes: int
    matmul: Mapping[str, Points]
    convolution: Mapping[str, Points]
    depthwise: Mapping[str, Points]
    copy: Points
    launch_seconds: float
    context_bytes: int
    host_bytes_per_second: float | None = None
    link: Points = ()
    all_reduce: Points = ()
    host: HostCosts | None = None

    def to_json(self) -> str:
        """One JSON object with every field."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Rates:
        """The rates `to_json` wrote; raises DeviceError on anything else."""
        try:
            fields = json.loads(text)
            for name in ("matmul", "convolution", "depthwise"):
                fields[name] = {dtype: _points(points) for dtype, points in fields[name].items()}
            for name in ("copy", "link", "all_reduce"):
                fields[name] = _points(fields[name])
            if fields.get("host") is not None:
                fields["host"] = HostCosts(**fields["host"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeviceError(f"not what `fullframe calibrate` writes: {error}; measure again") from error


def rate_at(points: Points, size: float) -> float:
    """The rate at `size`, between two measured sizes by the logarithm of both, beyond them the nearest."""
    below = max((point for point in points if point[0] <= size), default=points[0])
    above = min((point for point in points if point[0] >= size), default=points[-1])
    if below[0] == above[0]:
        return below[1]
    share = math.log(size / below[0]) / math.log(above[0] / below[0])
    return float(below[1] * (above[1] / below[1]) ** share)


def calibration_path(device: str) -> Path:
    """Where the rates of `device` are kept: below XDG_CACHE_HOME, or ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fullframe" / "devices" / f"{device}.json"


def calibrated(device: str) -> Rates | None:
    """The stored rates of `device`, None where there are none. Raises DeviceError when the file is broken."""
    path = calibration_path(device)
    return load_rates(path) if path.is_file() else None


def load_rates(path: Path) -> Rates:
    """The rates in a file; raises DeviceError naming the file."""
    try:
        return Rates.from_json(path.read_text())
    except (OSError, DeviceError) as error:
        raise DeviceError(f"{path}: {error}") from error


def store_rates(rates: Rates, path: Path | None = None) -> Path:
    """Write the rates where `calibrated` finds them, or to `path`; the file."""
    path = path or calibration_path(rates.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rates.to_json() + "\n")
    return path


@functools.cache
def measured_now(device: str, threads: int) -> Rates:
    """The CPU's rates from half a second of work on `threads` threads; kept as long as the process lives."""
    with on_threads(threads):
        return measure(device, torch.device("cpu"), quick=True)


def measure(name: str, device: torch.device, *, quick: bool = False) -> Rates:
    """Time this device; a few seconds, `quick` half a second."""
    timer = _Timer(device, seconds=0.02 if quick else 0.15)
    cuda = device.type == "cuda"
    sides = (256, 1024) if cuda and quick else (256, 512, 1024, 2048, 4096, 8192) if cuda else (64, 128, 256, 512)
    dtypes = _dtypes(device)
    maps = ((64, 28), (64, 112), (256, 56)) if cuda else ((32, 28), (64, 56))
    largest = 2**30 if cuda else 2**25 if quick else 2**27
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else psutil.virtual_memory().total
    resident = psutil.Process().memory_info().rss  # before the tensors that are timed
    return Rates(
        device=name,
        measured_on=_hardware(device),
        date=time.strftime("%Y-%m-%d"),
        memory_bytes=memory,
        matmul={dtype: timer.matmul(dtype, sides[-2:] if quick else sides) for dtype in dtypes},
        convolution={} if quick else {dtype: timer.convolution(dtype, maps) for dtype in dtypes},
        depthwise={} if quick else {dtype: timer.depthwise(dtype) for dtype in dtypes},
        copy=timer.copy([size for size in (2**16, 2**20, 2**24, 2**27, 2**30) if size <= largest]),
        launch_seconds=timer.launch(),
        host_bytes_per_second=timer.to_host() if cuda else None,
        context_bytes=_context_bytes(device) if cuda else resident,
    )


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds; of this thread's work alone where it does all of it, so that other processes do not count."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


class _Timer:
    """Seconds of one call: the fastest of a few batches, each long enough to be measured."""

    def __init__(self, device: torch.device, seconds: float):
        self.device, self._seconds = device, seconds

    def __call__(self, call: Callable[[], object]) -> float:
        call()  # the first time chooses algorithms and loads kernels
        now = clock_of(self.device)
        repeats, best, spent = 1, float("inf"), 0.0
        while spent < self._seconds:
            self._wait()
            started = now()
            for _ in range(repeats):
                call()
            self._wait()
            took = now() - started
            spent += took
            best = min(best, took / repeats)
            repeats = max(1, min(1000, round(self._seconds / 5 / best)))
        return best

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def launch(self) -> float:
        """Of one small op among forward and backward ones; on a GPU the host is slower than the kernel."""
        weight = torch.ones(8, device=self.device, requires_grad=True)

        def call() -> None:
            x = weight
            for _ in range(50):
                x = torch.relu(x) + weight
            x.sum().backward()

        return self(call) / (50 * 4)  # relu, add, relu's gradient, and adding up the gradients of `weight`

    def matmul(self, dtype: str, sides: Sequence[int]) -> Points:
        """Square products."""

        def product(side: int) -> Callable[[], object]:
            a, b = (torch.randn(side, side, device=self.device, dtype=DTYPES[dtype]) for _ in range(2))
            return lambda: a @ b

        return self._rates([(2.0 * side**3, product(side)) for side in sides], tiny=product(2), dtype=dtype)

    def convolution(self, dtype: str, maps: Sequence[tuple[int, int]]) -> Points:
        """3x3 convolutions of 4 maps, (channels, side) to the same."""

        def convolve(channels: int, side: int) -> Callable[[], object]:
            x = torch.randn(4, channels, side, side, device=self.device, dtype=DTYPES[dtype])
            weight = torch.randn(channels, channels, 3, 3, device=self.device, dtype=DTYPES[dtype])
            return lambda: F.conv2d(x, weight, padding=1)

        work = [(2.0 * 4 * side**2 * channels**2 * 9, convolve(channels, side)) for channels, side in maps]
        return self._rates(work, tiny=convolve(1, 3), dtype=dtype)

    def depthwise(self, dtype: str) -> Points:
        """7x7, forward and backward by both operands."""

        def convolve(channels: int, side: int) -> Callable[[], object]:
            x = torch.randn(2, channels, side, side, device=self.device, dtype=DTYPES[dtype], requires_grad=True)
            weight = torch.randn(channels, 1, 7, 7, device=self.device, dtype=DTYPES[dtype], requires_grad=True)
            return lambda: F.conv2d(x, weight, padding=3, groups=channels).sum().backward()

        work = [(3 * 2.0 * 2 * side**2 * channels * 49, convolve(channels, side)) for channels, side in ((96, 32),)]
        return self._rates(work, tiny=convolve(1, 3))

    def copy(self, sizes: Sequence[int]) -> Points:
        """Of one tensor to another, each of half the size."""

        def copies(size: int) -> Callable[[], object]:
            source, target = (torch.zeros(size // 8, device=self.device) for _ in range(2))
            return lambda: target.copy_(source)

        return self._rates([(float(size), copies(size)) for size in sizes], tiny=copies(16))

    def _rates(
        self, work: Sequence[tuple[float, Callable[[], object]]], tiny: Callable[[], object], dtype: str = ""
    ) -> Points:
        """(size, size a second), with fp32 as `dtype` wants it; what a call costs that does nothing is left out."""
        with fp32_math(Fp32Math.of("tf32" if dtype == "tf32" else "fp32")) if dtype else nullcontext():
            overhead = 0.0 if self.device.type == "cuda" else self(tiny)  # a GPU works while the host prepares the next
            took = [(size, self(call)) for size, call in work]
        return tuple((size, size / max(seconds - overhead, seconds / 4)) for size, seconds in took)

    def to_host(self) -> float:
        """Bytes a second from the GPU to pinned host memory."""
        source = torch.zeros(2**26, device=self.device)
        target = torch.zeros(2**26, device="cpu", pin_memory=True)
        return source.nbytes / self(lambda: target.copy_(source, non_blocking=True))


def _dtypes(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["fp32", "bf16", "fp64"]
    major, _ = torch.cuda.get_device_capability(device)
    return ["fp32", "fp16", "fp64"] + ["tf32", "bf16"] * (major >= 8)


def _context_bytes(device: torch.device) -> int:
    """What the driver counts against this process beyond what PyTorch's allocator holds; others must not compute."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _points(value: Any) -> Points:
    return tuple((float(size), float(rate)) for size, rate in value)
