"""What kernels allocate for the time they run, which no tensor of the program shows.

For the CPU it is what oneDNN was seen to take in torch 2.13, on AVX-512 and, of convolutions in fp32, on AVX2: copies
in its own specs, partial sums. Of volumes that are small (samples x channels x D x H), and of maps that oneDNN does not
take (fp64, 16 bit on a processor without AVX-512, small ones), torch's own kernels lay all windows side by side.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from fullframe.simulation.clock.ops import is_channels_last
from fullframe.simulation.memory.cpu_copies import cpu_copies

_aten = torch.ops.aten
_backends: Any = torch._C._ConvBackend  # type: ignore[attr-defined]
_BLOCK_CHANNELS = 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8  # of oneDNN's specs
_HAS_BF16 = torch.cpu._is_avx512_bf16_supported()
_FEW_CHANNELS = 8  # of a block of maps that have less than one, for the kernel's gradient
_PARTIAL_SUMS = 256  # of a depthwise kernel's gradient
_FP32 = 4
_INT64 = 8
INDEX_PUTS = (_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


def cpu_scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes beyond its results that an op on the CPU needs."""
    if func is _aten.convolution.default:
        if _is_torchs(args[0], args[1], args[3:9]):
            return _of_maps(args[0], args[1], out, args[3:9])
        columns = _columns(args[0], args[1], out, args[3:9])
        if columns is None:
            return _convolution(args[0], args[1], out)
        return 0 if _is_pointwise(args[1]) else columns
    if func is _aten.convolution_backward.default:
        if _is_torchs(args[1], args[2], args[4:10]):
            return _of_maps_backward(args[0], args[1], args[2], args[4:10], out[0], out[1])
        columns = _columns(args[1], args[2], args[0], args[4:10])
        if columns is None:
            return _convolution_backward(*args[:3], *out[:2])
        if not _is_pointwise(args[2]):
            return columns
        return 0 if out[0] is None else columns - (0 if out[1] is None else out[1].nbytes)
    if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return _attention(*args[:2])
    if func is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return _attention_backward(*args[1:3])
    return at_masks(func, args) + cpu_copies(func, args, out)


def at_masks(func: Any, args: tuple[Any, ...]) -> int:
    """The places of the true elements of each mask that an op indexes by, all of them."""
    if func not in (_aten.index.Tensor, *INDEX_PUTS):
        return 0
    return sum(index.numel() * index.dim() * _INT64 for index in args[1] if _is_mask(index))


