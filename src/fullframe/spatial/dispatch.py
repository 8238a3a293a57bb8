"""The general way of a torch function on split tensors: what all rules need, once.

Arguments are bound to torch's names; what torch refuses is refused; the rule runs, or the function is refused by name,
or runs on gathered tensors; the result has torch's shape, dtype and strides and shares memory with an operand just
where torch's does; what was written reaches every tensor that torch would have it reach.
"""

import inspect
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from fullframe.errors import FullframeError, UnsupportedOp
from fullframe.ranks.channel import announce
from fullframe.ranks.recording import recorder
from fullframe.spatial.approved import AS_IT_IS, KnownCall, approve, conformed, known_call
from fullframe.spatial.canvas import with_filled
from fullframe.spatial.expected import Expected, Leaf, expected_of, facts_of
from fullframe.spatial.fallback import SEVERAL, derived, memory_of, name_of, plain, settle, settle_written, unsupported
from fullframe.spatial.gradients import entered
from fullframe.spatial.module_path import module_path
from fullframe.spatial.on_whole import as_too_small, called_whole
from fullframe.spatial.operands import aligned, meets_sparse, shells_in
from fullframe.spatial.out import into
from fullframe.spatial.redistribute import in_runs
from fullframe.spatial.rules.registry import (
    COMPOSED,
    RULES,
    UNCHECKED,
    Merged,
    Unsupported,
    general,
    rule_of,
    takes_any_order,
    writes,
)
from fullframe.spatial.rules.unsupported import BY_MEMORY, OF_SPARSE, REASONS
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, described, left_whole, local_of, shell_of
from fullframe.spatial.views import View, before_write, share_memory, version_of

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x1": "input", "x2": "other"}  # as torch itself translates them
_SO_NAMED = {"cosine_similarity", "pairwise_distance"}  # these are their operands' own names


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, with split tensors among the arguments."""
    rule = RULES.get(func)
    if kwargs and rule is not None and not (args and _NUMPY_NAMES.keys().isdisjoint(kwargs)):
        args, kwargs = _renamed(func, args, kwargs)
    call = None if rule is None else known_call(func, args, kwargs)
    approved = None if call is None else call[1].get(call[0])
    if approved is not None:
        try:
            try:  # as `_run` does it, one call less
                made = rule(func, *args, **kwargs)  # type: ignore[misc]
            except Exception as error:
                made = _answered(error, rule, func, args, kwargs)
            return made if approved is AS_IT_IS else conformed(made, approved)
        except Unsupported:  # by what it holds, not by what it is
            pass
    if meets_sparse(func, args, kwargs):
        return unsupported(func, args, kwargs, *OF_SPARSE)
    args, kwargs = entered(SpatialTensor, func, args, dict(kwargs))
    operands: list[Tensor] = []
    target = kwargs.pop("out", None)
    facts = facts_of(func, args, kwargs, operands)
    if facts is None:
        args, kwargs = tuple(map(_number, args)), {name: _number(value) for name, value in kwargs.items()}
        facts = facts_of(func, args, kwargs, operands)
        operands = operands or [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    options = kwargs if target is None else {**kwargs, "out": target}
    if any(type(operand) is SpatialTensor and not operand.spec.placements for operand in operands):
        known = target is None and facts is not None and func not in UNCHECKED
        expected = expected_of(facts, func, args, kwargs) if known else None
        return with_whole_views(func, args, options, operands, expected)
    canvas = args[0] if target is None and args and writes(func, kwargs) else target
    if (filled := with_filled(canvas, func, args, kwargs, alike=True)) is not None:
        return dispatch(func, filled, options)
    try:
        if target is not None and next(shells_in(args, kwargs), None) is None:
            result = func(*args, **kwargs)
        else:
            result = _ruled(func, args, kwargs, operands, facts, call)
        return result if target is None else into(target, result, func)
    except Merged as merged:
        again = _in_runs(merged, args, kwargs)
        reason, fix = merged.reason, merged.fix
    except Unsupported as refused:
        again, reason, fix = None, refused.reason, refused.fix
        if (filled := with_filled(canvas, func, args, kwargs, alike=False)) is not None:
            return dispatch(func, filled, options)
    if again is not None:
        result = dispatch(func, again[0], again[1] if target is None else {**again[1], "out": target})
        return args[0] if args and result is again[0][0] else result
    try:
        return unsupported(func, args, options, reason, fix)
    except UnsupportedOp as error:
        if canvas is not None and type(canvas) is not SpatialTensor:  # ranks may differ in what else holds it
            announce(error, even_ours=True)
        raise


general.append(dispatch)


def _in_runs(
    merged: Merged, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with a merged dim cut into one run of rows a rank: copies that are views, so writes reach the base.

    That is the dim `merged` names, or, where no argument has it, every merged dim; None where there is none.
    """
    found: dict[int, SpatialTensor] = {}

    def recut(shell: SpatialTensor, exactly: bool) -> SpatialTensor:
        spec, first = shell.spec, shell
        dims = [d for d in {p.dim for p in spec.placements} if not _plain_in(spec, d)]
        if exactly:
            dims = [d for d in dims if spec.shape == merged.spec.shape and d == merged.dim]
        if dims and id(first) not in found:
            for dim in dims:
                shell = _view_in_runs(shell, dim)
            found[id(first)] = shell
        return found.get(id(first), shell)

    for exactly in (True, False):
        args_, kwargs_ = tree_map_only(SpatialTensor, partial(recut, exactly=exactly), (args, kwargs))
        if found:
            return args_, kwargs_
    return None


