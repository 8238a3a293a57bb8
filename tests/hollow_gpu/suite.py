"""`python -m tests.hollow_gpu -- -m tests.hollow_gpu.suite tests/spatial [options of pytest]`.

The suite's own tests with groups of ranks (`tests/rank_group.py`) on hollow GPUs: the ranks talk by NCCL, and what a
test makes without saying where lies on the GPU. A failure may be that of a test which speaks of the CPU, or of what
hollow GPUs cannot do; plain torch on them is the measure.
"""

import multiprocessing
import os
import sys
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fullframe.spatial.rules.convolution import JOINED_BYTES
from tests import rank_group


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    """As `rank_group._serve`, on a GPU of its own."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    if rank in rank_group._RANKS_THAT_CONVOLVE_BORDERS[size]:
        JOINED_BYTES["cuda"] = 0
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, size), rank=rank, world_size=size)
    _move_to_gpu()
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((False, tree_map_only(Tensor, _host, function(*tree_map_only(Tensor, Tensor.cuda, args)))))
        except BaseException as error:
            pipe.send((True, (type(error).__name__, str(error), traceback.format_exc())))


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _move_to_gpu() -> None:
    """Tensors are made there from now on, random ones with the CPU's generators; autocast is CUDA's."""
    autocast = torch.autocast

    class OfCuda(autocast):  # type: ignore[misc, valid-type]
        def __init__(self, device: str, *args: Any, **kwargs: Any):
            super().__init__("cuda" if device == "cpu" else device, *args, **kwargs)

    def on_gpu(make: Any) -> Any:
        def made(*args: Any, requires_grad: bool = False, device: Any = None, **kwargs: Any) -> Tensor:
            found = make(*args, device=device or "cpu", **kwargs)
            return (found if device else found.cuda()).requires_grad_(requires_grad)

        return made

    for name in ("randn", "rand", "randint", "randperm"):
        setattr(torch, name, on_gpu(getattr(torch, name)))
    torch.autocast = OfCuda  # type: ignore[assignment, misc]
    torch.set_default_device("cuda")


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
