"""Parts of torch that it does not promise to keep: a torch without one is told when a mesh is made, not in a step."""

from functools import reduce

import torch

from fullframe.errors import MeshError
from fullframe.wording import first_of

TESTED = ("2.11", "2.15")  # the first and the last torch that the tests were run with
PARTS = [
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.DispatchKey.ADInplaceOrView",
    "torch._C.DispatchKeySet",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._DisableAutocast",
    "torch._C._DisableTorchDispatch",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._TorchDispatchModeKey.FAKE",
    "torch._C._VariableFunctions",
    "torch._C._are_functorch_transforms_active",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._saved_tensors_hooks_is_enabled",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_key_for_device",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._get_dispatch_mode",
    "torch._C._is_alias_of",
    "torch._C._is_any_autocast_enabled",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._nn",
    "torch._C._nn.max_unpool2d",
    "torch._C._nn.max_unpool3d",
    "torch._C._nn.pad_sequence",
    "torch._C._set_throw_on_mutable_data_ptr",
    "torch._C._storage_Use_Count",
    "torch._C._will_engine_execute_node",
    "torch._assert_async",
    "torch._check",
    "torch._fake_quantize_learnable_per_channel_affine",
    "torch._fake_quantize_learnable_per_tensor_affine",
    "torch._foreach_copy_",
    "torch._foreach_lerp_",
    "torch._foreach_mul_",
    "torch._is_all_true",
    "torch._is_any_true",
    "torch._nested_tensor_from_mask_left_aligned",
    "torch._shape_as_tensor",
    "torch.autograd.Variable._execution_engine",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd._engine_run_backward",
    "torch.autograd._unsafe_preserve_version_counter",
    "torch.library._register_effectful_op",
    "torch.ops.aten._assert_tensor_metadata",
    "torch.ops.aten._local_scalar_dense.default",
    "torch.ops.aten._to_copy.default",
    "torch.ops.aten._unsafe_view",
    "torch.ops.aten.convolution_backward.default._op",
]


def require_parts() -> None:
    """Raises MeshError where this torch has not all that a step may ask for."""
    missing = [name for name in PARTS if not _is_there(name)]
    if missing:
        raise MeshError(
            f"torch {torch.__version__} has no {first_of(missing)}, which fullframe calls; it was tested with torch "
            f"{TESTED[0]} to {TESTED[1]}: install one of those, or a newer fullframe"
        )


def _is_there(name: str) -> bool:
    try:
        reduce(getattr, name.split(".")[1:], torch)
    except (AttributeError, RuntimeError):  # the second of an operator
        return False
    return True
