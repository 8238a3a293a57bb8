"""`python -m tests.hollow_gpu --ranks 4 -- -m tests.hollow_gpu.programs HEIGHT WIDTH [FIRST SEED] [COUNT]`.

The random programs of `tests/whole/test_fuzz.py` on hollow GPUs, split by NCCL, against plain torch there.
"""

import os
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

import fullframe as ff
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
    """What programs make for the CPU is on the GPU from now on, and autocast is CUDA's."""
    weight, autocast, randn = test_fuzz._weight, torch.autocast, torch.randn

    class OfCuda(autocast):  # type: ignore[misc, valid-type]
        def __init__(self, device: str, *args: Any, **kwargs: Any):
            super().__init__("cuda", *args, **kwargs)

    def drawn(*args: Any, **kwargs: Any) -> Any:
        return randn(*args, **kwargs, device="cpu").cuda()  # its generator is the CPU's

    test_fuzz._weight = lambda *shape: weight(*shape).cuda()
    torch.autocast, torch.randn = OfCuda, drawn  # type: ignore[misc, assignment]
    torch.set_default_device("cuda")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
