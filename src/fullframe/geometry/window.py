"""A spatial op is a window: which input rows it reads to produce given output rows."""

from dataclasses import dataclass
from typing import Protocol

from fullframe.geometry.extents import Extents


class RowMap(Protocol):
    """Which rows an op reads along one dim, and which rank makes which of its output rows."""

    def reads(self, out: range) -> range:
        """Input rows needed to produce output rows `out`, before clipping to the image."""
        ...

    def output_extents(self, extents: Extents, size_out: int) -> Extents:
        """Output boundaries where the input has the boundaries `extents`; some part may come out empty."""
        ...


@dataclass(frozen=True)
class _Kernel:
    """A kernel and how it moves, as torch counts."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0

    @property
    def span(self) -> int:
        """Rows from the first one that the kernel covers to the last, both included."""
        return self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class Window(_Kernel):
    """Output row `o` reads input rows `o * stride - padding + dilation * j` for `j < kernel` (convolution, pooling).

    `padding` is the padding before the first row; what is padded behind the last shows in the output size alone.
    """

    def reads(self, out: range) -> range:
        """Input rows needed to produce output rows `out`, before clipping to the image."""
        start = out.start * self.stride - self.padding
        return range(start, (out.stop - 1) * self.stride - self.padding + self.span) if out else range(start, start)

    def touched_by(self, rows: range) -> range:
        """Output rows that read at least one of the input `rows`, before clipping to the output."""
        first = -(-(rows.start + self.padding - self.span + 1) // self.stride)
        return range(first, max(first, (rows.stop - 1 + self.padding) // self.stride + 1)) if rows else range(0)

    def taps(self, rows: range, out: range) -> range:
        """The kernel positions through which output rows `out` see input rows `rows`; neither may be empty."""
        first = -(((out.stop - 1) * self.stride - self.padding - rows.start) // self.dilation)
        last = (rows.stop - 1 - out.start * self.stride + self.padding) // self.dilation
        return range(max(first, 0), min(last, self.kernel - 1) + 1)

    def cropped(self, taps: range) -> "Window":
        """The window of the kernel positions `taps` alone."""
        return Window(len(taps), self.stride, self.dilation, self.padding - self.dilation * taps.start)

    def output_size(self, size: int, ceil_mode: bool = False) -> int:
        """Output rows for `size` input rows; `ceil_mode` as torch's pools count it."""
        room = size + 2 * self.padding - self.span
        if not ceil_mode:
            return room // self.stride + 1
        rows = -(-room // self.stride) + 1
        return rows - 1 if (rows - 1) * self.stride >= size + self.padding else rows  # no window starts in the padding

    def output_extents(self, extents: Extents, size_out: int) -> Extents:
        """Output boundaries that follow the input's, on global coordinates; some part may come out empty."""
        inner = (min(max(-(-b // self.stride), 0), size_out) for b in extents.bounds[1:-1])
        return Extents((0, *inner, size_out))


@dataclass(frozen=True)
class TransposedWindow(_Kernel):
    """Input row `i` adds to output rows `i * stride - padding + dilation * j` for `j < kernel`."""

    def reads(self, out: range) -> range:
        """Input rows that add to output rows `out`, before clipping to the image.

        Where the stride leaves gaps that nothing adds to, the input row before the gap counts as read.
        """
        first = -(-(out.start + self.padding - self.span + 1) // self.stride)
        first = min(first, (out.start + self.padding) // self.stride)
        return range(first, (out.stop - 1 + self.padding) // self.stride + 1) if out else range(first, first)

    def output_size(self, size: int, output_padding: int = 0) -> int:
        """Output rows for `size` input rows."""
        return (size - 1) * self.stride - 2 * self.padding + self.span + output_padding

    def output_extents(self, extents: Extents, size_out: int) -> Extents:
        """Output boundaries that follow the input's, on global coordinates; some part may come out empty."""
        inner = (min(b * self.stride, size_out) for b in extents.bounds[1:-1])
        return Extents((0, *inner, size_out))


@dataclass(frozen=True)
class Slice:
    """Output row `o` is input row `start + o * step` (slicing; cropping; padding, where `start` is negative)."""

    start: int = 0
    step: int = 1

    def reads(self, out: range) -> range:
        """Input rows needed to produce output rows `out`, before clipping to the image."""
        first = self.start + out.start * self.step
        return range(first, self.start + (out.stop - 1) * self.step + 1) if out else range(first, first)

    def output_extents(self, extents: Extents, size_out: int) -> Extents:
        """Output boundaries that leave every row where it is; some part may come out empty."""
        inner = (min(max(-((self.start - b) // self.step), 0), size_out) for b in extents.bounds[1:-1])
        return Extents((0, *inner, size_out))


@dataclass(frozen=True)
class AdaptiveWindow:
    """Output row `o` of `size_out` reads input rows `[floor(o * n / m), ceil((o + 1) * n / m))` (adaptive pooling)."""

    size_in: int
    size_out: int

    def reads(self, out: range) -> range:
        """Input rows needed to produce output rows `out`."""
        start = out.start * self.size_in // self.size_out
        return range(start, -(-out.stop * self.size_in // self.size_out)) if out else range(start, start)

    def output_extents(self, extents: Extents, size_out: int) -> Extents:
        """Output boundaries over the same parts of the image; some part may come out empty."""
        return proportional_extents(extents, size_out)


def proportional_extents(extents: Extents, size_out: int) -> Extents:
    """Boundaries of a map resized to `size_out` rows that lie over the same parts of the image."""
    inner = ((2 * b * size_out + extents.size) // (2 * extents.size) for b in extents.bounds[1:-1])
    return Extents((0, *inner, size_out))
