"""One fresh process: its peak of memory, by the kernel's count, over one forward and backward.

`python -m benchmarks.spatial_memory.measure CASE AXIS RANK STORE` prints `{"baseline_bytes", "peak_bytes"}`;
AXIS is "none" for one process with the whole image, else "height" or "width" for one of 2 ranks.
"""

import ctypes
import gc
import json
import sys
import warnings
from pathlib import Path

import torch
import torch._dynamo  # 70 MiB of code that DDP loads, as every optimizer does: not the step's, so here for all
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


def batch(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """An image (N, 3, H, W) and labels (N, H, W)."""
    torch.manual_seed(1)
    return torch.randn(shape), torch.randint(0, 8, (shape[0], *shape[2:]))


def measured(case_name: str, axis: str) -> dict[str, int]:
    """Resident bytes before anything is split, and the most there were during the step.

    A tiny step in plain torch comes first, so that what any process pays once (code, oneDNN's kernels) is in the
    baseline, with the weights and the image. What splitting brings along (DDP's buckets, connections) comes after it
    and counts; a tiny split step lets DDP settle its buckets, as they are from the second step on.
    """
    case = CASES[case_name]
    model = case.build().train()
    image, labels = batch(case.shape)
    tiny = batch(WARM_UP)
    case.loss(model, *tiny).backward()
    model.zero_grad(set_to_none=True)
    forget_peak()
    baseline = status_bytes("VmRSS")
    if axis != "none":
        mesh = ff.init_mesh(**{axis: RANKS})
        model = ff.parallelize(model, mesh)
        case.loss(model, *(ff.shard(value, mesh) for value in tiny)).backward()
        model.zero_grad(set_to_none=True)
        image, labels = ff.shard(image, mesh), ff.shard(labels, mesh)
    forget_peak()
    case.loss(model, image, labels).backward()
    return {"baseline_bytes": baseline, "peak_bytes": status_bytes("VmHWM")}


def main(case_name: str, axis: str, rank: int, store: str) -> None:
    """Joins the other rank where there is one, measures, prints."""
    torch.set_num_threads(1)
    # DDP's remark about the strides of a depthwise weight's gradient: a matter of time, not of memory.
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    if axis != "none":
        dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    print(json.dumps(measured(case_name, axis)))
    if axis != "none":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
