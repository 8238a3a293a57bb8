"""SpatialTensor: a shell with the global shape around the part of the tensor that this rank holds.

The data and the autograd graph live on the local tensor; the shell has neither. Every torch function on a shell goes
to its rule. A value that is not split is an ordinary tensor, equal on all ranks of a replica.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from fullframe.errors import MeshError, ShapeError, UnsupportedOp
from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement, Placements, local_factors
from fullframe.ranks.channel import announce
from fullframe.ranks.exchange import fetch
from fullframe.ranks.mesh import Spatial, kept_with_mesh
from fullframe.spatial.gradients import see_leaf
from fullframe.spatial.module_path import module_path
from fullframe.spatial.rules.registry import QUICK, Merged, general, getter
from fullframe.spatial.views import View, share_memory, version_of

_no_torch_function = torch._C.DisableTorchFunctionSubclass
_shell_grad_fn = getter("grad_fn")
_make_shell: Any = Tensor._make_wrapper_subclass


@dataclass(frozen=True, eq=False)
class Layout:
    """What all ranks know of a split tensor: its global shape and where it is cut. Compare with `is`."""

    spatial: Spatial
    shape: tuple[int, ...]
    placements: Placements
    gather: bool  # what has no rule is gathered rather than refused
    strides: tuple[int, ...] | None = None  # of the whole tensor as torch would have it; None: contiguous
    approved: set[Any] = field(default_factory=set)  # calls on such tensors that need no more checking

    def of(self, dim: int) -> Placement | None:
        """The placement of a dim that is nothing but one split factor; None when the dim is whole.

        Raises Merged for a dim that is merged from several factors; the dispatch then brings it to runs of rows.
        """
        here = [p for p in self.placements if p.dim == dim % len(self.shape)]
        if not here:
            return None
        if len(here) > 1 or not here[0].is_plain:
            raise Merged(self, dim % len(self.shape))
        return here[0]

    def require_plain(self, dims: Iterable[int]) -> None:
        """Raises Merged where one of the dims is merged from several factors."""
        for dim in dims:
            self.of(dim)

    def is_split(self, dim: int) -> bool:
        """Whether any part of the dim is split."""
        return any(p.dim == dim % len(self.shape) for p in self.placements)

    def with_(self, shape: Sequence[int], placements: Placements) -> "Layout":
        """The layout of a result with this shape and these placements."""
        return layout_of(self.spatial, tuple(shape), placements, self.gather)

    def strided(self, strides: tuple[int, ...] | None) -> "Layout":
        """The same layout with these strides of the whole tensor."""
        return layout_of(self.spatial, self.shape, self.placements, self.gather, strides)

    @cached_property
    def facts(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """What torch would know of the whole tensor beside its dtype."""
        return self.shape, self.strides

    @cached_property
    def elementwise(self) -> "Layout":
        """The layout of the result of a pointwise function: torch keeps the order of strides, not their gaps."""
        if self.strides is None:
            return self
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = torch.empty_strided(self.shape, self.strides, device="meta") + 1
            return self.strided(None if result.is_contiguous() else result.stride())

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's part along each spatial axis."""
        return {"height": self.spatial.height.part, "width": self.spatial.width.part}


@kept_with_mesh(maxsize=16384)
def layout_of(
    spatial: Spatial,
    shape: tuple[int, ...],
    placements: Placements,
    gather: bool = False,
    strides: tuple[int, ...] | None = None,
) -> Layout:
    """The one `Layout` object for these facts, in plain integers: it is kept, and others are made from it."""
    strides = None if strides is None else tuple(map(int, strides))
    return Layout(spatial, tuple(map(int, shape)), tuple(map(_in_integers, placements)), gather, strides)


def _in_integers(p: Placement) -> Placement:
    bounds = tuple(map(int, p.extents.bounds))
    return Placement(p.axis, int(p.dim), Extents(bounds), int(p.outer), int(p.inner))


