"""One fresh process: its peak of memory, by the kernel's count, over one forward and backward.

`python -m benchmarks.spatial_memory.measure CASE AXIS RANK STORE` prints `{"baseline_bytes", "peak_bytes"}`;
AXIS is "none" for one process with the whole image, else "height" or "width" for one of 2 ranks.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fullframe as ff
from benchmarks.spatial_memory.models import CASES

RANKS = 2
WARM_UP = (1, 3, 64, 64)


def status_bytes(key: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS is what is resident now, VmHWM the most that ever was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {key}")


def forget_peak() -> None:
    """Gives freed memory back to the kernel and sets VmHWM to what is resident now."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measured(case_name: str, axis: str) -> dict[str, int]:
    """Resident bytes before the step, and the most there were during it.

    A tiny step comes first, so that what a process pays once (code, oneDNN's kernels, DDP's buckets) is in the
    baseline; its gradients are dropped. The image is there before as well: the difference is what the step takes.
    """
    case = CASES[case_name]
    model = case.build().train()
    mesh = None
    if axis != "none":
        mesh = ff.init_mesh(**{axis: RANKS})
        model = ff.parallelize(model, mesh)

    def batch(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        image = torch.randn(shape)
        labels = torch.randint(0, 8, (shape[0], *shape[2:]))
        return (image, labels) if mesh is None else (ff.shard(image, mesh), ff.shard(labels, mesh))

    case.loss(model, *batch(WARM_UP)).backward()
    model.zero_grad(set_to_none=True)
    image, labels = batch(case.shape)
    forget_peak()
    baseline = status_bytes("VmRSS")
    case.loss(model, image, labels).backward()
    return {"baseline_bytes": baseline, "peak_bytes": status_bytes("VmHWM")}


def main(case_name: str, axis: str, rank: int, store: str) -> None:
    """Joins the other rank where there is one, measures, prints."""
    torch.set_num_threads(1)
    if axis != "none":
        dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    print(json.dumps(measured(case_name, axis)))
    if axis != "none":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
