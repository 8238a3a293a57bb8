"""One rank of a job of several, alone: real kernels, shapes and memory; its messages go nowhere.

How busy the device is, is what the job could reach at best: no message takes any time here.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import fullframe as ff
from benchmarks.gpu.found import Found, device_of, wait_for
from benchmarks.networks import UNet, convnext_tiny, resnet50
from fullframe.ranks.mesh import spatial_of
from fullframe.simulation.clock.ops import Op
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.shard import even_spec
from fullframe.spatial.tensor import wrap

_STEPS = 5
_NETWORKS: dict[str, Callable[[], nn.Module]] = {"UNet": UNet, "ResNet-50": resnet50, "ConvNeXt-tiny": convnext_tiny}


def lone_rank(kind: str) -> Found:
    """An inner rank of 1, 2, 4 and 8 that split a frame's columns, in bf16."""
    found, device = Found(), device_of(kind)
    networks = _NETWORKS if kind != "cpu" else {"UNet": lambda: UNet(4, 2)}
    rows, columns = (1024, 2048) if kind != "cpu" else (32, 64)
    for name, build in networks.items():
        for ranks in (1, 2, 4, 8) if kind != "cpu" else (1, 2, 4):
            with found.trying(f"{name}, {ranks} ranks"):
                found.note(network=name, ranks=ranks, **_of_rank(build, rows, columns, ranks, device))
    return found


def _of_rank(
    build: Callable[[], nn.Module], rows: int, columns: int, ranks: int, device: torch.device
) -> dict[str, float]:
    is_cuda = device.type == "cuda"
    with fake_job(min(1, ranks - 1), ranks):
        mesh = ff.init_mesh(width=ranks)
        spatial_of(mesh, draw_seed=lambda generator: 0)
        model = ff.parallelize(build().to(device), mesh, average_gradients=False)
        part = torch.randn(1, 3, rows, columns // ranks, device=device)
        frame = wrap(part, even_spec((1, 3, rows, columns), mesh)) if ranks > 1 else part

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                out: Any = model(frame)
            out = out if isinstance(out, Tensor) else out.last_hidden_state
            out.float().square().mean().backward()

        step()  # which chooses kernels
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        wait_for(device)
        started, worked = time.perf_counter(), time.thread_time()
        for _ in range(_STEPS):
            step()
        host = (time.thread_time() - worked) / _STEPS
        wait_for(device)
        seconds = (time.perf_counter() - started) / _STEPS
        row = {"seconds": seconds, "host_seconds": host, "ops": _ops_of(step)}
        if is_cuda:
            row |= {"peak_bytes": torch.cuda.max_memory_allocated(device), **profiled(step, device, seconds)}
        return row


def _ops_of(step: Callable[[], object]) -> int:
    """Aten ops of a step that launch kernels."""
    count = [0]

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            count[0] += func.namespace == "aten" and not Op.of(func).free
            return func(*args, **(kwargs or {}))

    with Counting():
        step()
    return count[0]


def profiled(step: Callable[[], object], device: torch.device, seconds: float) -> dict[str, float]:
    """Of one step: kernels, the share of the time in which the device works, and how often the host waits for it."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        wait_for(device)
    events = profiled.profiler.kineto_results.events()
    kernels = [event for event in events if str(event.device_type()).endswith("CUDA")]
    waits = [
        e for e in events if e.name() in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
    ]
    busy = sum(event.duration_ns() for event in kernels) / 1e9
    return {"kernels": len(kernels), "busy_share": busy / seconds, "waits": len(waits) - 1}
