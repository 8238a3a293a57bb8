"""Values for ops on hollow GPUs. Each op's CUDA kernel runs first: its checks, what it allocates, launches of nothing.

Then the CPU's kernel computes on the same memory. Some are not called at all, as they would read what nobody computed,
compile kernels, or call libraries that are hollow, too: the CPU's result is then copied to where CUDA's would lie.
"""

import ctypes
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_HALF = (torch.float16, torch.bfloat16)
_SMALL = 1 << 16  # elements of all operands of an op that has values with HOLLOW_VALUES=small
# They run as they are: views, memory, what a stream is told.
_AS_THEY_ARE = {
    "as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex", "alias", "empty.memory_format",
    "empty_strided", "resize_", "set_", "set_.source_Storage_storage_offset", "set_.source_Tensor",
    "set_.source_Storage", "record_stream", "is_pinned", "_pin_memory", "is_set_to", "_nested_tensor_size",
}  # fmt: skip
_CHOSEN_BELOW = {"convolution_backward", "copy_"}  # whose one kernel for all devices calls CUDA's without dispatch
# Beginnings of names of those that are not called.
_BY_VALUES = ("nonzero", "equal", "_local_scalar")  # also where another op's kernel calls them
_NOT_CALLED = (
    *_BY_VALUES, "cudnn_", "convolution_overrideable", "convolution_backward", "_conv_depthwise2d", "conv_depthwise3d",
    "slow_conv", "_slow_conv", "_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn",
    "_thnn_fused", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc",
    "fake_quantize", "_fake_quantize", "_make_per", "linalg_", "_linalg", "_fft", "_cdist", "ormqr", "geqrf",
    "cholesky", "triangular_solve", "lstsq", "svd", "mode", "kthvalue", "_int_mm", "repeat_interleave.Tensor",
    "_segment", "multinomial", "bernoulli", "special_", "prod", "i0", "sinc", "gcd", "lcm", "polygamma", "zeta",
    "pow.Scalar", "erfinv", "lgamma", "digamma", "igamma", "logit", "mvlgamma", "_fused_adam", "_fused_sgd",
    "_assert_async", "isin", "searchsorted", "bucketize",
)  # fmt: skip
_NOT_CALLED_IN_PLACE = ("_fused", "_assert", "bernoulli")  # of those that write; others are called all the same
_libraries: list[Any] = []
_thread = threading.local()
draws_as_cpu = False  # without a generator of their own, for tests whose numbers are those of the CPU


