"""The fewest bytes a step must send: which input columns each rank's output columns read and do not own.

Computed by walking over every output column by the definition of each op, on plain integers; it shares no code with
what it judges. A borrowed column is sent once in forward, and its gradient once back where the input has one.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fullframe as ff

POOLING = ("input", "kernel_size", "stride", "padding")
SETTINGS = {  # the windowed functions, and the names of their positional arguments
    F.conv2d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    F.conv_transpose2d: ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    F.max_pool2d: (*POOLING, "dilation"),
    F.avg_pool2d: POOLING,
    F.interpolate: ("input", "size", "scale_factor", "mode", "align_corners"),
}
SPLIT_DIM = 3
AXIS = "width"

Reads = Callable[[int], list[int]]  # output column -> input columns, before clipping to the image


class Call(NamedTuple):
    """One op of a step, as it happened."""

    reads: Reads
    size: int  # input columns
    owned: tuple[int, ...]  # boundaries of the input
    made: tuple[int, ...]  # boundaries of the output
    column_bytes: int  # N * C * H * bytes of a number
    returns: bool  # whether the input's gradient is asked for

    def borrowed(self, part: int) -> int:
        """Columns that the rank reads and does not own."""
        own = range(self.owned[part], self.owned[part + 1])
        wanted = {i for o in range(self.made[part], self.made[part + 1]) for i in self.reads(o) if 0 <= i < self.size}
        return len(wanted.difference(own))

    @property
    def bytes(self) -> int:
        """Over all ranks, forward and backward."""
        columns = sum(self.borrowed(part) for part in range(len(self.owned) - 1))
        return columns * self.column_bytes * (2 if self.returns else 1)


def window(kernel: int, stride: int, padding: int, dilation: int) -> Reads:
    """A convolution or a pooling."""
    return lambda o: [o * stride - padding + tap * dilation for tap in range(kernel)]


def transposed(kernel: int, stride: int, padding: int, dilation: int) -> Reads:
    """A transposed convolution: input `i` reaches output `i * stride - padding + tap * dilation`."""

    def reads(o: int) -> list[int]:
        reached = [o + padding - tap * dilation for tap in range(kernel)]
        return [value // stride for value in reached if value % stride == 0]

    return reads


def bilinear(size: int, out: int, aligned: bool) -> Reads:
    """The two columns around the source position; the second only where it has a weight."""

    def reads(o: int) -> list[int]:
        if aligned:
            source = Fraction(o * (size - 1), max(out - 1, 1))
        else:
            source = max(Fraction(2 * o + 1, 2) * Fraction(size, out) - Fraction(1, 2), Fraction(0))
        first = int(source)
        return [first] if source == first else [first, min(first + 1, size - 1)]

    return reads


def last(value: int | Sequence[int]) -> int:
    """A setting for the width."""
    return value if isinstance(value, int) else value[-1]


def boundaries(value: Tensor) -> tuple[int, ...]:
    """Where the tensor is cut along the width."""
    if not isinstance(value, ff.SpatialTensor):
        raise TypeError(f"a map of shape {tuple(value.shape)} is not split any more; use a larger image or fewer ranks")
    (placement,) = (p for p in value.placements if p.axis == AXIS and p.dim == SPLIT_DIM)
    return tuple(placement.extents.bounds)


def windows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor) -> Reads | None:
    """What the definition of a call says about the width; None for an op without a window."""
    if func not in SETTINGS:
        return None
    given = dict(zip(SETTINGS[func], args, strict=False)) | kwargs
    if func is F.interpolate:
        if given.get("mode") != "bilinear":
            raise ValueError(
                f"interpolate with mode {given.get('mode')!r} has no definition here; add it to minimum.py"
            )
        return bilinear(given["input"].shape[SPLIT_DIM], made.shape[SPLIT_DIM], bool(given.get("align_corners")))
    kernel = given["weight"].shape[-1] if "weight" in given else last(given["kernel_size"])
    stride = given.get("stride") or (1 if "weight" in given else kernel)
    settings = kernel, last(stride), last(given.get("padding", 0)), last(given.get("dilation", 1))
    return transposed(*settings) if func is F.conv_transpose2d else window(*settings)


class Recorder(TorchFunctionMode):
    """Records the windowed ops of a step, called by a module or by a function.

    Everything else a model does is taken to borrow nothing; what it borrows all the same shows as a ratio above 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        reads = windows(func, args, kwargs, made)
        if reads is not None:
            x = args[0] if args else kwargs["input"]
            n, c, h, w = x.shape
            column_bytes, returns = n * c * h * x.element_size(), x.requires_grad
            self.calls.append(Call(reads, w, boundaries(x), boundaries(made), column_bytes, returns))
        return made
