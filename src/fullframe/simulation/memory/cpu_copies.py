"""What torch's own kernels for the CPU copy, widen or lay out anew while they run, as counted with torch 2.13.

Elementwise ops there know one dtype: operands of others are converted whole
first, where CUDA's kernels convert as they read.
"""

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten
_INT64, _FP32 = 8, 4
_MAXIMUM = 2  # mode of an embedding bag
_HALF = (torch.float16, torch.bfloat16)
_BY_A_MASK = (_aten.where.self, _aten.where.ScalarOther, _aten.where.ScalarSelf, _aten.where.Scalar)
_COPYING = ("masked_fill", "copy", "fill", "to_copy", "native_dropout_backward")  # which convert as they go

Rule = Callable[[tuple[Any, ...], Any], int]


def cpu_copies(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes beyond its results that an op needs which oneDNN does not run."""
    rule = _RULES.get(func) or OF_ANY_DEVICE.get(func)
    if rule is not None:
        return rule(args, out)
    return _to_one_dtype(func, args, out) if _is_elementwise(func) else 0


def widened(x: Tensor, total: Tensor) -> int:
    """What is added up, in the dtype of the sum where that is another: of truths, numbers of eight bytes."""
    return 0 if x.dtype == total.dtype else x.numel() * total.element_size()


def _widened(args: tuple[Any, ...], out: Tensor) -> int:
    return widened(args[0], out)


def _to_one_dtype(func: Any, args: tuple[Any, ...], out: Tensor) -> int:
    """Operands of an elementwise op, and the result, once more in the dtype it computes in, where theirs is another."""
    operands = [x for x in tree_iter(args) if isinstance(x, Tensor) and x.dim()]
    if func in _BY_A_MASK:
        operands = operands[1:]
    if not operands or (out.dtype is operands[0].dtype and all(x.dtype is out.dtype for x in operands)):
        return 0
    common = operands[0].dtype
    for x in operands:
        common = torch.promote_types(common, x.dtype)
    if out.dtype is not torch.bool:
        common = common if out is args[0] else torch.promote_types(common, out.dtype)
    elif len(args) == 2:
        common = torch.promote_types(common, torch.result_type(*args))
    result = 0 if out.dtype in (common, torch.bool) else out.numel() * common.itemsize
    return result + sum(x.numel() * common.itemsize for x in operands if x.dtype is not common)


@functools.cache
def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags and func._opname.strip("_") not in _COPYING


def _of_input(times: float, more: int = 0) -> Rule:
    """So many copies of the first operand, and bytes for each of its elements."""
    return lambda args, out: int(args[0].nbytes * times) + args[0].numel() * more


def _reduced_loss(args: tuple[Any, ...], out: Tensor) -> int:
    """The loss of each element, where their sum or mean is asked for; of two dtypes also both in one, and that anew."""
    each = max(args[0].numel(), args[1].numel()) * out.element_size()
    mixed = 2 * each if args[0].dtype is not args[1].dtype else 0
    return mixed + (0 if out.dim() else each)


def _logits(args: tuple[Any, ...], out: Tensor) -> int:
    return int(args[0].nbytes) * (1 if out.dim() else 2)


def _contiguous(*tensors: Tensor) -> int:
    return sum(t.nbytes for t in tensors if not t.is_contiguous())


def _batch_norm_backward(args: tuple[Any, ...], out: Any) -> int:
    """The input's gradient, for which memory is taken twice."""
    return 0 if out[0] is None else int(out[0].nbytes)


def _roll(args: tuple[Any, ...], out: Tensor) -> int:
    """What was rolled along the dims before."""
    count = len(args[1]) if len(args) < 3 or args[2] else 1
    return min(count - 1, 3) * out.nbytes


def _in_fp32(args: tuple[Any, ...], out: Tensor) -> int:
    return args[0].numel() * _FP32 if args[0].dtype in _HALF and out.dtype in _HALF else widened(args[0], out)


def _one_dim_resampled(args: tuple[Any, ...], out: Tensor) -> int:
    """Rows of the result's width, as many as the input has."""
    return int(args[0].nbytes) // int(args[0].shape[-1]) * int(out.shape[-1])


def _trilinear(args: tuple[Any, ...], out: Tensor) -> int:
    """Of one place of the dim that is gone through: the product of the first two operands, then with the third."""
    dims, summed, unrolled = len(args[0].shape) + len(args[3]), args[6], args[7] if len(args) > 7 else 1
    missing = args[3:6]  # dims that each operand lacks
    sizes = [1] * dims
    for x, lacks in zip(args[:3], missing, strict=True):
        for dim, size in zip((dim for dim in range(dims) if dim not in lacks), x.shape, strict=True):
            sizes[dim] = size
    sizes[unrolled] = 1
    pair = (dim for dim in range(dims) if not (dim in missing[0] and dim in missing[1]))
    first = prod(sizes[dim] for dim in pair if not (dim in summed and dim in missing[2]))
    return (first + prod(sizes[dim] for dim in range(dims) if dim not in summed)) * out.element_size()


def _bags_backward(args: tuple[Any, ...], out: Any) -> int:
    """The gradient, and the places of the maxima, of the bags that are not empty."""
    return int(args[0].nbytes + args[5].nbytes) if args[8] == _MAXIMUM else 0


# Written with other ops, or by code that CPU and CUDA share.
OF_ANY_DEVICE: dict[Any, Rule] = {
    _aten._trilinear.default: _trilinear,
    **dict.fromkeys((_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default), _reduced_loss),
    _aten.binary_cross_entropy_with_logits.default: _logits,
    _aten.soft_margin_loss_backward.default: lambda args, out: 2 * int(out.nbytes),
    _aten.roll.default: _roll,
}
_RULES: dict[Any, Rule] = {
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten._embedding_bag_backward.default: _bags_backward,
    _aten.native_layer_norm.default: lambda args, out: _contiguous(args[0]),
    _aten.native_layer_norm_backward.default: lambda args, out: _contiguous(*args[:2]),
    _aten.upsample_bicubic2d_backward.default: lambda args, out: _contiguous(args[0]),
    **dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList), _widened),
    **dict.fromkeys((_aten.cumsum.default, _aten.cumprod.default), _widened),
    **dict.fromkeys((_aten.prod.default, _aten.prod.dim_int), _widened),
    **dict.fromkeys((_aten.mean.default, _aten.mean.dim), _in_fp32),
    _aten.logsumexp.default: lambda args, out: int(args[0].nbytes + out.nbytes),
    _aten.kthvalue.default: _of_input(1, _INT64),
    **dict.fromkeys((_aten.median.default, _aten.median.dim, _aten.nanmedian.dim), _of_input(1)),
    **dict.fromkeys((_aten.masked_scatter_backward.default, _aten.im2col.default), _of_input(1)),
    _aten.linalg_matrix_exp.default: _of_input(10.25),  # of the degree that most matrices get
    _aten._fft_c2r.default: _of_input(2),
    **dict.fromkeys((_aten._upsample_bilinear2d_aa.default, _aten._upsample_bicubic2d_aa.default), _one_dim_resampled),
}
