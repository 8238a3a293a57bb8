"""A graph as inductor would compile it, run on fake tensors: its order, its buffers, its kernels; none is compiled.

Inductor writes a program in Python that allocates, calls kernels and frees. That text is run as it stands, with
kernels that only tell the clock what they would read and write.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._inductor import cpu_vec_isa
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.select_algorithm import extern_kernels

from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.compiled.cuda_like import as_if_on_cuda, on_cuda
from fullframe.simulation.compiled.kernels import bytes_of_kernel, kernels_noted
from fullframe.simulation.fake.replaced import replaced

# Nothing of it is to be run by a real step, nor to be tried out with a C++ compiler.
SETTINGS = {"force_disable_caches": True, "graph_partition": False, "cpp.vec_isa_ok": True}
_VECTORS = cpu_vec_isa.VecAVX2()  # of no consequence for what is fused
_CALL, _END = "\ndef call(args):", "\n\n\ndef "
_ASSERTIONS = ("assert_size_stride", "assert_alignment", "assert_size_stride_grouped", "assert_tensor_metadata")
_COPIES = ("copy_if_misaligned", "copy_misaligned")  # torch 2.13's name and torch 2.12's


class Lowering:
    """The compiler of graphs that `compile_fx` calls, forward or backward, for the device of `clock`."""

    def __init__(self, clock: StepClock):
        self._clock = clock

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """What runs the graph's program; raises what inductor raises."""
        written: list[Callable[[list[Any]], Any]] = []
        device = self._clock.device
        if device.is_cuda:
            inputs = on_cuda(graph, inputs)
        with as_if_on_cuda(device), kernels_noted() as nodes:

            def to_module(lowered: GraphLowering) -> Any:
                text = lowered.codegen()[0].value
                kernels = {name: Kernel(self._clock, bytes_of_kernel(of, lowered)) for name, of in nodes.items()}
                written.append(_call_of(text, kernels | lowered.constants))
                return SimpleNamespace(call=written[-1], __file__="", __name__="", runner=None)

            vectors = replaced(cpu_vec_isa, "pick_vec_isa", lambda: _VECTORS)
            with vectors, replaced(GraphLowering, "compile_to_module", to_module):
                compile_fx_inner(graph, inputs, **options)
        call, clock = written[0], self._clock

        def run(args: list[Any]) -> Any:
            with clock.in_program():
                return call(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


class Kernel:
    """Takes the time that reading and writing so many bytes takes; called as a kernel in C++ or in Triton."""

    def __init__(self, clock: StepClock, bytes: int):
        self._clock, self.bytes = clock, bytes

    def __call__(self, *args: Any) -> None:
        self._clock.fused(self.bytes)

    def run(self, *args: Any, stream: Any) -> None:
        """In Triton."""
        self._clock.fused(self.bytes)


class _Torch:
    """`torch` without a GPU to choose."""

    cuda = SimpleNamespace(_DeviceGuard=lambda index: torch.autograd.profiler.record_function(""), set_device=int)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _viewed(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _call_of(text: str, names: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """The function `call` of a program's text."""
    begin = text.index(_CALL)
    known = {
        "torch": _Torch(),
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "device": lambda *args, **kwargs: torch.device("cpu"),  # of all fake tensors
        "inf": math.inf,
        "nan": math.nan,
        "extern_kernels": extern_kernels,
        "empty_strided_cpu": _empty,
        "empty_strided_cuda": _empty,
        "reinterpret_tensor": _viewed,
        **dict.fromkeys(_ASSERTIONS, lambda *args: None),
        **dict.fromkeys(_COPIES, lambda tensor: tensor),
        "get_raw_stream": lambda index: 0,
        **names,
    }
    exec(compile(text[begin : text.index(_END, begin)], "<a compiled program, simulated>", "exec"), known)
    call: Callable[[list[Any]], Any] = known["call"]
    return call
