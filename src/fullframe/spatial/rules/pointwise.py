"""Functions that treat every element alike: local parts in, local part out, nothing is sent.

Operands that are cut elsewhere (a slice, a shifted or upsampled map) are brought to the same boundaries by one fetch.
Facts about the shell (shape, dtype, ...) are answered here too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from fullframe.spatial.gradients import enters
from fullframe.spatial.operands import aligned, merged
from fullframe.spatial.rules.registry import IN_PLACE_OPERATORS, QUICK, RULES, Unsupported, getter, rule, writes
from fullframe.spatial.rules.unsupported import INTO_WHOLE
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, shell_of, wrap
from fullframe.spatial.views import View, count_write, version_of

_UNARY = """
    abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil cos cosh
    deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 isfinite isinf isnan isneginf isposinf isreal
    lgamma log log10 log1p log2 logical_not logit mvlgamma nan_to_num neg negative positive rad2deg reciprocal relu
    round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc real imag angle conj resolve_conj
    resolve_neg conj_physical
    gcd lcm igamma igammac polygamma
"""
_BINARY = """
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2 arctan2
    maximum minimum fmax fmin hypot logaddexp logaddexp2 copysign nextafter ldexp xlogy heaviside
    eq ne lt le gt ge greater greater_equal less less_equal not_equal isclose
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    complex polar lerp addcmul addcdiv clamp clip clamp_min clamp_max masked_fill rsub
"""
_SPECIAL = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
    chebyshev_polynomial_w entr erfcx expit gammainc gammaincc gammaln hermite_polynomial_h hermite_polynomial_he i0e i1
    i1e laguerre_polynomial_l legendre_polynomial_p log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
    modified_bessel_k1 multigammaln ndtr ndtri polygamma psi scaled_modified_bessel_k0 scaled_modified_bessel_k1
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w spherical_bessel_j0 xlog1py zeta
"""
_METHODS = """
    hardshrink
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__
    __rlshift__ __rshift__ __rrshift__ __neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    float double half bfloat16 int long short byte char bool clone detach
    zero_ fill_ copy_
"""
_FUNCTIONAL = """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid silu
    softplus softshrink softsign tanh tanhshrink threshold elu_ celu_ hardtanh_ leaky_relu_ relu_ selu_ threshold_
"""
_TORCH = """
    fill fill_ zero_ zeros_like ones_like full_like empty_like clone detach threshold threshold_ celu selu celu_ selu_
    relu_
"""
_METADATA = """
    shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_quantized itemsize nbytes
    names is_mkldnn is_xpu is_mps is_nested
"""
_METADATA_METHODS = """
    size dim ndimension numel nelement is_floating_point is_complex is_signed is_contiguous element_size get_device
    __len__ is_same_size is_pinned dense_dim is_inference is_conj is_neg
"""


def _named(owner: Any, names: str) -> set[Any]:
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


def _functions() -> set[Any]:
    maths = " ".join(f"{name} {name}_" for name in (_UNARY + _BINARY).split())
    owned = [(torch, maths), (Tensor, maths), (torch.special, maths), (Tensor, _METHODS), (F, _FUNCTIONAL)]
    owned += [(torch, _TORCH), (torch.special, _SPECIAL), (Tensor, " ".join(IN_PLACE_OPERATORS))]
    found = set().union(*(_named(owner, names) for owner, names in owned))
    return {f for f in found if callable(f)} | {getter("real"), getter("imag")}


