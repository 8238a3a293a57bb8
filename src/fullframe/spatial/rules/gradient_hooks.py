"""Gradients that are asked for by hand, of split tensors: hooks, `.grad`, `retain_grad`, `autograd.grad`, `backward`.

What comes out, and what a hook gets, is one process's; what goes in (a seed, a hook's result) is taken for that.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.errors import UnsupportedOp
from fullframe.spatial.gradients import enter, is_seen, see_leaf, seen, unseen
from fullframe.spatial.module_hooks import Node, Shown
from fullframe.spatial.module_path import module_path
from fullframe.spatial.operands import aligned
from fullframe.spatial.rules.registry import getter, rule, setters
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, local_or_whole, whole, wrap

_no_torch_function = torch._C.DisableTorchFunctionSubclass


@rule(Tensor.requires_grad_, checked=False)
def _requires_grad(func: Any, x: SpatialTensor, requires_grad: bool = True) -> SpatialTensor:
    """The local leaf requires a gradient, and its `.grad` becomes this rank's rows of one process's gradient."""
    local = local_of(x)
    local.requires_grad_(requires_grad)
    if requires_grad and local.is_leaf:
        see_leaf(local, x.spec)
    with _no_torch_function():
        func(x, requires_grad)  # the mirror by which lost gradients are found
    return x


@rule(setters("requires_grad")[0], checked=False)
def _set_requires_grad(func: Any, x: SpatialTensor, requires_grad: bool) -> None:
    """`x.requires_grad = value`."""
    _requires_grad(Tensor.requires_grad_, x, requires_grad)


class _Retained:
    """The gradient of a split tensor that is no leaf, once `retain_grad` has asked for it.

    Torch itself keeps that of the local tensor: after all hooks, and of what is written to it since.
    """

    def __init__(self, spec: Spec):
        self.grad: Tensor | None = None
        self.spec = spec

    def of(self, local: Tensor) -> Tensor | None:
        """One process's, with what has arrived at `local` since this was last asked."""
        arrived, local.grad = local.grad, None
        if arrived is not None:
            arrived = seen(arrived, self.spec)
            self.grad = arrived if self.grad is None else self.grad + arrived
        return self.grad


def _retained(local: Tensor) -> _Retained | None:
    return local.__dict__.get("_fullframe_retained")


@rule(Tensor.retain_grad, checked=False)
def _retain_grad(func: Any, x: SpatialTensor) -> None:
    """Keep one process's gradient of a split tensor that is no leaf, as a split tensor in `x.grad`."""
    local = local_of(x)
    if local.is_leaf or not local.requires_grad:
        func(local)  # nothing to do, or torch's error
    elif _retained(local) is None:
        func(local)
        local._fullframe_retained = _Retained(x.spec)  # type: ignore[attr-defined]


@rule(getter("retains_grad"), checked=False)
def _retains_grad(func: Any, x: SpatialTensor) -> bool:
    """Whether `retain_grad` was called."""
    return _retained(local_of(x)) is not None


@rule(getter("grad"), checked=False)
def _grad(func: Any, x: SpatialTensor) -> Tensor | None:
    """One process's gradient as a split tensor, or None."""
    local = local_of(x)
    kept = _retained(local)
    gradient: Tensor | None = kept.of(local) if kept is not None else func(local)
    if gradient is None:
        return None
    if kept is None and not is_seen(local):  # of x.local.requires_grad_()
        gradient = seen(gradient, x.spec)
    return wrap(gradient, x.spec)


@rule(*setters("grad"), checked=False)
def _set_grad(func: Any, x: Tensor, gradient: Tensor | None = None) -> None:
    """`x.grad = gradient`, whole or split, of the shape of `x`; `del x.grad` too."""
    if not isinstance(x, SpatialTensor):
        raise RuntimeError(f"assigned grad is a split tensor of shape {tuple(gradient.shape)}, which {x.shape} is not")  # type: ignore[union-attr]
    if gradient is not None and tuple(gradient.shape) != x.spec.shape:
        raise RuntimeError(f"assigned grad has data of shape {tuple(gradient.shape)}, {x.spec.shape} is needed")
    local = local_of(x)
    value = None if gradient is None else aligned(gradient, x.spec)
    kept = _retained(local)
    if kept is not None:
        kept.grad, local.grad = value, None
    else:
        see_leaf(local, x.spec)
        local.grad = value


@rule(Tensor.register_hook, checked=False)
def _register_hook(func: Any, x: SpatialTensor, hook: Callable[[Tensor], Any]) -> Any:
    """The hook gets a split tensor, with one process's gradient; FSDP2's own only watches when it arrives."""
    if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp."):
        return when_gradient_arrives(local_of(x), hook)
    local, spec = local_of(x), x.spec
    is_right = is_seen(local)

    def called(gradient: Tensor) -> Tensor | None:
        if is_right:
            result = hook(wrap(gradient, spec))
            return None if result is None else aligned(result, spec)
        shown = Shown(gradient, spec)
        result = hook(shown.given)
        return shown.taken_back(shown.given if result is None else result)

    return func(local, called)


class _Node:
    """The node of autograd's graph that made a split tensor, without its hooks: they would see what a rank holds."""

    def __init__(self, node: Any, x: SpatialTensor):
        self._node, self._x = node, repr(x)

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise UnsupportedOp(
                f"grad_fn.{name}",
                (self._x,),
                module_path(),
                "a node's hook, that of Module.register_backward_hook too, would get a part of the gradient, unscaled",
                "Use register_full_backward_hook, or register_hook of the tensor itself.",
            )
        return getattr(self._node, name)

    def __repr__(self) -> str:
        return repr(self._node)

    def __eq__(self, other: object) -> bool:
        return bool(self._node == (other._node if isinstance(other, _Node) else other))

    def __hash__(self) -> int:
        return hash(self._node)


