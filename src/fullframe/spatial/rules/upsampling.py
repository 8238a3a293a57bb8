"""Linear upsampling of a large map by an even factor along its one cut: where it lies, border rows once more.

So no joined copy of the map is made, no larger one is trimmed, and the exchange runs meanwhile. By a factor of 2, where
this rank owns input rows 4 to 7 and borrows rows 3 and 8 (s):

    input      3s [ 4    5    6    7 ] 8s
    outputs       [a b  c d  e f  g h]
    1. rows 4 to 7 are upsampled as if they were the whole: all but a and h, which read a borrowed row, are right
    2. a is taken from what 3s and 4 give, h from 7 and 8s

Backward the same way: rows 4, 5 and 7 get some of theirs from a and h, and so are done again with the borrowed rows.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullframe.geometry.route import Route, Transfer
from fullframe.ranks.adjoint import applied, linear
from fullframe.ranks.exchange import InFlight, assembled, borrowed, brought_back, joined, post
from fullframe.ranks.memory_format import memory_format_of
from fullframe.spatial.halo import Cut
from fullframe.spatial.rules.convolution import joined_bytes

_aten = torch.ops.aten
_KERNELS: dict[str, tuple[Any, Any]] = {
    "linear": (_aten.upsample_linear1d.default, _aten.upsample_linear1d_backward.default),
    "bilinear": (_aten.upsample_bilinear2d.default, _aten.upsample_bilinear2d_backward.default),
    "trilinear": (_aten.upsample_trilinear3d.default, _aten.upsample_trilinear3d_backward.default),
}
_ROWS = 3  # of its own that a rank must have: above, two of them and one behind are done again


class Upsampling(NamedTuple):
    """A linear mode, without align_corners, on this rank. Sizes and scales are one a spatial dim."""

    mode: str
    cut: Cut
    factor: int  # of the cut's dim, even
    sizes: tuple[int, ...]  # of the output; that of the cut's dim is not read
    scales: tuple[float | None, ...]

    def is_quicker(self, local: Tensor) -> bool:
        """Whether it pays, and can be had. The messages are the same either way, so each rank decides for itself."""
        if self.mode not in _KERNELS or len(self.cut.own) < _ROWS or not local.numel():
            return False
        if local.device.type != "cpu" and torch.are_deterministic_algorithms_enabled():
            return False  # which torch's function sees to
        return local.nbytes > joined_bytes(local)

    def forward(self, x: Tensor) -> Tensor:
        """`x`, any rows of the cut's dim, as if it were the whole."""
        made: Tensor = _KERNELS[self.mode][0](x, self._sizes(x.shape[self.cut.dim]), False, *self.scales)
        return made

    def backward(self, gradient: Tensor, shape: list[int]) -> Tensor:
        """The gradient of what `forward` was given, of this shape."""
        sizes = self._sizes(shape[self.cut.dim])
        made: Tensor = _KERNELS[self.mode][1](gradient, sizes, shape, False, *self.scales)
        return made

    def _sizes(self, rows: int) -> list[int]:
        sizes = list(self.sizes)
        sizes[self.cut.dim - 2] = rows * self.factor
        return sizes


def upsampled(local: Tensor, how: Upsampling) -> Tensor:
    """This rank's rows of the upsampled map; differentiable as often as one likes."""
    return _upsample(local, how)  # type: ignore[no-any-return]


