"""What an aten op does: of what kind it is, in which kernels, how many operations they count, which bytes they move."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fullframe.simulation.fake.numbers import written_by

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm"}
_CONVOLUTIONS = {"convolution", "_convolution", "convolution_backward", "cudnn_convolution", "mkldnn_convolution"}
_NORMS = {"native_batch_norm": 5, "native_batch_norm_backward": 7}  # where they are told whether they train
_NORMS_THAT_TRAIN = {"native_group_norm", "native_group_norm_backward", "native_layer_norm_backward"}
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_", "resize_"}


class Kernel(NamedTuple):
    """One kernel: its operations, the bytes that it reads and writes, and those of a convolution's maps among them."""

    operations: float
    bytes: float
    maps: float = 0.0


@dataclass(frozen=True)
class Op:
    """What there is to know of an aten op before it is called."""

    kind: str
    free: bool
    reads_back: bool
    gives_new: bool  # some output is not an argument changed in place
    only_writes: bool  # the argument it changes is not read
    writes: tuple[tuple[int, str], ...]  # arguments that it changes in place, by position and name
    operations: Callable[..., float] | None

    @classmethod
    @functools.cache
    def of(cls, func: Any) -> "Op":
        name = func._opname
        schema = func._schema
        changed = tuple(written_by(func))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        gives_tensors = any("Tensor" in str(r.type) for r in schema.returns)
        return cls(
            kind=_kind(name),
            free=name in _FREE or views or not (gives_tensors or changed),
            reads_back=name in ("_local_scalar_dense", "is_nonzero"),
            gives_new=any(r.alias_info is None for r in schema.returns),
            only_writes=name in ("copy_", "zero_", "fill_", "_foreach_zero_", "_foreach_copy_"),
            writes=changed,
            operations=_operations(name, func),
        )

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """The tensors that are changed in place."""
        for at, name in self.writes:
            yield from tensors((args[at] if at < len(args) else kwargs.get(name),))

    def kernels(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Kernel]:
        """What runs for it: two products in a convolution's backward, each of which reads the gradient; else one."""
        operations = self.operations(func, args, kwargs, out) if self.operations is not None else 0.0
        if self.operations is _convolution_backward_operations:
            return list(_convolution_backward_kernels(operations, args, out))
        given = tuple(value for name, value in kwargs.items() if name != "out")  # which is only written
        moved = _bytes((*args, *given)) + _bytes((out,)) * self.gives_new + _read_again(func, args)
        if self.writes and not self.only_writes:
            moved += _bytes(list(self.written(args, kwargs)))
        maps = _bytes((args[0], out)) if self.kind == "convolution" else 0.0
        return [Kernel(operations, moved, maps)]


def _kind(name: str) -> str:
    if name in _MATMULS:
        return "matmul"
    if name in _CONVOLUTIONS:
        return "convolution"
    if "scaled_dot_product" in name or "_flash_attention" in name or "_efficient_attention" in name:
        return "attention"
    return "optimizer" if name.startswith(("_foreach_", "_fused_")) else "memory"


def _operations(name: str, func: Any) -> Callable[..., float] | None:
    """How to count an op's operations; None where only its bytes matter."""
    if name == "convolution_backward":
        return _convolution_backward_operations
    if name in _CONVOLUTIONS:
        return _convolution_operations
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        first, products = (1, 5) if name.endswith("backward") else (0, 2)  # where the query stands, before the key
        return lambda func, args, kwargs, out: 2.0 * products * args[first].numel() * args[first + 1].shape[-2]
    if name in ("mv", "addmv", "dot"):
        return lambda func, args, kwargs, out: 2.0 * args[-2].numel()
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None
    return lambda func, args, kwargs, out: float(formula(*args, **kwargs, out_val=out))


def _convolution_operations(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> float:
    x, weight = args[0], args[1]
    transposed = len(args) > 6 and bool(args[6])  # input, weight, bias, stride, padding, dilation, transposed
    pixels = (x if transposed else out).numel()  # one dot product a pixel and channel of these
    return float(2 * pixels * weight.numel() / weight.shape[0])


def _convolution_backward_operations(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    gradient, x, weight, transposed, wanted = args[0], args[1], args[2], bool(args[7]), args[10]
    pixels = (x if transposed else gradient).numel()
    return float(2 * pixels * weight.numel() / weight.shape[0] * (bool(wanted[0]) + bool(wanted[1])))


def _convolution_backward_kernels(operations: float, args: Sequence[Any], out: Any) -> Iterator[Kernel]:
    gradient, x, weight, wanted = args[0], args[1], args[2], args[10]
    gradients: list[Tensor | None] = list(out)
    each = operations / max(bool(wanted[0]) + bool(wanted[1]), 1)
    for beside, result in ((weight, gradients[0]), (x, gradients[1])):
        if result is not None:
            maps = _bytes((gradient, result if beside is weight else x))
            yield Kernel(each, _bytes((gradient, beside, result)), maps)
    if gradients[2] is not None:
        yield Kernel(0.0, _bytes((gradient, gradients[2])))


def _read_again(func: Any, args: Sequence[Any]) -> float:
    """Bytes that a norm reads a second time: its input, for statistics; in backward the gradient too, for sums."""
    name = func._opname if hasattr(func, "_opname") else func.__name__
    if name in _NORMS_THAT_TRAIN or (name in _NORMS and args[_NORMS[name]]):
        return _bytes(args[: 1 + name.endswith("backward")])
    return 0.0


def is_depthwise(op: Op, args: Sequence[Any]) -> bool:
    """One input channel a group: nothing to multiply as matrices."""
    weight = _weight(op, args)
    return bool(weight.shape[1] == 1 and weight.shape[0] > 1)


def is_grouped(op: Op, args: Sequence[Any]) -> bool:
    """A convolution in several groups of channels."""
    return bool(args[9 if op.operations is _convolution_backward_operations else 8] > 1)


def lies_channels_last(op: Op, args: Sequence[Any]) -> bool:
    """Whether a convolution works on maps whose channels lie side by side."""
    return is_channels_last(args[op.operations is _convolution_backward_operations], _weight(op, args))


def _weight(op: Op, args: Sequence[Any]) -> Tensor:
    weight: Tensor = args[2 if op.operations is _convolution_backward_operations else 1]
    return weight


def is_channels_last(*tensors: Tensor) -> bool:
    """Whether torch takes any of these maps or kernels for one with its channels last in memory."""
    return any(t.dim() == 4 and not t.is_contiguous() and _has_strides_of_channels_last(t) for t in tensors)


def _has_strides_of_channels_last(x: Tensor) -> bool:
    """As the C++ of `suggest_memory_format` looks, which asks for the stride of a size of 1 too."""
    least = 0
    for dim in (1, 3, 2, 0):
        stride, size = x.stride(dim), x.shape[dim]
        if stride < least or (dim == 0 and least == x.stride(1)):
            return False
        least = stride * size
    return x.stride(1) > 0 and x.numel() > 0


def tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def _bytes(values: Sequence[Any]) -> float:
    return float(sum(map(bytes_of, tensors(values))))


def bytes_of(tensor: Tensor) -> int:
    """What it takes to read it once; an expanded dim is read once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.nbytes
    count = 1
    for size, stride in zip(tensor.shape, strides, strict=True):
        count *= size if stride or size == 0 else 1
    return count * tensor.element_size()