@rule(getter("grad_fn"), checked=False)
def _grad_fn(func: Any, x: SpatialTensor) -> Any:
    """The local tensor's node; None of a leaf. torch's own graph tools, which hook no node, get it as it is."""
    node, frame = func(local_of(x)), sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("fullframe.spatial."):
        frame = frame.f_back
    safe = node is None or isinstance(node, Node)
    bare = safe or not x.spec.placements or frame.f_globals.get("__name__") == "torch.autograd.graph"
    return node if bare else _Node(node, x)


@rule(setters("data")[0], checked=False)
def _set_data(func: Any, x: SpatialTensor, data: Tensor) -> None:
    """`x.data = data`, of a tensor that is split as `x` is and has its dtype and strides."""
    if not isinstance(data, SpatialTensor) or data.spec is not x.spec or data.dtype != x.dtype or x._view is not None:
        fix = "Use x.copy_(data) under torch.no_grad()."
        raise _by_hand("Tensor.data.__set__", [x, data], "the new data is not split as the tensor is", fix)
    func(local_of(x), local_of(data))


@rule(Tensor.register_post_accumulate_grad_hook, checked=False)
def _register_post_accumulate_grad_hook(func: Any, x: SpatialTensor, hook: Callable[[Tensor], None]) -> Any:
    """The hook gets the split leaf once its gradient is complete."""
    spec = x.spec
    return func(local_of(x), lambda local: hook(wrap(local, spec)))


def when_gradient_arrives(value: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    """Call `hook` in backward before anything that `value` was computed from is reached.

    A view loses its hooks once something is written in place, its base does not; the results of many rules are views.
    """
    base = value._base
    return (value if base is None or not base.requires_grad else base).register_hook(hook)


@rule(getter("_base"), checked=False)
def _base(func: Any, x: SpatialTensor) -> None:
    """None: FSDP2 would warn of the views that lose their hooks."""


def _listed(values: Any) -> list[Any]:
    if isinstance(values, dict):
        return list(values.values())
    return list(values) if isinstance(values, Sequence) else [values]


def _seeded(outputs: Any, seeds: Any) -> tuple[list[Any], list[Tensor | None]]:
    """Plain tensors to go backward from, and their seeds; a split one's is whole or split, and of its shape."""
    tensors = _listed(outputs)
    given = [None] * len(tensors) if seeds is None else _listed(seeds)
    if len(given) != len(tensors):
        raise RuntimeError(f"got {len(tensors)} tensors and {len(given)} gradients")
    pairs = [_seed(tensor, seed) for tensor, seed in zip(tensors, given, strict=True)]
    return [tensor for tensor, _ in pairs], [seed for _, seed in pairs]


def _seed(output: Any, seed: Any) -> tuple[Any, Any]:
    if not isinstance(output, SpatialTensor):
        return output, whole(seed)
    spec = output.spec
    if seed is None:
        if spec.shape.count(1) != len(spec.shape):
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return local_of(output), None
    if tuple(seed.shape) != spec.shape:
        raise RuntimeError(f"Mismatch in shape: a gradient has {tuple(seed.shape)}, its tensor {spec.shape}")
    if torch.is_grad_enabled() and not isinstance(seed, SpatialTensor):
        seed = enter(seed, spec.spatial)  # a whole seed may be differentiated by, with create_graph
    return local_of(output), unseen(aligned(seed, spec), spec)


@rule(torch.autograd.grad, checked=False)
def _autograd_grad(func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
    """One process's gradients of the inputs, split where these are; refuses `is_grads_batched`."""
    wanted = _listed(inputs)
    if options.get("is_grads_batched"):
        raise _by_hand("autograd.grad", [*_listed(outputs), *wanted], "is_grads_batched asks for several at once")
    tensors, seeds = _seeded(outputs, grad_outputs)
    locals_ = [local_or_whole(x) for x in wanted]
    found = func(tensors, locals_, seeds, **options)
    results = tuple(
        wrap(g if is_seen(local) else seen(g, x.spec), x.spec) if isinstance(x, SpatialTensor) and g is not None else g
        for x, local, g in zip(wanted, locals_, found, strict=True)
    )
    return dict(zip(inputs, results, strict=True)) if isinstance(inputs, dict) else results


@rule(torch.autograd.backward, checked=False)
def _autograd_backward(
    func: Any, tensors: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **options: Any
) -> None:
    """Backward from split or whole tensors, by one process's seeds; refuses `inputs` that are split and no leaves."""
    outputs, seeds = _seeded(tensors, grad_tensors)
    wanted = None if inputs is None else _listed(inputs)
    for x in wanted or ():
        if isinstance(x, SpatialTensor) and not local_of(x).is_leaf:
            raise _by_hand("backward", [x], "inputs has a split tensor that is no leaf", "Use autograd.grad for it.")
    wanted = wanted and [local_or_whole(x) for x in wanted]
    func(outputs, seeds, *args, inputs=wanted, **options)


@rule(Tensor.backward, checked=False)
def _backward(
    func: Any,
    x: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`x.backward(gradient)`; the gradient is one process's seed, whole or split."""
    _autograd_backward(torch.autograd.backward, [x], [gradient], retain_graph, create_graph, inputs=inputs)


def _by_hand(name: str, values: Sequence[Any], reason: str, fix: str = "Ask for one at a time.") -> UnsupportedOp:
    return UnsupportedOp(name, tuple(repr(v) for v in values if isinstance(v, SpatialTensor)), "", reason, fix)
