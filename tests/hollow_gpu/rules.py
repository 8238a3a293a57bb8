"""`python -m tests.hollow_gpu --ranks 2 -- -m tests.hollow_gpu.rules HEIGHT WIDTH [PART OF A NAME ...]`: every rule.

Each case on hollow GPUs, split by NCCL, against plain torch there. What plain torch refuses there is named as such.
"""

import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist

import fullframe as ff
from tests.exactness import differences_from, one_process
from tests.spatial.cases import TOLERANCE, Case, all_cases

_LEFT_OUT = "fake_quantization: observed"  # whose kernel's range nobody computes


def main(height: int, width: int, parts: list[str]) -> None:
    """Print what differs, and how many cases did not."""
    warnings.filterwarnings("ignore")
    ff.init_mesh(height=height, width=width)
    asked = wrong = 0
    for name, case in all_cases().items():
        if name.startswith(_LEFT_OUT) or (parts and not any(part in name for part in parts)):
            continue
        try:
            said = _differences(case, height, width)
        except Exception:
            said = traceback.format_exc(limit=-2)
        asked, wrong = asked + 1, wrong + bool(said)
        if said:
            print(f"rank {dist.get_rank()}, {name}: {said}", flush=True)
    print(f"rank {dist.get_rank()}: {asked - wrong} of {asked} cases are as in plain torch", flush=True)
    os._exit(wrong > 0)  # Python's kernels are gone before torch's last words


def _differences(case: Case, height: int, width: int) -> str:
    generator = torch.Generator().manual_seed(1)
    shapes = [(*lead, *case.smallest) for lead in case.split], case.whole
    split, whole = ([torch.randn(s, generator=generator, dtype=torch.float64).cuda() for s in kind] for kind in shapes)
    with torch.device("cuda"):
        try:
            here = one_process(case.op, split, whole)
        except Exception as error:
            return f"plain torch: {str(error).splitlines()[0][:100]}"
        found = differences_from(here, case.op, split, whole, height, width)
    return ", ".join(f"{what} {error:.1e}" for what, error in found.items() if not error <= TOLERANCE)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
