"""What programs make for the CPU is on the GPU from now on."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from tests.hollow_gpu import kernels


def move_to_gpu() -> None:
    """Tensors are made there, random ones with the CPU's generators; the CPU's autocast is CUDA's.

    A loader draws its seed on the host, where also the samples lie that it gives.
    """
    kernels.draws_as_cpu = True
    autocast = torch.autocast

    class OfCuda(autocast):  # type: ignore[misc, valid-type]
        def __init__(self, device: str, *args: Any, **kwargs: Any):
            super().__init__("cuda" if device == "cpu" else device, *args, **kwargs)

    for name in ("randn", "rand", "randint", "randperm"):
        setattr(torch, name, _on_gpu(getattr(torch, name)))
    torch.autocast = OfCuda  # type: ignore[assignment, misc]
    dataloader._BaseDataLoaderIter.__init__ = _on_host(dataloader._BaseDataLoaderIter.__init__)  # type: ignore[method-assign]
    _MapDatasetFetcher.fetch = _on_host(_MapDatasetFetcher.fetch)  # type: ignore[method-assign]
    torch.set_default_device("cuda")


def _on_host(function: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return tree_map_only(Tensor, Tensor.cpu, function(*args, **kwargs))

    return called


def _on_gpu(make: Any) -> Any:
    def made(*args: Any, requires_grad: bool = False, device: Any = None, **kwargs: Any) -> Tensor:
        found: Tensor = make(*args, device=device or "cpu", **kwargs)
        return (found if device else found.cuda()).requires_grad_(requires_grad)

    return made