class SpatialTensor(Tensor):
    """A tensor of which this rank holds a part: `.shape` is global, `.local` is here.

    Made by `fullframe.shard`. Torch functions with an exact rule give the numbers of the whole tensor; any other
    raises `UnsupportedOp` on all ranks alike.
    """

    __slots__ = ("_layout", "_local", "_view")
    _local: Tensor
    _layout: Layout
    _view: View | None  # set where memory that torch would share is not shared

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        quick = QUICK.get(func)
        if quick is not None:
            try:
                result = quick(func, args, kwargs)
            except Exception as error:
                announce(error)
                raise
            if result is not NotImplemented:
                return result
        return general[0](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        shells = [a for a in tree_iter((args, kwargs)) if isinstance(a, SpatialTensor)]
        raise UnsupportedOp(
            str(func),
            described(shells),
            module_path(),
            "it bypasses torch functions (a C++ kernel or a custom op called directly), so no rule can see it",
            "Call it on the .local tensor if it is pointwise, or on .full(); or register a rule with fullframe.rule.",
        )

    @property
    def local(self) -> Tensor:
        """This rank's part, a plain tensor that carries the autograd graph."""
        return local_of(self)

    @property
    def placements(self) -> Placements:
        """Where the tensor is cut, one entry a split."""
        return self._layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh it is split over."""
        return self._layout.spatial.mesh

    def full(self) -> Tensor:
        """The whole tensor, plain, on every rank of the replica; differentiable. All ranks must call it."""
        local, placements = local_of(self), self._layout.placements
        for placement in placements:
            local = _gather_axis(local, self._layout, placement, placements)
            placements = tuple(p for p in placements if p.axis != placement.axis)
        return local

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        cuts = "; ".join(map(str, self._layout.placements))
        return f"SpatialTensor(shape={self._layout.shape}, dtype={self._local.dtype}, cut at [{cuts}])"

    def __deepcopy__(self, memo: Any) -> "Tensor":
        return wrap(local_of(self).__deepcopy__(memo), self._layout)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedOp(
            "pickle", described([self]), "", "a split tensor lives on a mesh of ranks", "Save x.full() or x.local."
        )


def wrap(local: Tensor, layout: Layout) -> Tensor:
    """The shell around `local`; a layout without splits gives `local` itself, as what is whole is a plain tensor."""
    return shell_of(local, layout, None) if layout.placements else local


def shell_of(local: Tensor, layout: Layout, view: View | None) -> SpatialTensor:
    """The shell around `local`, also where nothing is split: a whole view whose writes must reach a split base."""
    shell: SpatialTensor = _make_shell(
        SpatialTensor,
        layout.shape,
        strides=layout.strides,
        dtype=local.dtype,
        device=local.device,
        requires_grad=local.requires_grad,
    )
    shell._local = local
    shell._layout = layout
    shell._view = view
    if local.requires_grad and local.is_leaf:
        see_leaf(local, layout)
    return shell


def viewed(base: SpatialTensor, local: Tensor, layout: Layout, replay: Any, put: Any) -> Tensor:
    """The shell of what torch makes a view of `base`; `replay(base)` takes it again, `put(view)` writes it back."""
    shared = share_memory(local, base._local)
    if shared and base._view is None and layout.placements:
        return wrap(local, layout)
    return shell_of(local, layout, View(base, replay, None if shared else put, base._local, version_of(base._local)))


def local_of(shell: SpatialTensor) -> Tensor:
    """The local tensor of a shell that has no graph of its own.

    A shell that went through `autograd.Function.apply` has one: its gradient would bypass the local tensor and be lost.
    A view that had to be copied is taken anew where its base was written since.
    """
    if shell._view is not None:
        shell._view.refresh(shell, local_of(shell._view.base))
    with _no_torch_function():
        own_graph = _shell_grad_fn(shell)
    if own_graph is not None:
        raise UnsupportedOp(
            type(own_graph).__name__,
            described([shell]),
            module_path(),
            "an autograd.Function was applied to a split tensor and would lose its gradient",
            "Apply it to x.local if it is pointwise, or to x.full(); or write it with torch functions.",
        )
    return shell._local


def gather_axes(local: Tensor, layout: Layout, axes: Sequence[str]) -> tuple[Tensor, Layout]:
    """Make `local` whole along the named mesh axes."""
    placements = layout.placements
    for placement in layout.placements:
        if placement.axis in axes:
            local = _gather_axis(local, layout, placement, placements)
            placements = tuple(p for p in placements if p.axis != placement.axis)
    return local, layout.with_(layout.shape, placements)


def _gather_axis(local: Tensor, layout: Layout, placement: Placement, placements: Placements) -> Tensor:
    whole = (range(placement.extents.size),) * placement.extents.parts
    return refetched(local, layout, placement, placements, whole)


def refetched(
    local: Tensor, layout: Layout, placement: Placement, placements: Placements, wanted: tuple[range, ...]
) -> Tensor:
    """Exchange rows of one placement of a tensor that is cut by `placements`, so that this rank holds `wanted`."""
    axis = layout.spatial.axis(placement.axis)
    if placement.is_plain:
        return fetch(local, placement.dim, placement.extents, wanted, axis)
    outer, rows, inner = local_factors(placement, placements, layout.coordinates)
    split = local.unflatten(placement.dim, (outer, rows, inner))
    return fetch(split, placement.dim + 1, placement.extents, wanted, axis).flatten(placement.dim, placement.dim + 2)


def in_runs(local: Tensor, layout: Layout, dim: int) -> tuple[Tensor, Layout]:
    """A dim merged from several factors cut in runs of rows over one mesh axis instead, or whole where it is small.

    The tensor is made whole along the axes in question for a moment: an exchange of all with all.
    """
    here = [p for p in layout.placements if p.dim == dim]
    local, layout = gather_axes(local, layout, [p.axis for p in here])
    axis = max((layout.spatial.axis(p.axis) for p in here), key=lambda a: a.size)
    if layout.shape[dim] < max(2, axis.size):
        return local, layout
    runs = Placement(axis.name, dim, Extents.even(layout.shape[dim], axis.size))
    cut = layout.with_(layout.shape, (*layout.placements, runs))
    return sliced(local, layout.with_(layout.shape, (runs,))), cut


def resplit(local: Tensor, layout: Layout, axis: str, extents: Extents) -> tuple[Tensor, Layout]:
    """The same tensor with other boundaries along one mesh axis."""
    placement = next(p for p in layout.placements if p.axis == axis)
    if placement.extents == extents:
        return local, layout
    local = refetched(local, layout, placement, layout.placements, extents.ranges)
    moved = Placement(axis, placement.dim, extents, placement.outer, placement.inner)
    return local, layout.with_(layout.shape, tuple(moved if p is placement else p for p in layout.placements))


def sliced(whole: Tensor, layout: Layout, cut: Placements = ()) -> Tensor:
    """This rank's part of an operand that broadcasts against `layout`, sends nothing.

    `cut` are the placements (in dims of `layout`) by which the operand is split already.
    """
    offset = len(layout.shape) - whole.dim()
    for p in layout.placements:
        dim = p.dim - offset
        if dim < 0 or whole.shape[dim] == 1 or any(q.axis == p.axis for q in cut):
            continue
        _require(whole, dim, layout, p, cut)
        rows = p.extents.ranges[layout.spatial.axis(p.axis).part]
        if p.is_plain:
            whole = whole.narrow(dim, rows.start, len(rows))
        else:
            parts = whole.unflatten(dim, local_factors(p, cut, layout.coordinates))
            whole = parts.narrow(dim + 1, rows.start, len(rows)).flatten(dim, dim + 2)
        cut = (*cut, p)
    return whole


def _require(whole: Tensor, dim: int, layout: Layout, p: Placement, cut: Placements) -> None:
    """The operand has as many rows as the dim it is cut along; torch would refuse any other but 1."""
    outer, rows, inner = (1, p.extents.size, 1) if p.is_plain else local_factors(p, cut, layout.coordinates)
    if whole.shape[dim] != outer * rows * inner:
        raise ShapeError(
            f"an operand of shape {tuple(whole.shape)} does not broadcast to {layout.shape} in dim {p.dim}"
        )


def aligned(value: Tensor, layout: Layout) -> Tensor:
    """The local part of an operand that broadcasts against `layout`, cut where `layout` is cut."""
    if not isinstance(value, SpatialTensor):
        return sliced(value, layout) if value.dim() else value
    local, own = local_of(value), value._layout
    if own is layout:
        return local
    require_one_mesh(own, layout)
    offset = len(layout.shape) - len(own.shape)
    target = {p.axis: p for p in layout.placements}
    for p in own.placements:
        wanted = target.get(p.axis)
        if wanted is None or not alike(p.at(p.dim + offset), wanted):
            say_gathered("an operand", f"{p} meets {wanted or 'a tensor that is whole there'}", value)
            local, own = gather_axes(local, own, [p.axis])
        else:
            local, own = resplit(local, own, p.axis, wanted.extents)
    return sliced(local, layout, tuple(p.at(p.dim + offset) for p in own.placements))


def merged(values: Sequence[Tensor]) -> Layout:
    """The layout of what `values` broadcast to: cut as the largest operands are."""
    shells = sorted((v for v in values if isinstance(v, SpatialTensor)), key=lambda s: -_numel(s._layout.shape))
    first = shells[0]._layout
    shapes = [v._layout.shape if isinstance(v, SpatialTensor) else tuple(v.shape) for v in values]
    if all(s._layout is first for s in shells) and all(_fits(shape, first.shape) for shape in shapes):
        return first
    for shell in shells:
        require_one_mesh(shell._layout, first)
    shape = tuple(torch.broadcast_shapes(*shapes))
    cuts = [[p.at(p.dim + len(shape) - len(s._layout.shape)) for p in s._layout.placements] for s in shells]
    return first.with_(shape, united(cuts))


def require_one_mesh(own: Layout, other: Layout) -> None:
    """Raises MeshError where the operands of one op are split over different meshes."""
    if own.spatial is not other.spatial:
        sizes = [f"{layout.spatial.height.size}x{layout.spatial.width.size}" for layout in (own, other)]
        raise MeshError(
            f"tensors of two meshes (height x width {sizes[0]} and {sizes[1]}) meet in one op; "
            "split both over one mesh, or pass one of them as x.full()"
        )


def united(cuts: Sequence[Sequence[Placement]]) -> Placements:
    """The placements of operands of one shape together: the first operand that is split over an axis decides."""
    placements: dict[str, Placement] = {}
    for own in cuts:
        taken = {p.dim for p in placements.values()}  # two operands do not share out the factors of one dim
        placements |= {p.axis: p for p in own if p.axis not in placements and p.dim not in taken}
    return tuple(placements[name] for name in ("height", "width") if name in placements)


def alike(p: Placement, q: Placement) -> bool:
    """Whether two placements split the same factor of the same dim, at whatever boundaries."""
    return (p.dim, p.outer, p.inner, p.extents.size) == (q.dim, q.outer, q.inner, q.extents.size)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _fits(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `into` without making it larger."""
    return len(shape) <= len(into) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(into), strict=False))


def shells_in(*trees: Any) -> Iterator[SpatialTensor]:
    """The split tensors in nested arguments."""
    return (leaf for leaf in tree_iter(trees) if isinstance(leaf, SpatialTensor))


def described(shells: Sequence[SpatialTensor]) -> tuple[str, ...]:
    """Split tensors as an error's message names them."""
    return tuple(repr(shell) for shell in shells)


_said: set[tuple[str, str]] = set()


def say_gathered(name: str, reason: str, shell: SpatialTensor) -> None:
    """Warn, once a call site and on the job's first rank, that `shell` is made whole."""
    where = module_path()
    if (name, where) in _said or torch._C._current_graph_task_id() != -1:  # in backward: recompute, of what was said
        return
    _said.add((name, where))
    if torch.distributed.get_rank() == 0:
        warnings.warn(f"{name} ({where or 'outside a module'}) runs on the gathered {shell!r}: {reason}", stacklevel=5)
