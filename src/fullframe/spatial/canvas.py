"""Whole tensors that a program fills with split values, as in `out = torch.zeros(size); out[:, :, ::2] = x`.

Such a tensor becomes split where the first split value is written into it: the object that the program holds is given
the shell of this rank's part, so that the rest of the program goes on as it is. Views that the program has taken, as in
`out[:, 2:-2] += x` or `for image, part in zip(images, out): part.copy_(image)`, become the same views of what is split.
"""

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import swap_tensors

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement
from fullframe.ranks.memory_format import memory_format_of
from fullframe.spatial.gradients import enter
from fullframe.spatial.operands import shells_in, united
from fullframe.spatial.redistribute import sliced
from fullframe.spatial.rules.masks import dims_used, is_mask
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, is_left_whole, wrap

_BY_INDEX = ("scatter", "scatter_add", "scatter_reduce", "put", "index_put")
_BY_ROW = ("index_add", "index_copy", "index_fill", "index_reduce")
_FILL_A_COPY = {getattr(home, name) for home in (torch, Tensor) for name in (*_BY_INDEX, *_BY_ROW)}


def with_filled(
    canvas: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], alike: bool
) -> tuple[Any, ...] | None:
    """The arguments once what `func` fills with what comes of its split operands is split; None where it stays whole.

    That is `canvas`, where it writes into one, or a copy of the first of them: `torch.zeros(size).scatter_add(...)`.
    It is cut as the operands are in the dims in which it has as many rows as they have, and evenly in others, where it
    has at least a row for each rank; with `alike` only where it has none of the others. Sends nothing.
    """
    if canvas is not None:
        return args if _filled_by(canvas, func, args, kwargs, alike) else None
    if func not in _FILL_A_COPY or not args or not _is_whole(args[0]):
        return None
    spec = _spec_of(args[0], _View((), tuple(range(args[0].dim()))), args[0], func, args, kwargs, alike)
    return None if spec is None else (_part(args[0], spec), *args[1:])


def _filled_by(canvas: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], alike: bool) -> bool:
    """Whether `canvas` is split now, and its base if it is a view.

    It is left whole where it is a parameter, a model's buffer or a shell's own memory, and where something would not
    see what is written: an array or torch's graph that holds its memory, a view that slices and numbers cannot say.
    """
    if not _is_whole(canvas):
        return False
    base: Tensor = canvas if canvas._base is None else canvas._base
    view = _view_of(canvas, base)
    held = None if view is None else _views_held(base, canvas)
    if view is None or held is None:
        return False
    spec = _spec_of(base, view, canvas, func, args, kwargs, alike)
    if spec is None:
        return False
    split = _part(enter(base, spec.spatial), spec)
    waiting = [tensor for tensor, _ in held]
    while waiting:  # first what no other holds: a fake view holds the views between
        waiting.sort(key=lambda tensor: -tensor._use_count())  # type: ignore[attr-defined]
        _swap(waiting.pop(), torch.empty(0))  # which lets go of `base`
    _swap(base, split)
    for tensor, as_it_was in held:
        _swap(tensor, as_it_was.taken(base))
    return True


def _is_whole(canvas: Any) -> bool:
    return isinstance(canvas, Tensor) and not isinstance(canvas, SpatialTensor) and canvas.numel() > 0


def _spec_of(
    base: Tensor, view: "_View", canvas: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], alike: bool
) -> Spec | None:
    """How a base is cut whose `view`, the canvas, is filled; None where it is not."""
    cuts: list[tuple[Placement, ...]] = []
    shells = sorted(shells_in(args, kwargs), key=lambda shell: -shell.numel())
    for shell in shells:
        behind = [None if dim is None else view.dims[dim] for dim in _lies_along(shell, canvas, func, args)]
        cuts.append(tuple(_cuts(shell, behind, tuple(base.shape))))
    placements = united(cuts)
    wanted = {(p.axis, p.extents) for shell in shells for p in shell.spec.placements}
    if not placements or (alike and wanted != {(p.axis, p.extents) for p in placements}):
        return None
    return shells[0].spec.with_(tuple(base.shape), placements).strided(base.stride())


