"""What is done with a function that has no exact rule: it is refused by name, or run on gathered tensors.

A gathered tensor is a view of the split one that was copied, so writes to it, and to what torch makes views of it, are
carried home.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fullframe.errors import UnsupportedOp
from fullframe.spatial.gradients import enter
from fullframe.spatial.module_path import module_path
from fullframe.spatial.operands import say_gathered, shells_in
from fullframe.spatial.redistribute import sliced
from fullframe.spatial.spec import Spec, strides_of
from fullframe.spatial.tensor import SpatialTensor, described, local_of, shell_of, wrap
from fullframe.spatial.views import View, share_memory, version_of

# Why, and what to do: each write would have the others taken anew of their base.
SEVERAL = (
    "it writes into several tensors, of which some are views of split ones that are copies",
    "Write into one after the other.",
)


def unsupported(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str, fix: str) -> Any:
    """Refuse `func` by name, or run it on gathered tensors where the user asked for that."""
    shells = list(shells_in(args, kwargs))
    name = name_of(func)
    if str(getattr(func, "__module__", "")).startswith("torch.distributed"):  # it writes, and not into gathered copies
        reason = "ranks of a replica hold parts of one tensor, not values of their own"
        fix = "Give it what is whole (a mean, a pooled vector), or x.full(); ranks of one replica have it alike."
        raise UnsupportedOp(name, described(shells), module_path(), reason, fix)
    is_gathered = any(shell.spec.gather for shell in shells)
    if is_gathered and kwargs.get("out") is not None:  # which would be a gathered copy
        fix = (
            "With unsupported='gather' it runs whole, but not into out=: leave that out, and copy_ the result into it."
        )
    if not is_gathered or kwargs.get("out") is not None:
        raise UnsupportedOp(name, described(shells), module_path(), reason, fix)
    say_gathered(name, reason, shells[0])
    if not args and "tensor" in kwargs:  # so torch.nn.init hands on its own call
        args, kwargs = (kwargs["tensor"],), {name: value for name, value in kwargs.items() if name != "tensor"}
    return gathered_call(func, args, kwargs, shells[0].spec)


def gathered_call(func: Callable[..., Any], args: Any, kwargs: Any, spec: Spec) -> Any:
    """Run `func` whole on every rank; results of the shape of `spec` are cut like it, others stay whole.

    What `func` writes to an operand is written to the split one. A result that torch makes a view of an operand is
    one: what is written to it reaches the operand.
    """
    wholes: dict[int, tuple[SpatialTensor, SpatialTensor]] = {}

    def gather(shell: SpatialTensor) -> Tensor:
        if id(shell) not in wholes:
            wholes[id(shell)] = shell, _whole_view(shell)
        return wholes[id(shell)][1]._local

    args_, kwargs_ = tree_map_only(SpatialTensor, gather, (args, kwargs))
    versions = {number: whole._local._version for number, (_, whole) in wholes.items()}
    leaves, tree = tree_flatten(func(*args_, **kwargs_))
    written = [wholes[number] for number, version in versions.items() if wholes[number][1]._local._version != version]
    for shell, whole in written:
        if tuple(whole._local.shape) != shell.spec.shape:
            reason = "it changes the shape of a split tensor in place"
            raise UnsupportedOp(name_of(func), described([shell]), module_path(), reason, "Use the form that does not.")
        settle(whole)
    for n, out in enumerate(leaves):
        if not isinstance(out, Tensor):
            continue
        target = next((shell for shell, whole in written if share_memory(out, whole._local)), None)
        if target is not None:
            leaves[n] = _written(func, out, target)
            continue
        same = next((shell for shell, whole in wholes.values() if out is whole._local), None)
        if same is not None:  # a function in place had nothing to write: resize_as_ of the same size
            leaves[n] = same
            continue
        base = next((whole for _, whole in wholes.values() if share_memory(out, whole._local)), None)
        if base is not None:
            of_base, named = tree_map_only(Tensor, partial(_swapped, base._local, base), (args_, kwargs_))
            leaves[n] = derived(base, out, func, of_base, named, n)
        elif tuple(out.shape) == spec.shape and out.layout is torch.strided:
            leaves[n] = wrap(sliced(enter(out, spec.spatial), spec), spec.strided(strides_of(out)))
    return tree_unflatten(leaves, tree)


def _swapped(old: Tensor, new: Tensor, value: Tensor) -> Tensor:
    return new if value is old else value


def _written(func: Any, out: Tensor, target: SpatialTensor) -> SpatialTensor:
    """A result of `func` that is what it has written to."""
    if tuple(out.shape) == target.spec.shape and out.storage_offset() == 0:
        return target
    reason = "it returns a view of a split tensor that it writes to"
    raise UnsupportedOp(name_of(func), described([target]), module_path(), reason, "Write and view in two steps.")


def _whole_view(shell: SpatialTensor) -> SpatialTensor:
    """The whole tensor, remembered as a view of `shell`, so that writes to it reach `shell`."""

    def put(view: SpatialTensor) -> None:
        local_of(shell).copy_(sliced(enter(view._local, shell.spec.spatial), shell.spec))

    whole = shell.full()
    spec = shell.spec.with_(shell.spec.shape, ())
    return shell_of(whole, spec, View(shell, lambda base: base.full(), put, shell._local, version_of(shell._local)))


def settle_written(func: Any, before: dict[SpatialTensor, int]) -> None:
    """Carry on what `func` wrote into one of some views, whose versions were these; refuses several."""
    written = [view for view, version in before.items() if version_of(view._local) != version]
    if len(written) > 1:
        raise UnsupportedOp(name_of(func), described(written), module_path(), *SEVERAL)
    for view in written:
        settle(view)


def settle(shell: SpatialTensor) -> None:
    """Carry a write into a view on to its base, and on; without a graph where that was through `.data`."""
    tracked = torch.is_grad_enabled()
    while shell._view is not None:
        tracked = tracked and shell._local.requires_grad
        with torch.set_grad_enabled(tracked):
            shell._view.settle(shell)
        shell = shell._view.base


def derived(base: SpatialTensor, leaf: Tensor, func: Any, args: Any, kwargs: Any, number: int) -> SpatialTensor:
    """A view of a whole view, which shares its memory, by a call that has `base` among its arguments."""

    def replay(again: SpatialTensor) -> Tensor:
        args_, kwargs_ = tree_map_only(SpatialTensor, lambda t: plain(again if t is base else t), (args, kwargs))
        found = tree_flatten(func(*args_, **kwargs_))[0][number]
        assert isinstance(found, Tensor)
        return found

    spec = base.spec.with_(tuple(leaf.shape), ()).strided(strides_of(leaf))
    return shell_of(leaf, spec, View(base, replay, None, base._local, version_of(base._local)))


def plain(value: Any) -> Any:
    """The plain tensor of a shell that is whole; anything else as it is."""
    return local_of(value) if type(value) is SpatialTensor and not value.spec.placements else value


def memory_of(operand: Tensor) -> Tensor:
    """The tensor in whose memory an operand lies here."""
    return operand._local if type(operand) is SpatialTensor else operand


def name_of(func: Any) -> str:
    """What the user calls `func`."""
    owner = getattr(func, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return f"{owner.__name__}.apply"
    return torch.overrides.resolve_name(func) or str(getattr(func, "__qualname__", getattr(func, "name", func)))