def _tile(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    """Rows and columns of the scores that a thread has at once; bytes of a sum, and of the tile in the maps' dtype."""
    size = query.shape[-2]
    rows = min(size, 256 if size >= 768 else 64 if size >= 192 else 32)
    columns, itemsize = min(512, key.shape[-2]), query.element_size()
    return rows, columns, max(itemsize, _FP32), rows * columns * itemsize if itemsize < _FP32 else 0


def _attention(query: Tensor, key: Tensor) -> int:
    """Each thread's tile of scores, its rows' largest values and sums, and its part of the result."""
    rows, columns, itemsize, narrow = _tile(query, key)
    return torch.get_num_threads() * (rows * (columns + 2 + query.shape[-1]) * itemsize + narrow)


def _attention_backward(query: Tensor, key: Tensor) -> int:
    """Each thread's tiles of scores and of their gradients, and the gradient of the result laid out anew."""
    rows, columns, itemsize, narrow = _tile(query, key)
    return torch.get_num_threads() * (rows * (2 * columns + 1) * itemsize + 2 * narrow) + query.nbytes


def _is_mask(index: Tensor | None) -> bool:
    """Whether an index is a mask, of whose true elements torch makes a list first."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _columns(x: Tensor, weight: Tensor, out: Tensor, options: Any) -> int | None:
    """Bytes of the windows of a volume side by side; None where torch calls oneDNN.

    `options` are stride, padding, dilation, whether it is transposed, output padding and groups.
    """
    if x.dim() != 5:
        return None
    backend = _backend(x, weight, options)
    if backend == _backends.Slow3d:
        return out.numel() // out.shape[1] * weight[0].numel() * weight.element_size()
    if backend == _backends.SlowTranspose3d:
        return x[0, 0].numel() * weight[0].numel() * weight.element_size()
    return None


def _backend(x: Tensor, weight: Tensor, options: Any) -> Any:
    return torch._C._select_conv_backend(x, weight, None, *options, None)


def _is_torchs(x: Tensor, weight: Tensor, options: Any) -> bool:
    """Whether torch convolves these maps by a kernel of its own."""
    own = _backends.Slow2d, _backends.SlowDilated2d, _backends.SlowTranspose2d
    return x.dim() == 4 and _backend(x, weight, options) in own


def _of_maps(x: Tensor, weight: Tensor, out: Tensor, options: Any) -> int:
    """The windows of all samples, of dilated ones one after the other; groups one by one, which are joined then."""
    dilated = not options[3] and max(options[2]) > 1
    columns = _windows(x, weight, out, options) * (1 if dilated else x.shape[0])
    groups = options[-1]
    return columns if groups == 1 else max(columns + x.nbytes // groups, out.nbytes)


def _of_maps_backward(
    grad: Tensor, x: Tensor, weight: Tensor, options: Any, of_x: Tensor | None, of_weight: Tensor | None
) -> int:
    """One sample's windows; where they are neither dilated nor transposed all samples', for the weight's gradient."""
    columns, groups = _windows(x, weight, grad, options), options[-1]
    if not options[3] and max(options[2]) == 1:
        columns = 0 if of_weight is None else columns * x.shape[0]
    given = sum(t.nbytes for t in (of_x, of_weight) if t is not None)
    return columns if groups == 1 else max(columns + (x.nbytes + grad.nbytes) // groups, given)


def _windows(x: Tensor, weight: Tensor, out: Tensor, options: Any) -> int:
    """Bytes of one sample's windows side by side; none of single pixels, which are read where they lie."""
    stride, padding, dilation, transposed = options[:4]
    if _is_pointwise(weight) and not transposed and max(stride) == max(dilation) == 1 and not any(padding):
        return 0
    return prod((x if transposed else out).shape[2:]) * weight.nbytes // weight.shape[0]


def _is_pointwise(weight: Tensor) -> bool:
    return prod(weight.shape[2:]) == 1


def _convolution(x: Tensor, weight: Tensor, out: Tensor) -> int:
    if is_channels_last(x, weight):
        return 2 * weight.nbytes
    if not _is_copied(weight):
        return 0
    as_they_lie = prod(weight.shape[2:]) > 1 and weight.shape[1] == x.shape[1] and _has_few_channels(x)
    copies = 0 if as_they_lie else _blocked(x) + weight.nbytes
    return max(copies + _wide(out, weight) + _blocked(out) - out.nbytes, _blocked(out))


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, of_x: Tensor | None, of_weight: Tensor | None
) -> int:
    first = 0 if of_x is None else of_x.nbytes
    second = 0 if of_weight is None else of_weight.nbytes
    sums = _wide_sums(grad, x, weight) if second else 0
    if is_channels_last(x, weight):
        depthwise = weight.shape[1] == 1 and max(weight.shape[2:]) > 3
        return _depthwise_sums(x, weight) if depthwise and second else 2 * second + (sums or second)
    if not _is_copied(weight):
        return 0
    for_x = max(_blocked(grad) + weight.nbytes + _wide(x, weight), first) + _blocked(x) if first else 0
    block = _FEW_CHANNELS if _has_few_channels(x) and weight.element_size() == _FP32 else _BLOCK_CHANNELS
    copies = _blocked(x, block) + _blocked(grad, block)
    for_weight = first + max(copies + second, 2 * second) + sums if second else 0
    return max(for_x, for_weight) - first - second


def _wide(result: Tensor, weight: Tensor) -> int:
    """One sample's sums in fp32 of a 1x1 kernel in bf16, where the processor multiplies bf16."""
    is_added = _HAS_BF16 and weight.dtype == torch.bfloat16 and _is_pointwise(weight)
    return _blocked(result) // result.element_size() // result.shape[0] * _FP32 if is_added else 0


def _wide_sums(grad: Tensor, x: Tensor, weight: Tensor) -> int:
    """What 16-bit numbers need more: the kernel's gradient in fp32, and one sample's maps with pixels in pairs."""
    if weight.element_size() == _FP32:
        return 0
    pairs = (_blocked(x) + _blocked(grad)) // x.shape[0] if prod(weight.shape[2:]) > 1 and weight.shape[1] > 1 else 0
    return weight.numel() * _FP32 + pairs


def _depthwise_sums(x: Tensor, weight: Tensor) -> int:
    sums = _PARTIAL_SUMS * weight.numel() * _FP32
    if weight.element_size() < _FP32:
        sums += 16 * x[0].numel() * _FP32  # maps widened for the processor's missing 16-bit arithmetic
    return sums


def _is_copied(weight: Tensor) -> bool:
    """Whether maps are copied into blocks of channels; 1x1 kernels in fp32 read them as they are."""
    return prod(weight.shape[2:]) > 1 or weight.element_size() < _FP32


def _has_few_channels(x: Tensor) -> bool:
    return x.shape[1] < _BLOCK_CHANNELS and _BLOCK_CHANNELS > _FEW_CHANNELS


def _blocked(x: Tensor, block: int = _BLOCK_CHANNELS) -> int:
    return x.nbytes // x.shape[1] * (-(-x.shape[1] // block) * block)
