"""What torch hands to no `__torch_function__`, made to do so: `Function.apply`, TorchScript, checkpoints, `Variable`.

The first would see a shell without a graph: a plain result would backpropagate into the shell, and be lost. A user's
own runs on split tensors instead (`users_function.py`), and the reentrant checkpoint as the other one. The second runs
its ops where no rule sees them; the Python function that `torch.jit.script` was given runs instead. The third keeps
local tensors, which hooks on saved tensors know, with their versions. The fourth is how older programs write `detach`.
Importing this module puts the guards in place.
"""

import inspect
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint, set_checkpoint_early_stop

from fullframe.errors import UnsupportedOp
from fullframe.spatial.dispatch import with_whole_views
from fullframe.spatial.fallback import plain, settle_written, unsupported
from fullframe.spatial.module_hooks import BackwardHookFunction
from fullframe.spatial.operands import shells_in
from fullframe.spatial.tensor import SpatialTensor, local_or_whole, spec_in, wrapped_as
from fullframe.spatial.users_function import NO_SETUP, OWN_KERNEL, composed, obstacle_in
from fullframe.spatial.views import version_of

# FSDP2 passes the inputs of a module through it, to learn in backward that the module's gradients are complete.
_FSDP_IDENTITY = ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "RegisterPostBackwardFunction")

# With it `torch.utils.checkpoint` keeps what a block is to be run again with, up to torch 2.12.
_KEEPS_INPUTS = ("torch.utils.checkpoint", "_NoopSaveInputs")

_apply_of_class: Any = torch.autograd.Function.__dict__["apply"]
apply_function = getattr(_apply_of_class, "__func__", _apply_of_class)  # Python's class method; from torch 2.14 on C's


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    if SpatialTensor not in map(type, (*args, *kwargs.values())):
        return apply_function(function, *args, **kwargs)
    if function.setup_context is not NO_SETUP:  # torch gives such a function all it takes, by its place
        given = inspect.signature(function.forward).bind(*args, **kwargs)
        given.apply_defaults()
        args, kwargs = given.args, given.kwargs
    if kwargs:  # torch refuses them
        return apply_function(function, *args, **kwargs)
    if (function.__module__, function.__name__) == _FSDP_IDENTITY:
        return _apply_to_locals(function, args)
    if (function.__module__, function.__name__) == _KEEPS_INPUTS:
        return _kept_locals(function, args)
    is_users = not function.__module__.startswith(("torch.", "fullframe."))
    if not any(arg.spec.placements for arg in args if type(arg) is SpatialTensor):
        if is_users:
            return with_whole_views(function.apply, args, {}, [], None)
        return apply_function(function, *map(plain, args))
    views = {arg: version_of(arg._local) for arg in args if type(arg) is SpatialTensor and not arg.spec.placements}
    args = tuple(map(plain, args))
    if function is torch.nn.modules._functions.BackwardHookFunction:
        return _hooked(args)
    if function is CheckpointFunction:
        return _run_again_later(*args)
    if not is_users:
        return _refused(function, args, "an autograd.Function would lose a split gradient")
    obstacle = obstacle_in(function)
    if obstacle is not None:
        return _refused(function, args, obstacle)
    try:
        result = composed(function, args)
        settle_written(function.apply, views)
        return result
    except UnsupportedOp:
        if not any(arg.spec.gather for arg in args if type(arg) is SpatialTensor):
            raise
        return _refused(function, args, "it holds a function that no rule can see")
    except RuntimeError as error:
        if "data pointer" not in str(error):
            raise
        return _refused(function, args, OWN_KERNEL)


def _refused(function: Any, args: tuple[Any, ...], reason: str) -> Any:
    fix = "Apply it to x.local if it is pointwise, or to x.full(); parallelize(..., unsupported='gather') does that."
    return unsupported(function.apply, args, {}, reason, fix)


def _apply_to_locals(identity: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """A function that returns its tensors as they are, applied to the local ones."""
    specs = [spec_in(arg) for arg in args if isinstance(arg, Tensor)]
    return tuple(wrapped_as(apply_function(identity, *map(local_or_whole, args)), specs))


def _kept_locals(keeper: Any, args: tuple[Any, ...]) -> Tensor:
    """The first argument is the keeper's own, its node gives back the others."""
    specs = list(map(spec_in, args[1:]))
    result: Tensor = apply_function(keeper, *map(local_or_whole, args))
    node: Any = result.grad_fn
    if node is not None:
        kept = node.get_args
        node.get_args = lambda saved: wrapped_as(kept(saved), specs)
    return result


def _save_inputs(frame: Any, *args: Any) -> None:
    """What a checkpoint keeps, from torch 2.13 on."""
    frame.specs = list(map(spec_in, args))
    _save_plain_inputs(frame, *map(local_or_whole, args))


def _inputs_of(frame: Any) -> list[Any]:
    return wrapped_as(_plain_inputs_of(frame), frame.specs)


def _run_again_later(run: Any, preserve_random_state: bool, *args: Any) -> Any:
    """The reentrant checkpoint, as the other one: there too the second run is a whole one, and nothing is compared.

    As there, what `run` holds gets no gradient where no argument wants one.
    """
    if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        with torch.no_grad():
            return run(*args)
    with set_checkpoint_early_stop(False):
        return checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=preserve_random_state, determinism_check="none"
        )


def _hooked(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What enters or leaves a module with full backward hooks, as torch's own function hands it on."""
    results = _apply_to_locals(BackwardHookFunction, args)
    node: Any = next(local_or_whole(result).grad_fn for result in results if result.requires_grad)
    node.specs = tuple(map(spec_in, results))
    return results


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    if next(shells_in(args, kwargs), None) is None:
        return _call_compiled(function, *args, **kwargs)
    facts = function.__dict__
    if facts.get("__name__") == "ScriptFunction":  # of `script`; what `trace` has seen may be less than the function
        return facts["_torchdynamo_inline"](*args, **kwargs)
    reason = "torch.jit.trace compiled it, and no rule can see its ops"
    return unsupported(function, args, kwargs, reason, "Call the function that torch.jit.trace was given.")


def _variable(kind: Any, *args: Any, **kwargs: Any) -> Any:
    split = next(shells_in(args, kwargs), None)
    if split is None:
        return type.__call__(kind, *args, **kwargs)
    # What else it is given, torch reads itself, of a tensor without elements.
    empty = torch.empty(0, dtype=split.dtype)
    args = tuple(empty if arg is split else arg for arg in args)
    kwargs = {name: empty if value is split else value for name, value in kwargs.items()}
    return split.detach().requires_grad_(type.__call__(kind, *args, **kwargs).requires_grad)


_frame: Any = torch.utils.checkpoint._CheckpointFrame
if hasattr(_frame, "save_inputs"):
    _save_plain_inputs, _plain_inputs_of = _frame.save_inputs, _frame.get_inputs
    _frame.save_inputs, _frame.get_inputs = _save_inputs, _inputs_of
_call_compiled = torch.jit.ScriptFunction.__call__
torch.jit.ScriptFunction.__call__ = _call  # type: ignore[assignment,method-assign]
torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment,method-assign]
type(torch.autograd.Variable).__call__ = _variable  # type: ignore[assignment]
