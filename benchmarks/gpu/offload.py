"""Activations that wait for backward in host memory: the same gradients, and what it costs and saves."""

import psutil
import torch
from torch import Tensor

from benchmarks.gpu.found import Found, device_of, ieee, seconds_of
from benchmarks.networks import UNet
from fullframe.techniques.offload import saving_to_host


@ieee()
def offload(kind: str) -> Found:
    """A UNet's forward and backward, with and without."""
    found, device = Found(), device_of(kind)
    torch.manual_seed(0)
    model = UNet(4, 2) if kind == "cpu" else UNet()
    model = model.to(device)
    rows, columns = (32, 64) if kind == "cpu" else (1024, 2048)
    x, saving = torch.randn(1, 3, rows, columns, device=device), saving_to_host(device)

    def step(is_offloaded: bool) -> list[Tensor]:
        if is_offloaded:
            with saving():
                out = model(x)
        else:
            out = model(x)
        return list(torch.autograd.grad(out.square().mean(), list(model.parameters())))

    def peak_of(is_offloaded: bool) -> float:
        if device.type == "cpu":
            return 0.0
        torch.cuda.reset_peak_memory_stats(device)
        step(is_offloaded)
        return float(torch.cuda.max_memory_allocated(device))

    kept, again, sent = step(False), step(False), step(True)
    repeats = all(map(torch.equal, kept, again))
    same = all(torch.equal(a, b) for a, b in zip(kept, sent, strict=True))
    found.note(what="gradients to the bit", offloaded=same, run_twice=repeats)
    found.require(same or not repeats, "offloaded activations give other gradients, and the kernels repeat themselves")
    for is_offloaded in (False, True):
        seconds, host = seconds_of(lambda: step(is_offloaded), device, repeats=3)  # noqa: B023
        resident = psutil.Process().memory_info().rss
        found.note(
            offloaded=is_offloaded, seconds=seconds, host_seconds=host, peak_bytes=peak_of(is_offloaded), rss=resident
        )
    if device.type == "cuda":
        plain, leaner = (row["peak_bytes"] for row in found.rows[1:])
        found.require(leaner < 0.7 * plain, f"offload leaves {leaner / plain:.2f} of the memory")
    return found
