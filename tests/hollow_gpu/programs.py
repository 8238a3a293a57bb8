"""`python -m tests.hollow_gpu --ranks 4 -- -m tests.hollow_gpu.programs HEIGHT WIDTH [FIRST SEED] [COUNT]`.

The random programs of `tests/whole/test_fuzz.py` on hollow GPUs, split by NCCL, against plain torch there.
"""

import os
import sys
import warnings
from collections import Counter

import torch.distributed as dist

import fullframe as ff
from tests.hollow_gpu.default_device import move_to_gpu
from tests.whole import test_fuzz


def main(height: int, width: int, first: int = 0, count: int = 300) -> None:
    """Print what is wrong or ends in an error, and how many programs were what."""
    warnings.filterwarnings("ignore")
    ff.init_mesh(height=height, width=width)
    _move_to_gpus()
    verdicts: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            outcome = test_fuzz._outcome(seed, height, width)
        except Exception as error:  # of all ranks alike; Triton, say, which wants a real driver
            outcome = test_fuzz.Outcome("error", seed, str(error), repr(error.__cause__))
        verdicts[outcome.verdict] += 1
        if outcome.verdict in ("wrong", "error"):
            print(f"rank {dist.get_rank()}: {outcome}", flush=True)
    print(f"rank {dist.get_rank()}: {dict(verdicts)}", flush=True)
    os._exit(verdicts["wrong"] > 0)  # Python's kernels are gone before torch's last words


def _move_to_gpus() -> None:
    weight = test_fuzz._weight
    test_fuzz._weight = lambda *shape: weight(*shape).cuda()
    move_to_gpu()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
