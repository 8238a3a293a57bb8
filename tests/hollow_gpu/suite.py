"""`python -m tests.hollow_gpu -- -m tests.hollow_gpu.suite tests/spatial [options of pytest]`.

The suite's own tests with groups of ranks (`tests/rank_group.py`) on hollow GPUs: the ranks talk by NCCL, and what a
test makes without saying where lies on the GPU. A failure may be that of a test which speaks of the CPU, or of what
hollow GPUs cannot do; plain torch on them is the measure.
"""

import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests import rank_group
from tests.hollow_gpu.default_device import move_to_gpu


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    """As `rank_group._serve`, on a GPU of its own."""
    torch.cuda.set_device(rank)
    move_to_gpu()
    rank_group.serve(rank, size, store, pipe, "nccl", "cuda", _called)


def _called(function: Any, args: Any) -> Any:
    return tree_map_only(Tensor, _host, function(*tree_map_only(Tensor, Tensor.cuda, args)))


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


class _OnGpus:
    """Starts ranks so."""

    @staticmethod
    def pytest_configure() -> None:
        rank_group._serve = _serve


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"  # else tests see none
    from tests.hollow_gpu import suite  # by the name that the ranks know

    code = pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]], plugins=[suite._OnGpus])
    sys.stdout.flush()
    os._exit(code)  # Python's kernels are gone before torch's last words
