"""Torch's operators as exported programs call them, where a function of torch takes other arguments than its operator.

All others are found by their names, see `rule_of`. The arguments and their order are those of torch's
`native_functions.yaml`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.points import items_of
from fullframe.spatial.rules.registry import calling, rule

_REDUCTIONS = "none", "mean", "sum"
_LIKE_F = """
    pad adaptive_avg_pool2d adaptive_avg_pool3d leaky_relu silu hardtanh hardswish hardsigmoid mish glu relu6 rms_norm
    leaky_relu_ hardtanh_
"""
_RESIZED = {"upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear", "upsample_bicubic2d": "bicubic",
            "upsample_trilinear3d": "trilinear"}  # fmt: skip


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _asserted(x: Tensor, size: Any = None, stride: Any = None, dtype: torch.dtype | None = None, *,
              device: Any = None, layout: Any = None) -> None:  # fmt: skip
    """Raises RuntimeError where the whole tensor is another one than the program was exported for."""
    whole = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    torch.ops.aten._assert_tensor_metadata(whole, size, stride, dtype)


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float,
                cudnn: bool) -> Tensor:  # fmt: skip
    return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)


def _instance_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, use_input: bool, momentum: float,
                   eps: float, cudnn: bool) -> Tensor:  # fmt: skip
    return F.instance_norm(x, mean, var, weight, bias, use_input, momentum, eps)


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
                cudnn: bool = True) -> Tensor:  # fmt: skip
    return F.group_norm(x, groups, weight, bias, eps)


def _layer_norm(x: Tensor, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
                cudnn: bool = True) -> Tensor:  # fmt: skip
    return F.layer_norm(x, shape, weight, bias, eps)


def _elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


def _embedding(weight: Tensor, index: Tensor, padding: int = -1, by_frequency: bool = False,
               sparse: bool = False) -> Tensor:  # fmt: skip
    return F.embedding(index, weight, None if padding < 0 else padding, None, 2.0, by_frequency, sparse)


def _cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignored: int = -100,
                   smoothing: float = 0.0) -> Tensor:  # fmt: skip
    return F.cross_entropy(x, target, weight, None, ignored, None, _REDUCTIONS[reduction], smoothing)


def _of_logits(x: Tensor, target: Tensor, weight: Tensor | None = None, positive: Tensor | None = None,
               reduction: int = 1) -> Tensor:  # fmt: skip
    return F.binary_cross_entropy_with_logits(x, target, weight, None, None, _REDUCTIONS[reduction], positive)


def _by_elements(loss: Callable[..., Tensor], option: str = "") -> Callable[..., Tensor]:
    def call(x: Tensor, target: Tensor, reduction: int = 1, value: float = 1.0) -> Tensor:
        return loss(x, target, reduction=_REDUCTIONS[reduction], **({option: value} if option else {}))

    return call


def _resized(mode: str) -> Callable[..., Tensor]:
    def call(x: Tensor, size: Any, align_corners: bool, scales: Any = None) -> Tensor:
        return F.interpolate(x, size, scales, mode, align_corners)

    return call


def _repeated(x: Tensor, size: Any, scales: Any = None) -> Tensor:
    return F.interpolate(x, size, scales)


_BY_NAME: dict[str, Callable[..., Any]] = {
    **{name: getattr(F, name) for name in _LIKE_F.split()},
    **{name: _resized(mode) for name, mode in _RESIZED.items()},
    **{f"upsample_nearest{n}d": _repeated for n in (1, 2, 3)},
    "slice": _slice,
    "index": lambda x, indices: x[items_of(indices)],
    "mT": lambda x: x.mT,
    "numpy_T": lambda x: x.T,
    "sym_size": lambda x, dim: x.shape[dim],
    "split": torch.split,
    "_assert_tensor_metadata": _asserted,
    "einsum": lambda equation, tensors, path=None: torch.einsum(equation, *tensors),
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "linalg_vector_norm": torch.linalg.vector_norm,
    "elu": _elu,
    "silu_": lambda x: F.silu(x, inplace=True),
    "hardswish_": lambda x: F.hardswish(x, inplace=True),
    "adaptive_max_pool2d": lambda x, size: F.adaptive_max_pool2d(x, size, return_indices=True),
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "binary_cross_entropy_with_logits": _of_logits,
    "mse_loss": _by_elements(F.mse_loss),
    "l1_loss": _by_elements(F.l1_loss),
    "smooth_l1_loss": _by_elements(F.smooth_l1_loss, "beta"),
    "huber_loss": _by_elements(F.huber_loss, "delta"),
}


for _name, _function in _BY_NAME.items():
    rule(f"aten::{_name}")(calling(_function))