def _plain_in(spec: Spec, dim: int) -> bool:
    here = spec.cuts(dim)
    return len(here) == 1 and here[0].is_plain


def _view_in_runs(shell: SpatialTensor, dim: int) -> SpatialTensor:
    local, spec = in_runs(local_of(shell), shell.spec, dim)

    def put(view: SpatialTensor) -> None:
        local_of(shell).copy_(aligned(view, shell.spec))

    def replay(base: SpatialTensor) -> Tensor:
        return in_runs(local_of(base), base.spec, dim)[0]

    spec = spec.strided(shell.spec.strides)
    return shell_of(local, spec, View(shell, replay, put, shell._local, version_of(shell._local)))


def _renamed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by torch's own names (`dim` for numpy's `axis`), with the first one by position."""
    if not _NUMPY_NAMES.keys().isdisjoint(kwargs) and func.__name__ not in _SO_NAMED:
        kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    if not args:
        first = next((name for name in ("condition", "input", "self") if name in kwargs), None)
        if first is not None:
            return (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}
    return args, kwargs


def _number(value: Any) -> Any:
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "shape", 1):
        return value.item()
    if kind is tuple or kind is list:
        return kind(_number(item) for item in value)
    return value


def _ruled(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor], facts: Any, call: KnownCall | None
) -> Any:
    """The rule's result, with the shape, dtype, strides and shared memory that torch's has; raises Unsupported."""
    rule = rule_of(func)
    if rule is None:
        if isinstance(func, torch.ScriptMethod):
            fix = "Give parallelize the module that torch.jit was given, and compile it for export alone."
            raise Unsupported("TorchScript compiled it, and no rule can see its ops", fix)
        raise Unsupported(REASONS.get(func, "there is no exact rule for it on split tensors"))
    expected = None if facts is None or func in UNCHECKED else expected_of(facts, func, args, kwargs)
    if expected is not None and expected.error is not None:
        raise type(expected.error)(*expected.error.args)
    if not takes_any_order(rule):
        for operand in operands:
            if type(operand) is SpatialTensor:
                operand.spec.require_in_order()
    widens = expected is not None and expected.widens and func not in COMPOSED
    first: Any = args[0] if args else None
    is_view = type(first) is SpatialTensor and first._view is not None
    written = writes(func, kwargs)
    if is_view and written:
        before_write(first)
    before = version_of(local_of(first)) if is_view else 0
    made = result = _run(_in_fp32(rule) if widens else rule, func, args, kwargs)
    if expected is not None:
        result = _as_torch_has_it(result, expected, operands, Call(func, args, kwargs))
    if is_view and (written or (result is first and version_of(first._local) != before)):
        settle(first)
    if call is not None and not (widens or written) and recorder() is None:  # tensors of a capture may share otherwise
        approve(call, made, result)
    return result


def _run(rule: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule's result, or that of the call on a whole map where this one has fewer rows than ranks.

    An error that this rank alone may meet is told to the others.
    """
    try:
        return rule(func, *args, **kwargs)
    except Exception as error:
        return _answered(error, rule, func, args, kwargs)


