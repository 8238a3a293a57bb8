"""What inductor asks of a GPU, answered where there is none: then it writes the program that it would on one."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx
import torch.utils._triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fullframe.simulation.devices.table import Device
from fullframe.simulation.fake.replaced import replaced

_GPU = torch.device("cuda", 0)


class _Properties:
    """Of a data centre's GPU, by whether it has bf16: they decide how reductions are cut, not what is fused."""

    regs_per_multiprocessor = 65536
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    warp_size = 32
    gcnArchName = ""  # of AMD's

    def __init__(self, device: Device):
        self.major, self.minor = (8, 0) if device.has_bf16 else (7, 0)
        self.multi_processor_count = 108 if device.has_bf16 else 80
        self.total_memory, self.name = device.memory_bytes, device.name


class _Copies(TorchFunctionMode):
    """`Tensor.copy_` itself asks for the GPU of a fake tensor, where the op does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.ops.aten.copy_.default if func is Tensor.copy_ else func
        return func(*args, **(kwargs or {}))


@contextmanager
def as_if_on_cuda(device: Device) -> Iterator[None]:
    """Inside, inductor takes this machine for one with such a GPU; as it is, where the device or this machine has one.

    Nothing of it can be compiled or run.
    """
    with ExitStack() as stack:
        if device.is_cuda and not torch.cuda.is_available():
            has = _Properties(device)
            hints = DeviceProperties(
                type="cuda", index=0, cc=10 * has.major + has.minor, major=has.major,
                **{name: getattr(has, name) for name in (
                    "multi_processor_count", "regs_per_multiprocessor", "max_threads_per_multi_processor",
                    "max_threads_per_block", "warp_size")},
            )  # fmt: skip
            for owner, name, value in (
                (torch.cuda, "get_device_properties", lambda *_: has),
                (torch.cuda, "get_device_capability", lambda *_: (has.major, has.minor)),
                (torch.cuda, "current_device", lambda: 0),
                (CudaInterface, "get_device_properties", lambda *_: has),
                (CudaInterface, "is_bf16_supported", lambda *_, **__: device.has_bf16),
                (DeviceProperties, "create", lambda *_: hints),
                (scheduler, "has_triton", lambda: True),
                (torch.utils._triton, "triton_hash_with_backend", lambda: ""),
            ):
                stack.enter_context(replaced(owner, name, value))
            stack.enter_context(_Copies())
        yield


def on_cuda(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs as on a GPU; what is told of each node of the graph, and where it makes tensors, is changed likewise.

    Tensors that are in the graph stay where they are.
    """
    for node in graph.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, _moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _moved)
        if "val" in node.meta:
            node.meta["val"] = tree_map(_moved, node.meta["val"])
    graph.recompile()
    return [_moved(value) for value in inputs]


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _GPU
    if not isinstance(value, FakeTensor):
        return value
    with torch._C._DisableTorchDispatch():
        meta: Tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, _GPU)
