"""What programs make for the CPU is on the GPU from now on."""

from typing import Any

import torch
from torch import Tensor

from tests.hollow_gpu import kernels


def move_to_gpu() -> None:
    """Tensors are made there, random ones with the CPU's generators; the CPU's autocast is CUDA's."""
    kernels.draws_as_cpu = True
    autocast = torch.autocast

    class OfCuda(autocast):  # type: ignore[misc, valid-type]
        def __init__(self, device: str, *args: Any, **kwargs: Any):
            super().__init__("cuda" if device == "cpu" else device, *args, **kwargs)

    for name in ("randn", "rand", "randint", "randperm"):
        setattr(torch, name, _on_gpu(getattr(torch, name)))
    torch.autocast = OfCuda  # type: ignore[assignment, misc]
    torch.set_default_device("cuda")


def _on_gpu(make: Any) -> Any:
    def made(*args: Any, requires_grad: bool = False, device: Any = None, **kwargs: Any) -> Tensor:
        found: Tensor = make(*args, device=device or "cpu", **kwargs)
        return (found if device else found.cuda()).requires_grad_(requires_grad)

    return made