def _answered(error: Exception, rule: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result on a whole map that is too small for the rule; any other error is raised again."""
    try:
        if (small := as_too_small(error, func, args, kwargs)) is not None:
            return called_whole(small, func, args, kwargs)
        raise error
    except Unsupported:
        raise
    except Exception as other:
        if isinstance(other, TypeError):
            _explain(rule, func, args, kwargs, other)
        announce(other)
        raise
    finally:
        del error  # whose traceback holds this frame: the circle would keep tensors, also after a recompute's end


def _in_fp32(rule: Any) -> Any:
    """The rule on operands in fp32, without autocast: for functions that autocast runs in fp32."""

    def widened(value: Tensor) -> Tensor:
        dtype = value._local.dtype if type(value) is SpatialTensor else value.dtype
        return value.float() if dtype in (torch.bfloat16, torch.float16) else value

    @wraps(rule)
    def wide_rule(func: Any, *args: Any, **kwargs: Any) -> Any:
        device = next(t._local.device.type for t in tree_iter((args, kwargs)) if type(t) is SpatialTensor)
        with torch.autocast(device, enabled=False):
            args, kwargs = tree_map_only(Tensor, widened, (args, kwargs))
            return rule(func, *args, **kwargs)

    return wide_rule


def _explain(rule: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError) -> None:
    """Raise Unsupported where the rule does not know an option that torch accepts."""
    try:
        inspect.signature(rule).bind(func, *args, **kwargs)
    except TypeError as unknown:
        raise Unsupported(f"this form of the call has no exact rule ({unknown})") from error


class Call(NamedTuple):
    """A function and what it was called with."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _as_torch_has_it(result: Any, expected: Expected, operands: list[Tensor], call: Call) -> Any:
    if isinstance(result, Tensor) and len(expected.leaves) == 1:
        return _conformed(result, expected.leaves[0], operands, call, 0)
    leaves, tree = tree_flatten(result)
    tensors = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(tensors) != len(expected.leaves):
        return result  # a Python value, or torch's own choice of what to leave out
    made = list(leaves)
    for number, (n, leaf) in enumerate(zip(tensors, expected.leaves, strict=True)):
        leaves[n] = _conformed(leaves[n], leaf, operands, call, number)
    if all(leaf is before for leaf, before in zip(leaves, made, strict=True)):
        return result  # itself, so that the call is approved
    return tree_unflatten(leaves, tree)


def _conformed(result: Tensor, leaf: Leaf, operands: list[Tensor], call: Call, number: int) -> Tensor:
    """`result` with the dtype and strides of torch's result `leaf`, and sharing memory where that does."""
    alias = None if leaf.alias is None else operands[leaf.alias]
    if result is alias and leaf.itself:
        return result
    if type(result) is SpatialTensor:
        made, spec, old = result._local, result.spec, None if result is alias else result._view
    else:
        made, spec, old = result, _whole_spec(result, operands), None
    if spec.shape != leaf.shape:
        raise FullframeError(
            f"{name_of(call.func)} would give shape {spec.shape} where torch gives {leaf.shape}: a fault of "
            "fullframe; please report it, and gather the operands with .full() meanwhile"
        )
    local = made if made.dtype is leaf.dtype else made.to(leaf.dtype)
    if alias is None:
        view = None
        is_view = local.requires_grad and local._is_view()  # whose hooks end with a write in place
        if (is_view and not leaf.is_view) or any(share_memory(local, memory_of(operand)) for operand in operands):
            local = local.clone()
    else:
        if result is alias:  # torch gives a view, whose hooks and gradient are its own
            local = local.view_as(local)
        view = old if old is not None else _view_of(alias, local, call, number)
    if local is made and view is old and spec.strides == leaf.strides:
        return result
    if not spec.placements and view is None:
        return local
    return shell_of(local, spec.strided(leaf.strides), view)


def _whole_spec(result: Tensor, operands: list[Tensor]) -> Spec:
    spec: Spec = next(operand.spec for operand in operands if type(operand) is SpatialTensor)
    return spec.with_(result.shape, ())


def _view_of(base: Tensor, local: Tensor, call: Call, number: int) -> View | None:
    """The record that the result is a view of `base`; None where they share local memory, so that none is needed."""
    if type(base) is not SpatialTensor:
        return None
    shared = share_memory(local, base._local)
    if shared and base._view is None:
        return None

    def replay(again: SpatialTensor) -> Tensor:
        args_, kwargs_ = tree_map_only(SpatialTensor, lambda t: again if t is base else t, (call.args, call.kwargs))
        results = tree_iter(dispatch(call.func, args_, kwargs_))
        return memory_of([leaf for leaf in results if isinstance(leaf, Tensor)][number])

    def refuse(view: SpatialTensor) -> None:
        name = name_of(call.func)
        reason = f"torch would write into the base of what {name} returned, which is a copy here"
        raise UnsupportedOp(f"a write to a view by {name}", described([view]), module_path(), reason, "Use .clone().")

    return View(base, replay, None if shared else refuse, base._local, version_of(base._local))


def with_whole_views(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor], expected: Expected | None
) -> Any:
    """A call on whole tensors that are views of split ones: torch's own, and what it writes reaches the split ones.

    Such a view has no gaps where torch's has them, so what shares memory with it is told as for a split tensor. Split
    values that are written into one, and are no more than it has, are made whole as well.
    """
    if func in BY_MEMORY:
        return unsupported(func, args, kwargs, BY_MEMORY[func], "Use .clone() first.")
    if expected is not None and expected.error is not None:
        raise type(expected.error)(*expected.error.args)
    views = [leaf for leaf in tree_iter((args, kwargs)) if type(leaf) is SpatialTensor and not leaf.spec.placements]
    for view in views:
        left_whole(view._local)
    first: Any = args[0] if args else None
    out, changes = kwargs.get("out"), writes(func, kwargs)
    targets = [first] if out is None else list(tree_iter(out))
    goals = [view for view in views if any(view is target for target in targets)]  # which alone are written
    writes_list = changes and out is None and type(first) in (list, tuple)
    if writes_list or len(set(map(id, goals))) > 1:
        return unsupported(func, args, kwargs, *SEVERAL)
    written = changes or out is not None
    for goal in goals if written else ():
        before_write(goal)
    into_whole = type(first) is SpatialTensor and not first.spec.placements and changes
    room = first.numel() if into_whole else 0

    def met(t: SpatialTensor) -> Any:
        return t.full() if t.spec.placements and t.numel() <= room else plain(t)

    locals_, options = tree_map_only(SpatialTensor, met, (args, kwargs))
    before = {view: version_of(view._local) for view in dict.fromkeys(views)}
    result = func(*locals_, **options)
    memories = {id(view._local): view for view in views}
    leaves, tree = tree_flatten(result)
    tensors = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    told = expected.leaves if expected is not None and len(expected.leaves) == len(tensors) else [None] * len(tensors)
    for number, (n, as_torch) in enumerate(zip(tensors, told, strict=True)):
        leaf = leaves[n]
        if type(leaf) is SpatialTensor:
            continue
        base = memories.get(id(leaf))
        if base is not None and (as_torch is None or as_torch.alias is not None):
            leaves[n] = base
        elif as_torch is not None:
            leaves[n] = _conformed(leaf, as_torch, operands, Call(func, args, kwargs), number)
        else:
            base = next((view for view in views if share_memory(leaf, view._local)), None)
            leaves[n] = leaf if base is None else derived(base, leaf, func, args, kwargs, n)
    if not written:
        settle_written(func, before)
    elif goals:
        settle(goals[0])
    return tree_unflatten(leaves, tree)
