"""Small tensors of numbers that each step needs: sent to a device once, as every sending waits for the device."""

from functools import lru_cache

import torch
from torch import Tensor

Numbers = tuple[float, ...] | tuple["Numbers", ...]  # nested, as `torch.tensor` takes them


def constant(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.tensor(numbers)`, which nobody may write to; made once, but in a simulation, whose tensors end with it."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return torch.tensor(numbers, dtype=dtype, device=device)
    return _kept(numbers, dtype, device)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # what is kept from an evaluation serves in training too
def _kept(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)
