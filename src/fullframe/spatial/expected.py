"""What plain torch would do with the whole tensors: the op itself, run on meta tensors of the global shapes.

So whatever torch refuses is refused on all ranks alike with torch's own exception, and a rule's result is held to
torch's shape and dtype, and to whether it shares memory with an operand. Remembered by function and arguments. Under
autocast fake tensors take the place of meta tensors, as autocast looks at the device, and so does attention.
"""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import index
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._meta_registrations import check_grid_sampler_common, upsample_common_check
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fullframe.ranks.memory_format import memory_format_of
from fullframe.spatial.spec import strides_of
from fullframe.spatial.tensor import SpatialTensor

PLAIN = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout,
     type(Ellipsis))
)  # fmt: skip
_MOST = 65536  # calls that are remembered


class Leaf(NamedTuple):
    """One tensor that torch would return."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: contiguous
    dtype: torch.dtype
    alias: int | None  # the operand, by its number among the tensors of the call, whose memory it shares
    itself: bool = False  # it is that operand, and no view of it
    is_view: bool = False  # of an operand, or of what torch made on the way to it


class Expected(NamedTuple):
    """The tensors torch would return, or the exception it would raise."""

    leaves: tuple[Leaf, ...]
    error: Exception | None
    widens: bool = False  # autocast has it computed in fp32, which its operands are not all in


class _BySize(TorchDispatchMode):
    """Inside, ops in `_BY_SIZE` are told by it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _BY_SIZE.get(func.name())
        return func(*args, **(kwargs or {})) if made is None else made(*args[:2])


class _Unknown(Exception):
    """An argument that cannot be described by what all ranks know."""


_CONVOLUTIONS = frozenset((F.conv2d, F.conv3d))
# Their strides on meta are not the device's; of the others where an operand is not contiguous.
_LAID_OUT_BY_KERNEL = frozenset((F.scaled_dot_product_attention,))
_LAID_OUT_AS_OPERANDS = frozenset((
    F.conv2d, F.conv3d, F.conv_transpose2d, F.conv_transpose3d, F.pad, F.group_norm, torch.group_norm,
    torch.conv2d, torch.conv3d, torch.conv_transpose2d, torch.conv_transpose3d,
))  # fmt: skip
_GROUP_NORMS = frozenset((F.group_norm, torch.group_norm))


def _resized(image: Tensor, size: Sequence[int]) -> Tensor:
    """What `interpolate` makes of (N, C, ...), without its values."""
    shape = upsample_common_check(image.shape, size, len(size))
    torch._check(
        math.prod(image.shape[1:]) != 0,
        lambda: f"Non-empty {image.dim()}D data tensor expected but got a tensor with sizes {list(image.shape)}",
    )
    return torch.empty(shape, dtype=image.dtype, device=image.device, memory_format=memory_format_of(image))


def _sampled(image: Tensor, grid: Tensor) -> Tensor:
    """What `grid_sample` makes of (N, C, H, W) at (N, h, w, 2), without its values."""
    message = "grid_sampler(): expected {}D input and grid with same number of dimensions, but got {}D grid"
    torch._check(image.dim() == grid.dim(), lambda: message.format(image.dim(), grid.dim()))
    check_grid_sampler_common(image, grid)
    return image.new_empty((*image.shape[:2], *grid.shape[1:-1]))


