"""What an aten op does: of what kind it is, how many operations it counts, which bytes it reads and writes."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fullframe.simulation.fake.numbers import written_by

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm"}
_CONVOLUTIONS = {"convolution", "_convolution", "convolution_backward", "cudnn_convolution", "mkldnn_convolution"}
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_", "resize_"}


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
        name = func._opname if hasattr(func, "_opname") else func.__name__
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


def is_depthwise(op: Op, args: Sequence[Any]) -> bool:
    """One input channel a group: nothing to multiply as matrices."""
    weight = args[2] if op.operations is _convolution_backward_operations else args[1]
    return bool(weight.shape[1] == 1 and weight.shape[0] > 1)


def tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def bytes_of(tensor: Tensor) -> int:
    """What it takes to read it once; an expanded dim is read once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.nbytes
    count = 1
    for size, stride in zip(tensor.shape, strides, strict=True):
        count *= size if stride or size == 0 else 1
    return count * tensor.element_size()
