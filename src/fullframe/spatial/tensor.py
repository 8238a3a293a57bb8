"""SpatialTensor: a shell with the global shape around the part of the tensor that this rank holds.

The data and the autograd graph live on the local tensor; the shell has neither. Every torch function on a shell goes
to its rule. A value that is not split is an ordinary tensor, equal on all ranks of a replica.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from fullframe.errors import ArgumentError, UnsupportedOp
from fullframe.geometry.placement import Placements
from fullframe.ranks.channel import announce
from fullframe.ranks.collector import objects_of
from fullframe.spatial.gradients import see_leaf
from fullframe.spatial.module_path import module_path
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.registry import QUICK, general, getter, writes
from fullframe.spatial.spec import Spec
from fullframe.spatial.views import View, counting, share_memory, version_of
from fullframe.spatial.whole_operands import watching

_no_torch_function = torch._C.DisableTorchFunctionSubclass
_shell_grad_fn = getter("grad_fn")
_make_shell: Any = Tensor._make_wrapper_subclass
_no_memory: Any = torch._C._set_throw_on_mutable_data_ptr


class SpatialTensor(Tensor):
    """A tensor of which this rank holds a part: `.shape` is global, `.local` is here.

    Made by `fullframe.shard`. Torch functions with an exact rule give the numbers of the whole tensor; any other
    raises `UnsupportedOp` on all ranks alike.
    """

    _local: Tensor
    spec: Spec  # what all ranks know of it
    _view: View | None  # set where memory that torch would share is not shared

    def __new__(cls, *args: Any, **kwargs: Any) -> "SpatialTensor":
        raise ArgumentError("a SpatialTensor is not made by its class, but by ff.shard, ff.scatter or ff.from_local")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(types) > 1:
            for kind in types:
                if hasattr(kind, "goes_first"):
                    return NotImplemented
        if is_dynamo_compiling():  # a rule talks to other ranks: the graph is broken here, and the rule runs as it is
            return torch._dynamo.disable(_under_dynamo)(func, args, kwargs or {})
        for noted in watching:
            noted.note(func, args, kwargs or {})
        if torch.is_inference_mode_enabled() and not _writes_into_whole(func, args, kwargs or {}):
            with counting():  # a copied view must know what was written to its base
                return cls.__torch_function__(func, types, args, kwargs)
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
        if func is torch.ops.aten._to_copy.default and not args[0].requires_grad:  # torch.as_tensor(x, dtype=...)
            return on_local(args[0], lambda local: func(local, **kwargs))
        reason = "it bypasses torch functions (a C++ kernel, a custom op, a transform of torch.func), where no rule is"
        fix = (
            "Call it on the .local tensor if it is pointwise, or on .full(); or register a rule with fullframe.rule. "
            "In place of torch.func.grad and vmap use torch.autograd.grad and a loop."
        )
        if str(func) == "aten.detach.default":
            reason, fix = "torch.tensor(x) passes torch functions by", "Write x.clone() for torch.tensor(x)."
        if str(func) == "aten._to_copy.default":
            reason, fix = "torch.as_tensor(x) passes torch functions by", "Write x.to(...) for torch.as_tensor(x, ...)."
        raise UnsupportedOp(str(func), described(shells), module_path(), reason, fix)

    def dim(self) -> int:
        """How many dims the whole tensor has; modules ask at each call, so `__torch_function__` is passed by."""
        return len(self.spec.shape)

    @property
    def local(self) -> Tensor:
        """This rank's part, a plain tensor that carries the autograd graph."""
        return left_whole(local_of(self))

    @property
    def placements(self) -> Placements:
        """Where the tensor is cut, one entry a split."""
        return self.spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh it is split over."""
        return self.spec.spatial.mesh

    def full(self) -> Tensor:
        """The whole tensor, plain, on every rank of the replica; differentiable. All ranks must call it."""
        if is_dynamo_compiling():  # it would follow the messages, and take the local tensor's graph for the shell's
            return torch._dynamo.disable(self.full)()  # type: ignore[no-any-return]
        return left_whole(gather_axes(local_of(self), self.spec, [p.axis for p in self.spec.placements])[0])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        cuts = "; ".join(map(str, self.spec.placements))
        return f"SpatialTensor(shape={self.spec.shape}, dtype={self._local.dtype}, cut at [{cuts}])"

    def __deepcopy__(self, memo: Any) -> "Tensor":
        return wrap(local_of(self).__deepcopy__(memo), self.spec)

    def __copy__(self) -> "Tensor":
        """As torch's own: of the same memory, and a leaf where a gradient is required."""
        return self.detach().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedOp(
            "pickle", described([self]), "", "a split tensor lives on a mesh of ranks", "Save x.full() or x.local."
        )


_warned_of_dynamo: list[bool] = []


