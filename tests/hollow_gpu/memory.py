"""`python -m tests.hollow_gpu.memory [CASE ...]`: predictions of memory against torch's own allocator on hollow GPUs.

The cases are those of `benchmarks.prediction`, on H100s with NCCL, but those for which torch asks Triton. Large tensors
hold zeros, so a loss over what was measured has nothing to count, and its steps are skipped: such a case is named. What
cuDNN takes for itself is in neither number.
"""

import json
import os
import subprocess
import sys
import warnings
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.prediction.cases import CASES, Case
from benchmarks.prediction.measure import take_steps
from fullframe.ranks.mesh import init_mesh
from fullframe.simulation.simulate import simulate
from fullframe.training.evaluation import evaluate
from fullframe.training.session import assemble
from tests.hollow_gpu.__main__ import environments_of_ranks, hollow

_IDLE_SECONDS = 1.2  # NCCL's watchdog holds what was sent until it looks again
_RANK = "--rank"


def main(numbers: list[int]) -> None:
    """Print a line a case, then medians."""
    warnings.filterwarnings("ignore")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    for number in numbers or [n for n, case in enumerate(CASES) if not _is_compiled(case)]:
        case, of_ranks = CASES[number], _measured(number)
        if not of_ranks:
            print(f"{number:3} {case.model}, {case.technique}: left out", flush=True)
            continue
        cluster = f"{case.strategy.ranks}xH100"
        worst = {"allocated": 0.0, "reserved": 0.0}
        for rank, measured in enumerate(of_ranks):
            predicted = simulate(case.recipe, case.strategy, cluster, rank=rank, without=("cudnn_workspace",))
            of_both = [each for each in (predicted, predicted.evaluation) if each is not None]
            most = max(each.peak_bytes for each in of_both), max(each.reserved_bytes for each in of_both)
            for what, bytes in zip(worst, most, strict=True):
                worst[what] = max(worst[what], bytes / measured[what] - 1, key=abs)
        for what, error in worst.items():
            errors[what].append(abs(error))
        said = ", ".join(f"{what} {error:+.2%}" for what, error in worst.items())
        print(f"{number:3} {case.model}, {case.technique}: {said}", flush=True)
    for what, found in errors.items():
        print(f"{what}: median {median(found):.2%}, at most {max(found):.2%}")


def _is_compiled(case: Case) -> bool:
    """By Triton: Adafactor's outer products are, by torch itself."""
    return bool(case.strategy.compile) or case.strategy.optimizer == "adafactor"


def _measured(number: int) -> list[dict[str, int]]:
    """Of each rank; nothing where one ended without, and said why."""
    words = [sys.executable, "-m", "tests.hollow_gpu.memory", _RANK, str(number)]
    with hollow(4, 80 << 30, "small") as environment:
        del environment["CUDA_VISIBLE_DEVICES"]
        processes = [
            subprocess.Popen(words, env=environment | of_rank, stdout=subprocess.PIPE, text=True)
            for of_rank in environments_of_ranks(CASES[number].strategy.ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return []
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure(number: int) -> None:
    """One rank: the most that two steps, and an evaluation if there is one, had allocated and reserved."""
    warnings.filterwarnings("ignore")
    case = CASES[number]
    strategy = case.strategy
    mesh = init_mesh(strategy.height, strategy.width, depth=strategy.depth, stages=strategy.stages)
    session = assemble(case.recipe, strategy, mesh)
    take_steps(session, _IDLE_SECONDS)
    evaluate(case.recipe, session.model, mesh, precision=strategy.precision, average=session.state.average)
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # Python's kernels are gone before torch's last words


if __name__ == "__main__":
    if sys.argv[1:2] == [_RANK]:
        measure(int(sys.argv[2]))
    else:
        main(list(map(int, sys.argv[1:])))