class _Upsample(torch.autograd.Function):
    """Linear in its input, so it keeps no tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, how: Upsampling) -> Tensor:
        ctx.how, ctx.shape = how, list(local.shape)
        ctx.set_materialize_grads(False)
        cut, factor, dim = how.cut, how.factor, how.cut.dim
        flight = _posted(cut, cut.route, [_rows(local, cut, t) for t in cut.route.sends], local, ctx.shape, "rows")
        out = how.forward(local)
        half, rows = factor // 2, len(cut.own)
        for transfer, strip in zip(cut.route.receives, flight.wait([out]), strict=True):
            if transfer.rows.start < cut.own.start:
                both = how.forward(joined([strip, local.narrow(dim, 0, 1)], dim))
                out.narrow(dim, 0, half).copy_(both.narrow(dim, factor, half))
            else:
                both = how.forward(joined([local.narrow(dim, rows - 1, 1), strip], dim))
                out.narrow(dim, rows * factor - half, half).copy_(both.narrow(dim, half, half))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:  # on no rank, also those that join their rows
            return None, None
        how, shape = ctx.how, ctx.shape
        if torch.is_grad_enabled():  # create_graph
            return _differentiable_backward(how, grad, shape), None
        cut, factor, dim = how.cut, how.factor, how.cut.dim
        half, size = factor // 2, grad.shape[dim]
        of_strips, again = [], []  # own rows done again, and the first of them
        for transfer in cut.route.receives:
            if transfer.rows.start < cut.own.start:  # borrowed, own, own, and one that is not read
                found = _of_some_rows(how, grad.narrow(dim, 0, 2 * factor + half), shape, 4, factor)
                of_strips.append(found.narrow(dim, 0, 1))
                again.append((0, found.narrow(dim, 1, 2)))
            else:  # one that is not read, own, borrowed
                found = _of_some_rows(how, grad.narrow(dim, size - factor - half, factor + half), shape, 3, half)
                of_strips.append(found.narrow(dim, 2, 1))
                again.append((shape[dim] - 1, found.narrow(dim, 1, 1)))
        flight = _posted(cut, cut.route.back, of_strips, grad, shape, "gradient of rows")
        result = how.backward(grad, shape)
        for first, rows in again:
            result.narrow(dim, first, rows.shape[dim]).copy_(rows)
        for transfer, returned in zip(cut.route.sends, flight.wait([result]), strict=True):
            _rows(result, cut, transfer).add_(returned)
        return result, None


_upsample = applied(_Upsample)


def _of_some_rows(how: Upsampling, grad: Tensor, shape: list[int], rows: int, before: int) -> Tensor:
    """The gradient of so many rows, of whose outputs those from `before` on have the gradient `grad`, others none."""
    dim, shape = how.cut.dim, list(shape)
    shape[dim] = rows
    sizes = list(grad.shape)
    sizes[dim] = rows * how.factor
    wide = torch.zeros_like(grad.new_empty(sizes).contiguous(memory_format=memory_format_of(grad)))
    wide.narrow(dim, before, grad.shape[dim]).copy_(grad)
    return how.backward(wide, shape)


def _posted(cut: Cut, plan: Route, blocks: list[Tensor], like: Tensor, shape: list[int], kind: str) -> InFlight:
    """`blocks` on their way; what comes is in the dtype of `like`, of this shape but for the rows."""
    shapes = [[*shape[: cut.dim], len(t.rows), *shape[cut.dim + 1 :]] for t in plan.receives]
    return post(cut.axis, plan, blocks, shapes, like, cut.extents.size, kind)


def _rows(tensor: Tensor, cut: Cut, transfer: Transfer) -> Tensor:
    """The view of own rows that are sent."""
    return tensor.narrow(cut.dim, transfer.rows.start - cut.own.start, len(transfer.rows))


def _differentiable_backward(how: Upsampling, grad: Tensor, shape: list[int]) -> Tensor:
    """The same of differentiable pieces, with the messages of the way where own and borrowed rows are joined."""
    cut, dim = how.cut, how.cut.dim
    ends = [cut.own.start - cut.rows.start, cut.rows.stop - cut.own.stop]  # borrowed rows
    before, behind = (torch.zeros_like(grad.narrow(dim, 0, rows * how.factor)) for rows in ends)
    found = how.backward(joined([before, grad, behind], dim), [*shape[:dim], len(cut.rows), *shape[dim + 1 :]])

    def there(own: Tensor) -> Tensor:
        return assembled(own, borrowed(own, dim, cut.trip, cut.axis), dim, cut.trip)

    return linear(found, partial(brought_back, dim=dim, way=cut.trip, axis=cut.axis), there)
