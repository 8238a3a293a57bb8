"""Gradients as the user sees them: those of one process, whichever tensor they are asked of.

Inside, the gradient of a replicated value is the mean over the replica's ranks of what each holds, and that of a split
one is, on each rank, as many times too large as there are different parts (docs/how_it_works/gradients.md tells why).
What is looked at is put right here: the leaves of split tensors, whole tensors that meet split ones, and parameters.
"""

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.hooks import RemovableHandle

from fullframe.errors import DivergenceError, GradientError
from fullframe.ranks.agreement import from_all_ranks, is_same_on_all
from fullframe.ranks.channel import channel_of
from fullframe.ranks.collectives import all_sum
from fullframe.ranks.groups import group_of_all, open_group_of_all
from fullframe.ranks.mesh import Spatial, axes_in
from fullframe.ranks.raw_bytes import checksums
from fullframe.ranks.tags import line
from fullframe.spatial.rules.registry import setters, writes

Hook = Callable[[Any], Tensor | None]


def mean_over_ranks(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of a gradient over the ranks of `group`; differentiable."""
    size = dist.get_world_size(group)
    if size == 1 or gradient is None:  # torch calls hooks with None where a function has no gradient
        return gradient
    if gradient.is_sparse:
        return _sparse_mean(gradient.coalesce(), group)
    if gradient.dtype is torch.complex32:  # for which torch has no division
        return mean_over_ranks(gradient.to(torch.complex64), group).to(torch.complex32)
    return all_sum(gradient / size, group)  # first divided: a sum could overflow in fp16


def mean_over_all(gradient: Tensor, what: str) -> Tensor:
    """The mean over all ranks of a gradient that is `what`, to which replicas may come in other orders.

    Raises DivergenceError on all ranks where they are at different ones. By `group_of_all`, for buckets of gradients
    travel in the job's group, and come in another order too.
    """
    group = group_of_all()
    channel = channel_of(group)
    if channel.carrier is not None:
        channel.agree(f"mean of {what}", gradient)
        return mean_over_ranks(gradient, group)
    open_group_of_all(gradient.device.type)
    if not is_same_on_all(zlib.crc32(what.encode()) - (1 << 31), group):
        raise DivergenceError(
            f"replicas come to gradients of parameters that have hooks, or are no model's (a criterion's?), in "
            f"different orders, this rank to that of {what}, and each would get another's; use them in one order; with "
            "find_unused_parameters=True a hook sees its replica's alone"
        )
    return mean_over_ranks(gradient, group)


def _sparse_mean(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sparse again, as hooks must leave it, with the rows that any rank has: of which optimizers take those alone."""
    kept = gradient.values().new_ones(gradient._nnz())
    rows = torch.sparse_coo_tensor(gradient.indices(), kept, gradient.shape[: gradient.sparse_dim()]).to_dense()
    indices = all_sum(rows, group).nonzero().T
    dense = mean_over_ranks(gradient.to_dense(), group)
    return torch.sparse_coo_tensor(indices, dense[tuple(indices)], gradient.shape, is_coalesced=True)


class _Known:
    """Tensors that need no further hook, each with the handle of the one it has; compared by identity."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], RemovableHandle | None]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        found = self._of.get(id(tensor))
        return found is not None and found[0]() is tensor

    def add(self, tensor: Tensor, hook: Hook | None) -> None:
        """Remember it, with this hook, which runs before all others, in the place of the one it may have had."""
        key = id(tensor)
        handle = self._of.pop(key)[1] if tensor in self else None
        if handle is not None:
            handle.remove()
        handle = None if hook is None else _registered_first(tensor, hook)
        self._of[key] = weakref.ref(tensor, lambda _: self._of.pop(key, None)), handle


def _registered_first(tensor: Tensor, hook: Hook) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    others = [(key, other) for key, other in hooks.items() if key != handle.id]
    for key, other in others:
        del hooks[key]
        hooks[key] = other
    return handle


_leaves = _Known()  # of split tensors, whose hooks take off what their gradient is too large by
_parameters = _Known()  # whose gradients are averaged by a hook, by a model's wrapper, or by hand


def manage(parameter: Tensor, hook: Hook | None) -> None:
    """The parameter is a model's: its gradient is left as it is but for what `hook` makes of it."""
    if parameter.is_leaf and parameter.requires_grad:
        _parameters.add(parameter, hook)


def stand_in(tensor: Tensor, parameter: Tensor) -> None:
    """`tensor` is taken for the managed `parameter` while a block is captured: it needs no averaging here either."""
    if parameter in _parameters:
        _parameters.add(tensor, None)


def is_managed(parameter: Tensor) -> bool:
    """Whether fullframe averages this parameter's gradient itself."""
    return parameter in _parameters


def entered(shell: type[Tensor], func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call that has split operands, with its whole ones, of which each rank uses a part.

    A rank's gradient of such an operand is a share. Whoever it belongs to sees the mean over the replica's ranks
    instead, which is the gradient. An `nn.Parameter` that is no model's (a criterion's, a learned weight of losses) is
    from now on averaged over all ranks of the job, as a model's are. `shell` is the class of split tensors.
    """
    if not torch.is_grad_enabled():
        return args, kwargs
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is not shell and _holds_entering(value, shell):
            return _entered(shell, func, args, kwargs)
    return args, kwargs


def enters(whole: Tensor) -> bool:
    """Whether the gradient of a whole operand needs a hook that averages it; that of a model's parameter does not."""
    found = _parameters._of.get(id(whole))
    return (found is None or found[0]() is not whole) and torch.is_grad_enabled()


def _holds_entering(value: Any, shell: type[Tensor]) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad and type(value) is not shell and enters(value)
    return isinstance(value, (list, tuple, dict)) and any(
        _holds_entering(item, shell) for item in (value.values() if isinstance(value, dict) else value)
    )


_AS_THEY_ARE = {torch.autograd.grad, torch.autograd.backward, Tensor.backward, *setters("grad")}


def _entered(shell: type[Tensor], func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if func in _AS_THEY_ARE:
        return args, kwargs
    spatial: Spatial = next(t.spec.spatial for t in tree_iter((args, kwargs)) if type(t) is shell)  # type: ignore[attr-defined]
    kept = id(args[0]) if args and writes(func, kwargs) else None  # an alias would be written to
    args, kwargs = tree_map_only(
        Tensor, lambda t: enter(t, spatial) if _holds_entering(t, shell) and id(t) != kept else t, (args, kwargs)
    )
    return args, kwargs


def enter(whole: Tensor, spatial: Spatial) -> Tensor:
    """`whole`, or an alias of it, where each rank goes on with a part; its gradient is the mean over the ranks."""
    if not whole.requires_grad or whole in _parameters:
        return whole
    if whole.is_leaf and isinstance(whole, nn.Parameter):
        if hasattr(whole, "full_tensor"):
            raise GradientError(
                "a sharded parameter, a DTensor, meets a split tensor where it is not gathered (a part of the model, "
                "called by itself?); do that in a method of the model, called on the parallel model, or without "
                "shard_parameters"
            )
        _require_alike(whole, spatial)
        _parameters.add(whole, _averaging(weakref.ref(whole), spatial))
        return whole
    if spatial.size == 1:
        return whole
    alias = whole.view_as(whole)
    alias.register_hook(lambda gradient: mean_over_ranks(gradient, spatial.replica))
    return alias


def _require_alike(parameter: nn.Parameter, spatial: Spatial) -> None:
    """Raises DivergenceError on all ranks of the replica where they hold different values: no one has shared them."""
    if spatial.size == 1 or not spatial.channel.tagged or is_dynamo_compiling():  # in a simulation others send nothing
        return
    everyone = from_all_ranks(checksums([parameter]), spatial.replica)
    if any(one != everyone[0] for one in everyone):
        ranks = spatial.replica_ranks
        other = next(rank for rank, one in zip(ranks, everyone, strict=True) if one != everyone[0])
        raise DivergenceError(
            f"a parameter of shape {tuple(parameter.shape)} that is no model's (a criterion's?) meets a split tensor, "
            f"and holds other values on rank {other} than on rank {ranks[0]}; make it from the same seed on all ranks, "
            "or broadcast the first rank's"
        )


_entered_at: Counter[str] = Counter()  # parameters that are no model's, by the line at which they met split tensors


def averages_others() -> bool:
    """Whether there were parameters that are no model's, and whose gradients are averaged."""
    return bool(_entered_at)


def _averaging(parameter: Any, spatial: Spatial) -> Hook:
    several = spatial.channel.tagged and dist.get_world_size() > spatial.size
    at = line(with_op=False)  # with its values, all that is known of it that replicas have in common
    _entered_at[at] += 1
    what = f"parameter {_entered_at[at]} that met a split tensor at {at}"
    if several and not is_dynamo_compiling():
        what += f", of values {checksums([parameter()])[0]:x}"

    def hook(gradient: Tensor) -> Tensor:
        if not is_accumulated(parameter()):
            return mean_over_ranks(gradient, spatial.replica)
        if not several or gradient is None:
            return mean_over_ranks(gradient, dist.group.WORLD)  # type: ignore[arg-type]
        return mean_over_all(gradient, what)

    return hook


_pass: tuple[int, bool] = -1, True  # the backward pass that was asked about last, and the answer


def is_accumulated(leaf: Tensor) -> bool:
    """In a hook of `leaf`: whether this pass adds to `.grad`, as `backward` does, or is that of `autograd.grad`."""
    global _pass
    task = torch._C._current_graph_task_id()
    if _pass[0] != task:
        _pass = task, reaches_any([leaf])
    return _pass[1]


def reaches_any(leaves: Iterable[Tensor]) -> bool:
    """In a hook: whether this pass adds to the `.grad` of one of these; not so in that of `autograd.grad`."""
    try:
        return any(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node) for leaf in leaves)
    except RuntimeError:  # so torch answers in autograd.grad
        return False


def graph_behind(nodes: Iterable[Any], until: Container[Any] = ()) -> Iterator[Any]:
    """The nodes of autograd behind some (`grad_fn`s, of which some may be None), each once; no further than `until`."""
    waiting, known = list(nodes), set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            yield node
            waiting += () if node in until else (source for source, _ in node.next_functions)


def seen(gradient: Tensor, spec: Any) -> Tensor:
    """This rank's part of one process's gradient, from what the rank holds; differentiable.

    The ranks that hold the same part, along axes over which the tensor is not split, add up theirs.
    """
    spatial: Spatial = spec.spatial
    if spatial.size == 1:
        return gradient
    split = {name for p in spec.placements for name in axes_in(p.axis)}
    whole = [axis.name for axis in spatial.axes if axis.size > 1 and axis.name not in split]
    gradient = gradient / spatial.size
    return all_sum(gradient, spatial.group(whole)) if whole else gradient


def unseen(gradient: Tensor, spec: Any) -> Tensor:
    """The inside form of one process's gradient (a seed of backward, a hook's result): times the number of parts."""
    parts: int = spec.parts
    return gradient * parts


def see_leaf(local: Tensor, spec: Any) -> None:
    """From now on `.grad` of this leaf is its part of one process's gradient."""
    if local not in _leaves:
        # None where a second derivative does not reach it
        _leaves.add(local, lambda gradient: None if gradient is None else seen(gradient, spec))


def is_seen(local: Tensor) -> bool:
    """Whether gradients that arrive at `local` are one process's."""
    return local in _leaves
