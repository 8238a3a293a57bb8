"""What a library asks the package of an array's type for, to contract arrays of that type; `opt_einsum` does.

A split tensor's package is this one. The functions are torch's own, which reach the rules, under the names and with the
arguments that such libraries give. Reached as `fullframe.einsum` and so on; no public names.
"""

from typing import Any

import torch
from torch import Tensor

einsum = torch.einsum


def tensordot(a: Tensor, b: Tensor, axes: Any = 2) -> Tensor:
    """Summed over the dims `axes`: how many, or (those of a, those of b)."""
    return torch.tensordot(a, b, dims=axes)  # type: ignore[no-any-return]


def transpose(a: Tensor, axes: Any) -> Tensor:
    """The dims in the order `axes`."""
    return a.permute(*axes)