# Torch writes these out in Python, some in thousands of steps without values (up to 160 ms a call), asks less of their
# operands than their kernels do, and refuses an empty batch. Here the first two operands tell all.
_RESIZES = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
"""
_BY_SIZE: dict[str, Callable[..., Tensor]] = {f"aten::{name}": _resized for name in _RESIZES.split()}
_BY_SIZE["aten::grid_sampler_2d"] = _sampled
_WRITTEN_OUT = frozenset((F.interpolate, F.grid_sample))
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")
_SHUFFLES = frozenset((F.channel_shuffle, torch.channel_shuffle, F.pixel_shuffle, torch.pixel_shuffle))
_known: dict[Any, Expected | None] = {}
_policy = [0]  # of autocast: how many there were before


def facts_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
    """The call as something hashable that all ranks know; fills `operands` with its tensors in order.

    None where an argument cannot be described so, a number of numpy's for instance.
    """
    try:
        facts = func, torch.get_default_dtype(), _facts(args, operands)
        if kwargs:
            return *facts, tuple(kwargs), _facts(kwargs.values(), operands), autocast_of(operands)
        return *facts, autocast_of(operands)
    except _Unknown:
        operands.clear()
        return None


def expected_of(key: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Expected | None:
    """What torch would do in the call whose facts are `key`; None where that cannot be told."""
    found = _known.get(key, _known)
    if found is not _known:
        return found  # type: ignore[return-value]
    if len(_known) > _MOST:
        _known.clear()
    result = _known[key] = _run(func, args, kwargs, key[-1])
    return result


def _facts(values: Any, operands: list[Tensor]) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        kind = type(value)
        found.append(kind)
        if kind is SpatialTensor:
            operands.append(value)
            found += (value.spec.facts, value._local.dtype)
        elif kind in PLAIN:
            found.append(value)
        elif isinstance(value, Tensor):
            operands.append(value)
            found += (value.shape, value.stride(), value.dtype)
        elif kind is tuple or kind is list:
            found.append(_facts(value, operands))
        elif kind is slice:
            found.append(tuple(map(_bound, (value.start, value.stop, value.step))))
        elif kind is torch.Size:
            found.append(value)
        elif kind is dict:
            found += (tuple(value), _facts(value.values(), operands))
        else:
            raise _Unknown
    return tuple(found)


def _bound(value: Any) -> Any:
    """A slice's bound, a tensor's or numpy's number too: the result's size follows from its value."""
    return value if type(value) in PLAIN else index(value)


def autocast_of(operands: list[Tensor]) -> tuple[str, torch.dtype, int] | None:
    """Device, dtype and number of the policy of the autocast that is on for the operands, None where there is none."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = next((t._local.device.type for t in operands if type(t) is SpatialTensor), "cpu")
    return (kind, torch.get_autocast_dtype(kind), _policy[0]) if torch.is_autocast_enabled(kind) else None


def forget_expected() -> None:
    """Ask again from now on: another policy of autocast holds."""
    _known.clear()
    _policy[0] += 1


def _run(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], cast: tuple[str, torch.dtype, int] | None
) -> Expected | None:
    made: list[Tensor] = []
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    # Kernels take empty tensors that torch without values refuses.
    empty = all(0 in (t.spec if isinstance(t, SpatialTensor) else t).shape for t in tensors)
    device = ("cpu" if empty else "meta") if cast is None else cast[0]
    if func in _LAID_OUT_BY_KERNEL or (func in _LAID_OUT_AS_OPERANDS and any(map(_has_gaps_or_order, tensors))):
        device = next((t.device.type for t in tensors), device)
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _fake_log.disabled = True  # it reports what torch refuses as a fault of its own
        with nullcontext() if device == "meta" or (empty and cast is None) else FakeTensorMode():
            args, kwargs = (_without_values(tree, device, made) for tree in (args, kwargs))
            try:
                with _BySize() if func in _WRITTEN_OUT else nullcontext():  # type: ignore[no-untyped-call]
                    result = func(*args, **kwargs)
            except Exception as error:
                home = type(error).__module__
                if "meta" in str(error).lower() or home.startswith("torch._subclasses"):  # it would read a value
                    return None
                if said := _of_channels_last(func, made) or _of_labels(func, made) or _of_shapes(error, made):
                    error = type(error)(f"{error}; {said}")
                if isinstance(error, AssertionError):  # only functions without values have them, kernels do not
                    error = RuntimeError(str(error))
                return Expected((), error.with_traceback(None))
            if _keeps_format_on_cpu(func, args, kwargs) and tensors[0].device.type == "cpu":
                result = result.contiguous(memory_format=memory_format_of(made[0]))
            if func in _GROUP_NORMS and tensors[0].device.type == "cpu":  # of one sample torch has it otherwise
                result = torch.empty_like(result, memory_format=suggest_memory_format(made[0]))
            leaves = tuple(_leaf(t, made) for t in tree_leaves(result) if isinstance(t, Tensor))
    lower = any(t.dtype in (torch.bfloat16, torch.float16) for t in made)
    return Expected(leaves, None, bool(cast) and lower and any(leaf.dtype is torch.float32 for leaf in leaves))


