"""A driver with GPUs and processes as a test wants them, with the names and the manners of pynvml."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


class NVMLError(Exception):
    """What the driver raises."""


@dataclass
class FakeNvml:
    """`holders`: for each GPU the bytes by process, None where the driver does not say."""

    holders: Sequence[Mapping[int, int | None]]
    names: Sequence[str] = ()
    has_driver: bool = True
    tells_percent: bool = True
    lost: int | None = None
    open: int = field(default=0, init=False)
    NVMLError: Any = field(default=NVMLError, init=False)

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.open == 1
        return len(self.holders)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < len(self.holders):
            raise NVMLError("Invalid Argument")
        if index == self.lost:
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        found = [handle for handle in range(len(self.holders)) if self.nvmlDeviceGetUUID(handle) == uuid]
        if not found:
            raise NVMLError("Not Found")
        return found[0]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}a2b3c4d-0000"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return (self.names[handle] if self.names else "NVIDIA H100").encode()  # as older bindings do

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        used = sum(size or 0 for size in self.holders[handle].values())
        return SimpleNamespace(total=80 * GIB, used=used + GIB // 2, free=79 * GIB - used)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if not self.tells_percent:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.holders[handle].items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        raise NVMLError("Not Supported")