def install() -> None:
    """From now on ops on GPUs have values in this process, where its torch was built for CUDA."""
    if not torch.version.cuda:
        return
    _libraries.append(torch.library.Library("aten", "IMPL"))
    small = os.environ.get("HOLLOW_VALUES") == "small"
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        own = name in _CHOSEN_BELOW or torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA")
        if name == full or name in _AS_THEY_ARE or not own:
            continue
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kernel = Kernel(name, op, torch.library.get_kernel(op, "CUDA"), small)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one
            _libraries[-1].impl(name, kernel.run, "CUDA", with_keyset=True, allow_override=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _libraries[-1].impl("mm", _sparse_product, "SparseCsrCUDA", allow_override=True)


class Kernel:
    """CUDA's kernel of an op, and values for it."""

    def __init__(self, name: str, op: Any, cuda: Any, small: bool):
        arguments = op._schema.arguments
        self._name, self._op, self._cuda, self._small = name, op, cuda, small
        self._names = [a.name for a in arguments]
        self._defaults = [a.default_value for a in arguments]
        self._by_name = [a.kwarg_only for a in arguments]
        self._of_tensors = [str(a.type) == "Tensor" for a in arguments]
        self._written = [n for n, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self._by_values, self._draws = name.startswith(_BY_VALUES), torch.Tag.nondeterministic_seeded in op.tags
        self._called = not name.startswith(_NOT_CALLED) or (
            bool(self._written) and not name.startswith(_NOT_CALLED_IN_PLACE)
        )

    def run(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """What torch calls."""
        given = [
            *args,
            *(kwargs.get(n, d) for n, d in list(zip(self._names, self._defaults, strict=True))[len(args) :]),
        ]
        inside = getattr(_thread, "inside", False)  # of an op whose values are computed when its kernel is done
        large = self._small and sum(t.numel() for t in tree_leaves(given) if isinstance(t, Tensor)) > _SMALL
        if (self._called and (inside or large)) or (inside and not self._by_values):
            return self._on_cuda(keys, args, kwargs)
        _thread.inside = True
        try:
            with torch.no_grad(), _drawing(given) if self._draws else nullcontext():
                return self._with_values(keys, args, kwargs, given, large)
        finally:
            _thread.inside = inside

    def _on_cuda(self, keys: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._cuda.call_boxed(keys, *self._tensors_for_numbers(args), **kwargs)

    def _with_values(self, keys: Any, args: Any, kwargs: Any, given: list[Any], large: bool) -> Any:
        written = [t for n in self._written for t in tree_leaves(given[n]) if isinstance(t, Tensor) and t.is_cuda]
        result = None
        if self._called:
            before = [on_host(t).clone() for t in written]
            result = self._on_cuda(keys, args, kwargs)
            for t, kept in zip(written, before, strict=True):
                if t.shape == kept.shape:  # else it was made longer, for the result
                    on_host(t).copy_(kept)
        elif large and self._written:
            return None
        shapes_alone = large and not self._by_values
        values = self._on_host(tree_map_only(object, lambda leaf: _of_host(leaf, shapes_alone), given))
        for t in written if self._small else ():
            _make_finite(t)
        if self._written:
            return result if self._called or not self._op._schema.returns else given[self._written[0]]
        if not self._called:
            return tree_map_only(Tensor, lambda t: _moved(t, given), values)
        for there, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
            if isinstance(there, Tensor) and there.is_cuda and there.numel() and value.numel():
                on_host(there).copy_(value)
                if self._small:
                    _make_finite(there)
        return result

    def _on_host(self, given: list[Any]) -> Any:
        from tests.hollow_gpu.stand_ins import STAND_INS

        args = self._tensors_for_numbers([g for g, by_name in zip(given, self._by_name, strict=True) if not by_name])
        kwargs = {n: g for n, g, by_name in zip(self._names, given, self._by_name, strict=True) if by_name}
        stand_in = None if self._written else STAND_INS.get(self._name.partition(".")[0])
        if stand_in is not None:
            return stand_in(*args, **kwargs)
        try:
            return self._op(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # the CPU has it not for 16 bit
            if self._written or not any(isinstance(t, Tensor) and t.dtype in _HALF for t in tree_leaves(args)):
                raise
            return self._op(*tree_map_only(Tensor, wide, args), **kwargs)

    def _tensors_for_numbers(self, args: Sequence[Any]) -> Sequence[Any]:
        """Numbers in a tensor's place, which reach Python as such, are tensors again, and promote as they did."""
        numbers = [t and isinstance(a, (int, float, complex)) for t, a in zip(self._of_tensors, args, strict=False)]
        if not any(numbers):
            return args
        other = next((t for t in args if isinstance(t, Tensor)), torch.empty(()))

        def tensor(number: Any) -> Tensor:
            exact = other.dim() and other.is_floating_point() and not isinstance(number, complex)
            return torch.tensor(number, dtype=torch.float64 if exact else torch.result_type(other, number))

        return [tensor(a) if is_number else a for is_number, a in zip(numbers, args, strict=False)]


@contextmanager
def _drawing(given: list[Any]) -> Iterator[None]:
    """The CPU's kernel draws by where the GPU's generator stands, which goes on; the CPU's is left alone."""
    leaves = tree_leaves(given)
    own = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    if own is None and not draws_as_cpu:
        devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda)
        own = torch.cuda.default_generators[next(devices, torch.device("cuda", torch.cuda.current_device())).index]
    if own is None or own.device.type == "cpu":  # which CUDA's kernel refuses
        yield
        return
    before, offset = torch.get_rng_state(), own.get_offset()
    torch.default_generator.manual_seed(hash((own.initial_seed(), offset)) % (1 << 63))
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if own.get_offset() == offset:  # where CUDA's kernel was not called
            own.set_offset(offset + 4)


def wide(t: Tensor) -> Tensor:
    """16-bit numbers in fp32."""
    return t.float() if t.dtype in _HALF else t


def on_host(t: Tensor) -> Tensor:
    """A GPU's tensor as the CPU's, in the same memory."""
    if not t.is_cuda:
        return t
    storage = t.untyped_storage()
    if not storage.nbytes() or not t.numel():
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    same = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    here = torch.empty(0, dtype=t.dtype, device="cpu").set_(same, t.storage_offset(), t.size(), t.stride())
    here = here.conj() if t.is_conj() else here
    return here._neg_view() if t.is_neg() else here


def _of_host(value: Any, shapes_alone: bool) -> Any:
    if isinstance(value, Tensor):
        if shapes_alone:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return on_host(value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _moved(value: Tensor, given: list[Any]) -> Tensor:
    device = next((t.device for t in tree_leaves(given) if isinstance(t, Tensor) and t.is_cuda), torch.device("cuda"))
    there = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if not value.is_meta:
        on_host(there).copy_(value)
    return there


def _sparse_product(a: Tensor, b: Tensor) -> Tensor:
    """Of a compressed matrix and a dense one, which cuSPARSE computes."""
    parts = (on_host(t) for t in (a.crow_indices(), a.col_indices(), a.values()))
    return _moved(torch.sparse_csr_tensor(*parts, a.shape, check_invariants=False) @ on_host(b), [b])


def _make_finite(t: Tensor) -> None:
    """Of what was computed from memory that nobody filled."""
    if t.is_floating_point():
        on_host(t).nan_to_num_(0, 1, -1)