def _part(whole: Tensor, spec: Spec) -> Tensor:
    return wrap(sliced(whole, spec).clone(memory_format=memory_format_of(whole)), spec)


def _swap(one: Tensor, other: Tensor) -> None:
    """`swap_tensors`, also of fake ones, which torch 2.14 remembers by the weak references that it must not meet."""
    for tensor in (one, other):
        if isinstance(tensor, FakeTensor):
            memory = tensor.fake_mode.fake_tensor_converter.meta_converter.tensor_memo
            for key in [reference.key for reference in weakref.getweakrefs(tensor) if hasattr(reference, "key")]:
                memory.pop(key, None)
    swap_tensors(one, other)


class _View(NamedTuple):
    """Slices and numbers that pick a view of a base, and for each dim of it the base's dim; None for an added one."""

    picks: tuple[Any, ...]
    dims: tuple[int | None, ...]

    def taken(self, base: Tensor) -> Tensor:
        """This view of `base`."""
        picked = base[self.picks]
        kept = [dim for dim in self.dims if dim is not None]
        if kept != sorted(kept):
            picked = picked.permute([sorted(kept).index(dim) for dim in kept])
        for number, dim in enumerate(self.dims):
            picked = picked.unsqueeze(number) if dim is None else picked
        return picked


def _view_of(canvas: Tensor, base: Tensor) -> _View | None:
    """How `canvas` is a view of `base`, from where its elements lie; None where slices and numbers cannot say it."""
    shape, strides = tuple(base.shape), base.stride()
    if canvas is base:
        return _View((), tuple(range(base.dim())))
    if canvas.dtype is not base.dtype or canvas.is_conj() or canvas.is_neg():
        return None
    behind = canvas.storage_offset() - base.storage_offset()
    picks: list[Any] = [0] * base.dim()
    by_stride = sorted((d for d in range(base.dim()) if shape[d] > 1 and strides[d]), key=lambda d: -strides[d])
    for d in by_stride:
        picks[d], behind = divmod(int(behind), strides[d])
    if behind or any(number >= size for number, size in zip(picks, shape, strict=True)):
        return None
    dims: list[int | None] = []
    for size, stride in zip(canvas.shape, canvas.stride(), strict=True):
        dim = next((d for d in by_stride if strides[d] <= stride), None) if size > 1 else None
        dims.append(dim)
        if size == 1:
            continue
        if dim is None or stride % strides[dim] or isinstance(picks[dim], slice):
            return None
        first, step = picks[dim], stride // strides[dim]
        last = first + (size - 1) * step
        if last >= shape[dim]:
            return None
        picks[dim] = slice(first, last + 1, step)
    return _View(tuple(picks), tuple(dims))


def _views_held(base: Tensor, canvas: Tensor) -> list[tuple[Tensor, _View]] | None:
    """The views of `base` that the program's variables hold, `canvas` if it is one among them, and how they are views.

    None where something else than these and variables for `base` holds it, or its memory.
    """
    if is_left_whole(base) or is_left_whole(canvas):
        return None
    if base.requires_grad and (base.is_leaf or not torch.is_grad_enabled()):  # its graph would not go on
        return None
    if base.layout is not torch.strided or not base.untyped_storage().resizable():  # as of an array
        return None
    if base.device.type == "cpu" and base.is_shared():  # with other processes; on other devices torch says so of all
        return None
    tensors = [] if canvas is base else [canvas]
    if isinstance(base, FakeTensor):  # which keeps the views between; a simulation asks no more
        tensors += _others(base, canvas)
    else:
        alone = torch.empty(2, device=base.device)
        tensors += _others(base, canvas, base._use_count() - alone._use_count() - len(tensors))  # type: ignore[attr-defined]
        if {type(base), type(canvas)} != {type(alone)}:  # a class of the program's own, which would be lost
            return None
        likewise = [alone, *[alone[:1] for _ in tensors]]
        if list(map(_holders, [base, *tensors])) != list(map(_holders, likewise)):
            return None
    views = [(tensor, view) for tensor in tensors if (view := _view_of(tensor, base)) is not None]
    return views if len(views) == len(tensors) else None


