"""One fresh process: two real steps, an evaluation if there is one, and the most that torch's allocator had given out.

`python -m benchmarks.prediction.measure CASE RANK STORE` prints `{"peak_bytes"}`; CASE is the case's number. It is
counted under the allocator (`allocations.c`, loaded before); nothing of `fullframe.simulation` takes part.
torch.profiler's events would not do: a thread of gloo that is the last to hold a message frees it unreported.
"""

import ctypes
import json
import sys
import time
import warnings

import torch
import torch.distributed as dist

from benchmarks.prediction.cases import CASES, Case
from fullframe.ranks.mesh import init_mesh
from fullframe.training.evaluation import evaluate
from fullframe.training.session import Session, assemble

STEPS = 2


def peak_bytes(case: Case) -> int:
    """From before the model is made to the end of the second step, or of the evaluation after it."""
    strategy, counted = case.strategy, ctypes.CDLL(None)
    counted.allocations_begin.restype = counted.allocations_most.restype = ctypes.c_long
    mesh = init_mesh(strategy.height, strategy.width, depth=strategy.depth, stages=strategy.stages)
    before: int = counted.allocations_begin()
    session = assemble(case.recipe, strategy, mesh)
    take_steps(session)
    evaluate(case.recipe, session.model, mesh, precision=strategy.precision, average=session.state.average)
    most: int = counted.allocations_most()
    return most - before


def take_steps(session: Session, idle_seconds: float = 0.0) -> None:
    """As `fullframe.fit` takes them, with a pause after each; ends the process where one is skipped."""
    batches = iter(session.state.loader)
    for _ in range(STEPS):
        batch = next(batches)
        if session.step(batch).skipped:
            raise SystemExit("a step was skipped: the optimizer's state was not made")
        del batch
        time.sleep(idle_seconds)


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
