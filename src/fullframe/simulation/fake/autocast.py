"""CUDA's autocast policy on CPU tensors, so that a simulation keeps in fp32 what a GPU keeps in fp32.

The CPU's policy is another (layer norm and softmax stay in bf16, say). The kernels that torch runs for CPU tensors
under autocast are replaced by ones that cast as the tables of `torch/include/ATen/autocast_mode.h` say; and what a
program asks or sets for "cuda" is asked or set for "cpu".
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import fallthrough_kernel
from torch.utils._pytree import tree_iter, tree_map_only

from fullframe.simulation.fake.replaced import replaced, replaced_kernels
from fullframe.spatial.expected import forget_expected

LOWER_PRECISION = frozenset({
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention", "cudnn_convolution",
    "cudnn_convolution_transpose",
})  # fmt: skip
FP32 = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
})  # fmt: skip
FP32_RESULT = frozenset({  # asked for a result in fp32, by the argument `dtype` where the caller left it open
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
})  # fmt: skip
FP32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
PROMOTE = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
})  # fmt: skip
BANNED = frozenset({"binary_cross_entropy"})

_CPU_KEY = "AutocastCPU"
_outside_autocast = DispatchKeySet(DispatchKey.AutocastCPU)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside, `torch.autocast("cpu")` casts as `torch.autocast("cuda")` does: in the whole process, on all threads.

    Both names mean the same there.
    """
    try:
        with replaced_kernels(_CPU_KEY, _kernels()), _cuda_meaning_cpu():
            forget_expected()
            yield
    finally:
        forget_expected()


@contextmanager
def _cuda_meaning_cpu() -> Iterator[None]:
    """Inside, `torch.autocast("cuda")`, `custom_fwd`, and torch's functions of that state are those of the CPU."""
    modes = torch.amp.autocast_mode
    init, cast = modes.autocast.__init__, modes._cast
    of_cpu, of_cuda = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")

    def enter(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, _meant(device_type), *args, **kwargs)

    def cast_eligible(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, _meant(device_type), dtype)

    with ExitStack() as parts:
        parts.enter_context(replaced(modes.autocast, "__init__", enter))
        parts.enter_context(replaced(modes, "_cast", cast_eligible))
        for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
            parts.enter_context(replaced(torch, name, _of_cpu(getattr(torch, name))))
        for name in ("get_autocast_gpu_dtype", "set_autocast_gpu_dtype"):
            parts.enter_context(replaced(torch, name, getattr(torch, name.replace("_gpu", ""))))
        torch.set_autocast_dtype("cpu", of_cuda)
        parts.callback(torch.set_autocast_dtype, "cpu", of_cpu)
        yield


def _of_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's `function` of a device's autocast, which is CUDA's where none is named."""

    def of_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device_type" not in kwargs and not (args and isinstance(args[0], str)):
            args = ("cpu", *args)
        return function(*map(_meant, args), **{name: _meant(value) for name, value in kwargs.items()})

    return of_cpu


def _meant(value: Any) -> Any:
    return "cpu" if value == "cuda" else value


def _kernels() -> dict[str, Any]:
    """By operator, what is to run in the place of the CPU's policy; operators this torch does not have are left out."""
    cuda, cpu = _with_kernel("AutocastCUDA"), _with_kernel(_CPU_KEY)
    kernels: dict[str, Any] = {name: fallthrough_kernel for name in cpu - LOWER_PRECISION}
    # What the CPU lowers too stays torch's own, which keeps a weight's copy for its next use.
    kernels |= {name: _casting(_op(name), _lower_dtype) for name in LOWER_PRECISION & cuda - cpu}
    kernels |= {name: _casting(_op(name), lambda _: torch.float32) for name in FP32 & cuda}
    kernels |= {name: _casting(_op(name), _widest) for name in PROMOTE & cuda}
    kernels |= {name: _giving_fp32(_op(name), _op(name)) for name in FP32_RESULT & cuda}
    kernels |= {name: _giving_fp32(_op(name), _op(with_dtype)) for name, with_dtype in FP32_NORM.items()}
    kernels |= {name: _refusing(name) for name in BANNED & cuda}
    return kernels


def _with_kernel(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _casting(op: Any, dtype_of: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(_outside_autocast):
            dtype = dtype_of((args, kwargs))
            args, kwargs = tree_map_only(Tensor, lambda t: t.to(dtype) if _is_cast(t) else t, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _giving_fp32(op: Any, with_dtype: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        with _ExcludeDispatchKeyGuard(_outside_autocast):
            if not _is_cast(args[0]) or given.get("dtype") is not None:
                return op(*args, **kwargs)
            if op in _FROM_HALF and args[0].dtype == torch.float16 and isinstance(args[0], FakeTensor):
                return _FROM_HALF[op](args[0], given["dim"], True)
            return with_dtype(*(given[name] for name in names if name != "dtype"), dtype=torch.float32)

    return kernel


# CUDA reads fp16 and writes fp32 in one kernel, which the CPU has not but for fake tensors.
_FROM_HALF = {_op("softmax.int"): _op("_softmax"), _op("log_softmax.int"): _op("_log_softmax")}


def _refusing(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} is refused under CUDA's autocast: its fp16 values are unsafe; use the logits' form")

    return kernel


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _lower_dtype(_: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(tree: Any) -> torch.dtype:
    found = {t.dtype for t in tree_iter(tree) if isinstance(t, Tensor) and _is_cast(t)}
    return torch.float32 if torch.float32 in found else _lower_dtype(tree)
