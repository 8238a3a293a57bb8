"""What a part of the benchmark found, and how it compares numbers and takes times."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass
class Found:
    """Rows of a table, and a sentence for each thing that is wrong."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    file: ClassVar[Path | None] = None  # to which all is written as soon as it is found: a part may be ended

    def note(self, **row: Any) -> None:
        """One more row."""
        self.rows.append(row)
        self.write()

    def require(self, holds: bool, said: str) -> None:
        """Something is wrong unless it holds."""
        if not holds:
            self.failures.append(said)
            self.write()

    def write(self) -> None:
        """As JSON, where there is a file."""
        if self.file is not None:
            self.file.write_text(json.dumps({"rows": self.rows, "failures": self.failures}))

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """An error inside is a failure, and the part goes on."""
        try:
            yield
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            self.require(False, f"{what}: {type(error).__name__}: {first}")


_FLOOR = 1e-3  # of the largest of several tensors' values: what is smaller may be zero but for rounding


def difference(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """The largest difference of any two tensors over the largest value of the expected one, which has a floor.

    Infinite for another shape.
    """
    sizes = [float(tensor.detach().abs().max()) if tensor.numel() else 0.0 for tensor in expected]
    floor, worst = _FLOOR * max(sizes) or 1.0, 0.0
    for a, b, size in zip(expected, got, sizes, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel():
            far = float((a.detach().double() - b.detach().double()).abs().max())
            worst = max(worst, far / max(size, floor)) if far == far else float("inf")
    return worst


@contextmanager
def ieee() -> Iterator[None]:
    """Inside, cuDNN has no TF32, and kernels that repeat themselves; matrix products have none by default."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def device_of(kind: str) -> torch.device:
    """This process's device of the kind, made current: the GPU of its LOCAL_RANK where there are several."""
    if kind == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 5) -> tuple[float, float]:
    """(seconds of a call, seconds of the host until all were issued): the least of three rounds of `repeats`."""
    call()
    best_all, best_host = float("inf"), float("inf")
    for _ in range(3):
        wait_for(device)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        issued = time.perf_counter()
        wait_for(device)
        best_all = min(best_all, (time.perf_counter() - started) / repeats)
        best_host = min(best_host, (issued - started) / repeats)
    return best_all, best_host