def _others(base: Tensor, canvas: Tensor, count: int = sys.maxsize) -> list[Tensor]:
    """The `count` views of `base` beside `canvas`, or all, but those of another class than its own.

    They are looked for among all objects of Python's garbage collector, the youngest first.
    """
    found: list[Tensor] = []
    for generation in range(3):
        if len(found) >= count:
            break
        for each in gc.get_objects(generation):
            if type(each) is type(base) and each is not canvas and each._base is base:
                found.append(each)
    return found


def _holders(tensor: Tensor) -> tuple[Any, ...]:
    """Who holds a tensor beside Python's variables, and how many hold its memory."""
    memory: Any = tensor.untyped_storage()
    held: Any = tensor
    in_use = torch._C._storage_Use_Count(memory._cdata)
    return held._use_count(), weakref.getweakrefs(tensor), sys.getrefcount(memory), in_use


def _cuts(shell: SpatialTensor, behind: Sequence[int | None], shape: Sequence[int]) -> Iterator[Placement]:
    """Where the cuts of an operand lie in a tensor of `shape`, whose dim each of its dims lies along."""
    spec = shell.spec
    lying: dict[int, list[Placement]] = {}
    for p in spec.placements:
        along = behind[p.dim]
        if along is not None:
            lying.setdefault(along, []).append(p)
    for along, here in lying.items():
        axis = spec.spatial.axis(spec.spatial.joint([p.axis for p in here]))
        if len({p.dim for p in here}) == 1 and shape[along] == spec.shape[here[0].dim]:
            yield from (p.at(along) for p in here)
        elif shape[along] >= axis.size:
            yield Placement(axis.name, along, Extents.even(shape[along], axis.size))


def _lies_along(shell: SpatialTensor, canvas: Tensor, func: Any, args: tuple[Any, ...]) -> list[int | None]:
    """The dim of the canvas that each dim of an operand lies along; None where it lies along none.

    What is written ends where the canvas ends, or what an index picks of it. A mask in the index lies along the dims
    that it covers, what it picks along the longest of them; positions lie along the dim that they index, what they pick
    together along the longest of these. Positions (N, H, W) of three dims lie along them one by one.
    """
    name = getattr(func, "__name__", "")
    index: Any = args[1] if name in ("__setitem__", "index_put_", "index_put") else ()
    items = list(index) if isinstance(index, tuple) or name != "__setitem__" else [index]
    rest = canvas.dim() - sum(dims_used(item) for item in items)
    if rest < 0:  # which torch refuses
        return [None] * shell.dim()
    at = next((n for n, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * rest
    picked: list[int | None] = []
    indexed, each = _indexed(items)
    dim, in_tensors = 0, False
    for item in items:
        if item is shell:
            own = range(dim, dim + shell.dim()) if is_mask(item) else each[-shell.dim() :]
            return [*own] or [dim] * shell.dim()
        if item is None or isinstance(item, (slice, bool)):
            picked.append(dim if isinstance(item, slice) else None)
        elif not in_tensors:
            dims = 1 if is_mask(item) else (item if isinstance(item, Tensor) else torch.as_tensor(item)).dim()
            covered = range(dim, dim + dims_used(item)) if is_mask(item) else indexed or [dim]
            picked += each or [max(covered, key=lambda d: (canvas.shape[d], d))] * dims
            in_tensors = dims > 0
        dim += dims_used(item)
    outside = shell.dim() - len(picked)
    return [*[None] * outside, *picked[max(0, -outside) :]]


def _indexed(items: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The dims for which there is a tensor of positions, and these again where it has a dim for each of them."""
    found, dim, dims = [], 0, 0
    for item in items:
        if isinstance(item, Tensor) and item.dim() and not is_mask(item):
            found.append(dim)
            dims = max(dims, item.dim())
        dim += dims_used(item)
    return found, found if len(found) == dims and not any(map(is_mask, items)) else []
