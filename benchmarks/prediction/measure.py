"""One fresh process: two real training steps, and the most that torch's allocator had handed out at once.

`python -m benchmarks.prediction.measure CASE RANK STORE` prints `{"peak_bytes"}`; CASE is the case's number. The count
is of torch.profiler's memory events, which the allocator itself reports; nothing of `fullframe.simulation` takes part.
"""

import json
import sys
import warnings
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.prediction.cases import CASES, Case
from fullframe.ranks.mesh import init_mesh
from fullframe.training.session import assemble

STEPS = 2


def peak_bytes(case: Case) -> int:
    """From before the model is made to the end of the second step."""
    mesh = init_mesh(case.strategy.height, case.strategy.width, depth=case.strategy.depth)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        session = assemble(case.recipe, case.strategy, mesh)
        for _, batch in zip(range(STEPS), session.state.loader, strict=False):
            if session.step(batch).skipped:
                raise SystemExit("a step was skipped: the optimizer's state was not made")
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def main(number: int, rank: int, store: str) -> None:
    """Joins the other ranks where there are some, measures, prints."""
    case = CASES[number]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    ranks = case.strategy.ranks
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    print(json.dumps({"peak_bytes": peak_bytes(case)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