def _quick(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """The common cases in a few microseconds: operands cut alike, none of them a copied view; else NotImplemented."""
    count = len(args)
    if not 1 <= count <= 2:
        return NotImplemented
    first = args[0]
    if type(first) is not SpatialTensor or first._view is not None:
        return NotImplemented
    if kwargs:
        if _holds_tensor(kwargs) or not kwargs.keys().isdisjoint(_FORMATS):
            return NotImplemented
        if count == 1:
            return _result(func(local_of(first), **kwargs), first)
    elif count == 1:
        return _result(func(local_of(first)), first)
    spec, second = first.spec, args[1]
    if type(second) is SpatialTensor:
        if second.spec is not spec or second._view is not None:
            return NotImplemented
        second = local_of(second)
    elif isinstance(second, Tensor):
        if (second.requires_grad and enters(second)) or not _rides_along(second, spec):
            return NotImplemented
    elif type(second) not in _NUMBERS:
        return NotImplemented
    return _result(func(local_of(first), second, **kwargs) if kwargs else func(local_of(first), second), first)


_FORMATS = frozenset(("memory_format", "axis", "keepdims", "input", "x1", "x2"))
_NUMBERS = frozenset((int, float, bool, complex, str, torch.dtype))
_DETACHED = {torch.detach, Tensor.detach}
_OTHER_VIEWS = {torch.real, torch.imag, torch.conj, Tensor.conj, getter("real"), getter("imag")}


def _quick_detached(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """The same memory, gaps between its strides included, which an elementwise result has not."""
    first = args[0] if args else None
    if type(first) is not SpatialTensor or first._view is not None:
        return NotImplemented
    return shell_of(func(local_of(first)), first.spec, None)


QUICK.update(dict.fromkeys(_functions() - _OTHER_VIEWS, _quick) | dict.fromkeys(_DETACHED, _quick_detached))


@rule(getter("data"))
def _data(func: Any, x: SpatialTensor) -> Tensor:
    """The same memory with a count of writes of its own, so they are counted for copied views by hand."""
    local = local_of(x)
    view = View(x, lambda base: func(local_of(base)), lambda data: count_write(data._local), local, version_of(local))
    return shell_of(func(local), x.spec, view)


@rule(*_functions())
def pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply `func` to the local parts; an in-place function returns the operand it changed."""
    spec = merged([leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)])
    if any(type(a).__name__ == "ndarray" for a in args):
        raise Unsupported("an operand is an array of numpy", "Make a tensor of it: torch.from_numpy(...).")
    target = args[0] if writes(func, kwargs) else None
    if target is not None and (not isinstance(target, SpatialTensor) or target.spec.shape != spec.shape):
        raise Unsupported("it writes a split result into a smaller or whole tensor", INTO_WHOLE)
    if target is not None:
        spec = target.spec
    local_args, kwargs = tree_map_only(Tensor, lambda t: aligned(t, spec), (args, kwargs))
    result = func(*local_args, **kwargs)
    if result is NotImplemented:  # x == None: Python asks the other operand
        return NotImplemented
    if type(args[0]) is SpatialTensor and (target is not None or result is args[0]._local):
        return _result(result, args[0])
    return wrap(result, spec.elementwise)


def _holds_tensor(kwargs: dict[str, Any]) -> bool:
    for value in kwargs.values():  # noqa: SIM110  a generator costs more than all else here
        if isinstance(value, Tensor):
            return True
    return False


def _rides_along(whole: Tensor, spec: Spec) -> bool:
    """Whether a whole operand (a scalar, a bias) broadcasts against the local part as it is."""
    shape, target = whole.shape, spec.shape
    offset = len(target) - len(shape)
    if offset < 0 or any(size not in (1, target[dim + offset]) for dim, size in enumerate(shape)):
        return False
    return all(p.dim < offset or shape[p.dim - offset] == 1 for p in spec.placements)


def _result(result: Any, operand: SpatialTensor) -> Any:
    """The shell around `result`; `operand` itself where the function worked in place on it."""
    if result is NotImplemented:
        return NotImplemented
    if result is not operand._local:
        return shell_of(result, operand.spec.elementwise, None)
    with torch._C.DisableTorchFunctionSubclass():
        if operand.requires_grad != result.requires_grad:  # keep the mirror by which lost gradients are found
            operand.requires_grad_(result.requires_grad)
    return operand


@rule(
    *(getter(name) for name in _METADATA.split() if hasattr(Tensor, name)),
    *_named(Tensor, _METADATA_METHODS),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.is_same_size,
    *_named(torch, "get_device is_conj is_inference is_neg is_signed"),
    torch.result_type,
    *_named(Tensor, "stride dim_order"),
    checked=False,
)
def _of_the_shell(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What the global shape, strides, dtype and device answer: sizes, counts, kinds."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _quick_of_the_shell(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs) if kwargs else func(*args)


QUICK.update({func: _quick_of_the_shell for func, found in RULES.items() if found is _of_the_shell})


@rule(Tensor.contiguous)
def _contiguous(func: Any, x: SpatialTensor, memory_format: Any = torch.contiguous_format) -> Tensor:
    """The tensor itself where the whole would be it; how the local part lies is nobody's concern."""
    with torch._C.DisableTorchFunctionSubclass():
        already = x.is_contiguous(memory_format=memory_format)
    if already:
        return x
    local = local_of(x)
    made = local.contiguous(memory_format=memory_format)
    return wrap(made if made is not local else local.clone(), x.spec)


@rule(getter("is_leaf"), getter("requires_grad"), Tensor.type, Tensor.record_stream, checked=False)
def _of_the_local(func: Any, x: SpatialTensor, *args: Any) -> Any:
    """What only the local tensor can answer, as it holds the autograd graph."""
    result = func(local_of(x), *args)
    return wrap(result, x.spec) if isinstance(result, Tensor) else result


@rule(Tensor.to, Tensor.type_as, *_named(Tensor, "cpu cuda pin_memory"), checked=False)
def _converted(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Only dtype and device are taken of another tensor, split or not."""
    args, kwargs = tree_map_only(SpatialTensor, local_of, (args, kwargs))
    if not isinstance(x, SpatialTensor):
        return func(x, *args, **kwargs)  # type: ignore[no-any-return]
    local, wanted = local_of(x), kwargs.get("memory_format", torch.preserve_format)
    made = func(local, *args, **kwargs)
    if made is local:
        return x
    if wanted is torch.preserve_format:
        return wrap(made, x.spec.elementwise)
    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        strides = torch.empty(x.spec.shape, device="meta", memory_format=wanted).stride()
    return wrap(made, x.spec.strided(None if wanted is torch.contiguous_format else strides))


@rule(Tensor.detach_, checked=False)
def _of_itself(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
    """Taken out of the graph in place."""
    return _result(func(local_of(x), *args, **kwargs), x)


@rule(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(func: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The weight is one number or one a channel; refuses a split weight."""
    if isinstance(weight, SpatialTensor) or not isinstance(x, SpatialTensor):
        raise Unsupported("the weight is split")
    if weight.numel() > 1:
        channels = x.spec.held(1)
        weight = weight.narrow(0, channels.start, len(channels))
    return wrap(func(local_of(x), weight), x.spec)