def _keeps_format_on_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the CPU's kernel gives the memory format of its operand, and torch without values does not know."""
    if func in (torch.roll, Tensor.roll):
        return len(args) > 2 or "dims" in kwargs
    return func in _SHUFFLES


def _has_gaps_or_order(t: Tensor) -> bool:
    return t.spec.strides is not None if isinstance(t, SpatialTensor) else not t.is_contiguous()


def _of_channels_last(func: Any, operands: list[Tensor]) -> str:
    """What to do where a convolution is given images (N, H, W, C); "" where it is not that."""
    if func not in _CONVOLUTIONS or len(operands) < 2:
        return ""
    image, weight = operands[:2]
    channels = weight.shape[1]
    if image.dim() < weight.dim() - 1 or image.shape[-1] != channels or image.shape[1 - weight.dim()] == channels:
        return ""
    return (
        f"an image of shape {tuple(image.shape)} seems to have its channels last, but its last dims are taken for rows "
        "and columns: give image.movedim(-1, 0) in the data set"
    )


def _of_labels(func: Any, operands: list[Tensor]) -> str:
    """What to do where labels are no classes, which without values is told of as an index; "" where it is not that."""
    if func not in (F.cross_entropy, F.nll_loss) or len(operands) < 2:
        return ""
    logits, labels = operands[:2]
    if labels.dim() == logits.dim() - 1 and labels.dtype is not torch.int64:
        return f"labels of {labels.dtype} are no classes: give labels.long() in the data set"
    if labels.dim() == logits.dim() > 1 and labels.shape[1] == 1 and labels.dtype is torch.int64:
        return f"labels of shape {tuple(labels.shape)} have a dim of channels: give labels.squeeze(0) in the data set"
    return ""


def _of_shapes(error: Exception, operands: list[Tensor]) -> str:
    """The operands' shapes, for what functions without values refuse without a number, and kernels with; else ""."""
    if any(letter.isdigit() for letter in str(error)):
        return ""
    return f"the operands have the shapes {', '.join(str(tuple(operand.shape)) for operand in operands)}"


def _without_values(value: Any, device: str, made: list[Tensor]) -> Any:
    """`value` with tensors of the global shapes on `device` in place of those it holds."""
    if isinstance(value, Tensor):
        if type(value) is SpatialTensor:
            shape, strides, dtype = value.spec.shape, value.spec.strides, value._local.dtype
        else:
            shape, strides, dtype = tuple(value.shape), value.stride(), value.dtype
        if strides is None:
            made.append(torch.empty(shape, dtype=dtype, device=device))
        else:
            made.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        return made[-1]
    if isinstance(value, (tuple, list)):
        items = [_without_values(item, device, made) for item in value]
        return type(value)(items) if type(value) in (tuple, list) else tuple(items)
    if type(value) is dict:
        return {name: _without_values(item, device, made) for name, item in value.items()}
    if type(value) is torch.device:
        return torch.device(device)
    return value


def _leaf(result: Tensor, metas: list[Tensor]) -> Leaf:
    alias = next((n for n, meta in enumerate(metas) if torch._C._is_alias_of(result, meta)), None)  # type: ignore[attr-defined]
    itself = alias is not None and result is metas[alias]
    return Leaf(tuple(result.shape), strides_of(result), result.dtype, alias, itself, result._is_view())