def _under_dynamo(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    warn_of_dynamo()
    return general[0](func, args, kwargs)


def warn_of_dynamo() -> None:
    """Say once, on the job's first rank, what compiles split tensors."""
    if not _warned_of_dynamo:
        _warned_of_dynamo.append(True)
        leave_own_frames()
        if dist.get_rank() == 0:
            warnings.warn(
                "torch.compile breaks its graph at each op on a split tensor: the numbers are right, and nothing gets "
                "faster; take torch.compile away and pass compile=True to fullframe.parallelize, or "
                "Strategy(compile=True), which compiles the model's repeated blocks",
                stacklevel=4,
            )


_own_frames_left: list[bool] = []


def leave_own_frames() -> None:
    """Once Dynamo is there, it compiles none of our functions, as it would where it has broken a graph around them.

    But those that ask for it (`is_dynamo_compiling`), which then leave all below them.
    """
    if _own_frames_left or "torch._dynamo" not in sys.modules:
        return
    _own_frames_left.append(True)
    for function in objects_of(FunctionType):
        if str(function.__module__).startswith("fullframe."):
            codes = [function.__code__]
            for code in codes:  # with the functions inside
                if is_dynamo_compiling.__name__ not in code.co_names:
                    torch._dynamo.eval_frame.skip_code(code)
                codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _writes_into_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor that is not split is written to, which torch allows an inference tensor in its mode alone."""
    target = kwargs.get("out", args[0] if args and writes(func, kwargs) else None)
    return isinstance(target, Tensor) and not isinstance(target, SpatialTensor)


_left_whole: Any = WeakIdKeyDictionary()


def left_whole(tensor: Tensor) -> Tensor:
    """`tensor`, which never becomes split, whatever is written into it: a shell's own memory, or a model's buffer."""
    _left_whole[tensor] = True
    return tensor


def is_left_whole(tensor: Tensor) -> bool:
    """Whether it was given to `left_whole`."""
    return tensor in _left_whole


def without_class(tensor: Tensor) -> Tensor:
    """`tensor` as torch's own class, where its class only adds to torch's functions: torchvision's, MONAI's images.

    Such a class may change what these functions take or give, and would be asked in the midst of a rule.
    """
    kind = type(tensor)
    if kind is Tensor or kind is Parameter or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    return tensor.as_subclass(Tensor)


def wrap(local: Tensor, spec: Spec) -> Tensor:
    """The shell around `local`, or `local` itself where the spec has no split: what is whole is a plain tensor."""
    return shell_of(local, spec, None) if spec.placements else local


def on_local(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    """`op` of a whole tensor, or of a split one's local part, whose spec it keeps."""
    return wrap(op(local_of(x)), x.spec) if isinstance(x, SpatialTensor) else op(x)


def shell_of(local: Tensor, spec: Spec, view: View | None) -> SpatialTensor:
    """The shell around `local`; whole only for a view whose writes must reach a split base."""
    if local.is_inference():
        with counting():
            local = local.clone()
    if type(local) is not Tensor:
        local = without_class(local)
    trains = local.requires_grad
    shell: SpatialTensor = _make_shell(  # by position, which takes a sixth less time
        SpatialTensor, spec.shape, spec.strides, None, None, local.dtype, torch.strided, local.device, False, trains
    )
    _no_memory(shell)  # that `plain.data = shell` would hand on
    shell._local = local
    shell.spec = spec
    shell._view = view
    if trains and local.is_leaf:
        see_leaf(local, spec)
    return shell


def viewed(base: SpatialTensor, local: Tensor, spec: Spec, replay: Any, put: Any) -> Tensor:
    """The shell of what torch makes a view of `base`; `replay(base)` takes it again, `put(view)` writes it back."""
    if local is base._local:  # all that this rank holds, but not all there is: a view, whose gradient is its own
        local = local.view_as(local)
    shared = share_memory(local, base._local)
    if shared and base._view is None and spec.placements:
        return wrap(local, spec)
    return shell_of(local, spec, View(base, replay, None if shared else put, base._local, version_of(base._local)))


def local_of(shell: SpatialTensor) -> Tensor:
    """The local tensor of a shell that has no graph of its own.

    A shell that went through `autograd.Function.apply` has one: its gradient would bypass the local tensor and be lost.
    A view that had to be copied is taken anew where its base was written since.
    """
    if shell._view is not None:
        shell._view.refresh(shell, local_of(shell._view.base), beside_hooks)
    with _no_torch_function():
        own_graph = _shell_grad_fn(shell)
    if own_graph is not None:
        raise UnsupportedOp(
            type(own_graph).__name__,
            described([shell]),
            module_path(),
            "an autograd.Function was applied to a split tensor and would lose its gradient",
            "Give it the split tensors that it uses as arguments (checkpoint also takes use_reentrant=False); or apply "
            "it to x.local if it is pointwise, or to x.full().",
        )
    return shell._local


def beside_hooks(shell: SpatialTensor) -> SpatialTensor:
    """A shell, or where it is a view the same one anew: taken of the base of all, as torch does after a write."""
    local, view = shell._local, shell._view
    if not local.requires_grad or not torch.is_grad_enabled():
        return shell
    if view is not None:
        local = view.replay(beside_hooks(view.base))
    elif local._is_view() and local._base is not None and local._base.dtype is local.dtype:
        local = local._base.as_strided(local.size(), local.stride(), local.storage_offset())
    return shell if local is shell._local else shell_of(local, shell.spec, view)


def local_or_whole(value: Any) -> Any:
    """The local tensor of a split one; anything else as it is."""
    return local_of(value) if isinstance(value, SpatialTensor) else value


def spec_in(value: Any) -> Spec | None:
    """The spec of a split tensor; None of anything else."""
    return value.spec if isinstance(value, SpatialTensor) else None


def wrapped_as(values: Iterable[Any], specs: Sequence[Spec | None]) -> list[Any]:
    """The split tensors of these specs, of which `values` are the local ones; None and what has no spec as they are."""
    pairs = zip(values, specs, strict=True)
    return [value if value is None or spec is None else wrap(value, spec) for value, spec in pairs]


def whole(value: Any) -> Any:
    """All of a split tensor, on every rank; anything else, as there is on a mesh without a split, as it is."""
    return value.full() if isinstance(value, SpatialTensor) else value


def described(shells: Sequence[SpatialTensor]) -> tuple[str, ...]:
    """Split tensors as an error's message names them."""
    return tuple(repr(shell) for shell in shells)
