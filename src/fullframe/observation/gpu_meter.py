"""How busy a rank's own GPU is and what other processes hold on it, asked of the driver (NVML) now and then."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fullframe.ranks import device

_SECONDS = 1.0  # between two times that the driver is asked


class GpuMeter:
    """`look()` gives "gpu_percent" and "others_bytes" of one GPU, {} between two looks and where it cannot be known.

    `uuid` is the GPU's, as torch or NVML writes it; `nvml` the module pynvml, or what stands in for it. The driver
    lists processes by numbers of the host: within a container this process is not among them, and of the others nothing
    is said.
    """

    def __init__(self, uuid: str, nvml: Any, clock: Callable[[], float] = time.monotonic):
        self._nvml, self._clock = nvml, clock
        self._handle: Any = None
        self._due = 0.0
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")

    def look(self) -> dict[str, Any]:
        """Now, if it is time to."""
        if self._handle is None or self._clock() < self._due:
            return {}
        self._due = self._clock() + _SECONDS
        found: dict[str, Any] = {}
        try:
            found["gpu_percent"] = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            held = {p.pid: p.usedGpuMemory for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
            own = held.pop(os.getpid(), None)
            if own is not None and None not in held.values():
                found["others_bytes"] = sum(held.values())
        except self._nvml.NVMLError:  # what a driver does not tell now, it will not tell a second later
            self._handle = None if not found else self._handle
        return found


def meter_of_rank() -> GpuMeter | None:
    """Of this rank's GPU; None where none is in use, or nvidia-ml-py is not installed."""
    if not device.is_in_use():
        return None
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    uuid = device.uuid()
    return GpuMeter(uuid, pynvml) if uuid else None
