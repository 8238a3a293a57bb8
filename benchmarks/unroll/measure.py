"""One fresh process: the most memory and the time of a forward and backward pass of unrolled iterations.

`python -m benchmarks.unroll.measure ITERATIONS CHOICE` prints `{"peak_bytes", "seconds", "runs"}`; CHOICE is "loop"
for a plain loop, or what `recompute` of `ff.unroll` is given, a budget as a number of states. With RANK and STORE it is
one of two ranks, on whose stages the iterations are, and CHOICE says what each recomputes.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from benchmarks.spatial_memory.measure import forget_peak, status_bytes

STATE = (1, 16, 256, 256)  # 4 MiB
STATE_BYTES = 4 * 16 * 256 * 256


class Step(nn.Module):
    """A learned step of a reconstruction: it keeps some five states for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.runs = 0

    def forward(self, state: Tensor, measured: Tensor) -> Tensor:
        """(1, 16, 256, 256) both."""
        self.runs += 1
        return state + torch.tanh(self.layers(state - measured))


def model(block: Step, iterations: int, choice: str) -> Any:
    """Called as `model(state, measured)`."""
    if choice == "loop":

        def loop(state: Tensor, measured: Tensor) -> Tensor:
            for _ in range(iterations):
                state = block(state, measured)
            return state

        return loop
    kind: Any = int(choice) * STATE_BYTES if choice.isdigit() else choice
    if not dist.is_initialized():
        return ff.unroll(block, iterations, recompute=kind)
    mesh = ff.init_mesh(stages=2)
    return ff.unroll(block, iterations, recompute=kind, placement="stages", mesh=mesh)


def measured(iterations: int, choice: str) -> dict[str, float]:
    """Bytes above what the process held before the step, seconds and how often the block ran."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block, state, data = Step(), torch.randn(STATE), torch.randn(STATE)

    def step(count: int) -> None:
        model(block, count, choice)(state, data).square().mean().backward()

    step(min(iterations, 2))
    forget_peak()
    before, block.runs = status_bytes("VmRSS"), 0
    begin = time.process_time()
    step(iterations)
    seconds = time.process_time() - begin
    return {"peak_bytes": status_bytes("VmHWM") - before, "seconds": seconds, "runs": block.runs}


def main(iterations: str, choice: str, rank: str | None = None, store: str = "") -> None:
    """Prints what was measured, here or on one of two ranks."""
    if rank is not None:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
    print(json.dumps(measured(int(iterations), choice)), flush=True)
    if rank is not None:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
