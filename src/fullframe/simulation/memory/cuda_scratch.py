"""What torch's own CUDA kernels allocate while they run, as the allocator of torch 2.14 counted it without a GPU."""

from typing import Any

import torch
from torch import Tensor

from fullframe.simulation.memory.cpu_copies import OF_ANY_DEVICE, widened
from fullframe.simulation.memory.scratch import INDEX_PUTS, at_masks

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_SORTED_IN_PLACE = 4096  # most elements of a row that a kernel sorts where they lie
_INT64 = 8
_BY_INDEX = 48  # bytes by which rows that are added up at an index are sorted


def cuda_scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes beyond its results that an op which neither cuDNN nor cuBLAS runs needs on a GPU."""
    if func in OF_ANY_DEVICE:
        return OF_ANY_DEVICE[func](args, out)
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        return int(args[1].numel()) * torch.float32.itemsize  # the queries' gradient is added up in fp32
    if func is _aten._softmax_backward_data.default:
        return max(int(args[0].nbytes), int(args[1].nbytes))  # the gradient times the result
    if func in (_aten.sort.default, _aten.sort.stable):
        x: Tensor = args[0]
        return _sorting(x, x.shape[args[1] if len(args) > 1 else -1] if x.dim() else 1)
    if func is _aten.topk.default and args[1] > _SORTED_IN_PLACE:
        return _sorting(out[0], args[1]) + int(out[0].nbytes) + int(out[1].nbytes)
    if func is _aten.median.default:
        return _sorting(args[0], args[0].numel()) + int(args[0].nbytes) + int(args[0].numel()) * _INT64
    if func is _aten.embedding_dense_backward.default:
        return int(args[1].numel()) * _BY_INDEX
    if func is _aten._cdist_backward.default:  # what each pair gives to the gradient; none for the count of differences
        return int(args[1].numel()) * args[2].shape[-2] * args[1].element_size() if args[3] else 0
    if func is _aten._pdist_backward.default:
        return int(args[1].nbytes) * (args[1].shape[0] - 1) if args[2] else 0
    if func is _aten.sum.default or func is _aten.sum.dim_IntList:
        return 0 if args[0].dtype in _HALF else widened(args[0], out)
    added = func in INDEX_PUTS and len(args) > 3 and args[3]
    indices = max((index.numel() for index in args[1] if index is not None), default=0) if added else 0
    return at_masks(func, args) + _BY_INDEX * indices


def _sorting(x: Tensor, row: int) -> int:
    """Keys and their numbers, twice; of several long rows also the number of each element's row."""
    if row <= _SORTED_IN_PLACE:
        return 0
    key = x.element_size()
    return x.numel() * (2 * _INT64 + key if row == x.numel() else 3 * _INT64 + 2 * key)
