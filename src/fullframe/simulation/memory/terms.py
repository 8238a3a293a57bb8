"""What a GPU holds beside the program's tensors, each under a name, none fitted to a measured total.

context            the driver's, with the kernels' code: of the device's table; on the CPU the process without tensors
nccl               buffers of each communicator that was used
cublas_workspace   torch takes one where matrices are multiplied first, and keeps it
cudnn_workspace    while an op runs: copies in the spec that tensor cores want, where maps are not channels_last; what
                   torch's own kernels take for themselves
ddp_buckets        the gradients' place in DDP, taken at the start and kept between steps
prefetched_batch   the next batch, copied while this one is computed on
caching_allocator  what torch's allocator holds and does not use at the peak
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from fullframe.simulation.clock.ops import is_channels_last
from fullframe.simulation.devices.table import Device
from fullframe.simulation.memory.cuda_scratch import cuda_scratch
from fullframe.simulation.memory.scratch import cpu_scratch

TERMS = (
    "context",
    "nccl",
    "cublas_workspace",
    "cudnn_workspace",
    "ddp_buckets",
    "prefetched_batch",
    "caching_allocator",
)

_aten = torch.ops.aten
_MIB = 2**20
_CUBLAS_BYTES = 8_519_680  # CUBLAS_WORKSPACE_CONFIG's default, :4096:2:16:8; pytorch issue 95668
_CUBLAS_BYTES_HOPPER = 32 * _MIB  # pytorch PR 89027
# NVIDIA/nccl issue 964, measured on 4 A100 with NVLink: 24 channels for two ranks, 24 with more neighbours for more.
_NCCL_BYTES = {2: 544 * _MIB, 3: 688 * _MIB}  # of a communicator of two ranks, of three and more
_NCCL_CHANNELS, _NCCL_CHANNELS_PCIE = 24, 2  # its memory is in proportion to these; NVIDIA/nccl issue 986


class Terms:
    """The terms of one device, but those left out."""

    def __init__(self, device: Device, precision: str, without: Collection[str] = ()):
        self._device, self._without = device, frozenset(without)
        self._tensor_cores_fp32 = precision != "fp32" and "tf32" in device.matmul_flops_per_second

    def has(self, name: str) -> bool:
        """Whether the term counts; on the CPU only the process itself and DDP's buckets do."""
        return name not in self._without and (self._device.is_cuda or name in ("context", "ddp_buckets"))

    @property
    def context_bytes(self) -> int:
        """The context."""
        return self._device.context_bytes if self.has("context") else 0

    @property
    def cublas_bytes(self) -> int:
        """Workspace of cuBLAS, of the one thread that multiplies."""
        hopper = self._device.name in ("H100", "H200")
        each = _CUBLAS_BYTES_HOPPER if hopper else _CUBLAS_BYTES
        return each if self.has("cublas_workspace") else 0

    def nccl_bytes(self, groups: Collection[int]) -> int:
        """NCCL's buffers for communicators of these sizes."""
        if not self.has("nccl"):
            return 0
        by_nvlink = self._device.link_bytes_per_second > self._device.host_bytes_per_second
        channels = _NCCL_CHANNELS if by_nvlink else _NCCL_CHANNELS_PCIE
        return sum(_NCCL_BYTES[min(size, 3)] * channels // _NCCL_CHANNELS for size in groups if size > 1)

    def scratch(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        """Bytes that an op needs beyond its results while it runs."""
        if not self._device.is_cuda:
            return cpu_scratch(func, args, out)
        if func is _aten.convolution.default:
            return self._spec_copies(args[0], args[1], out)
        if func is _aten.convolution_backward.default:
            return self._spec_copies(args[1], args[2], args[0])
        return cuda_scratch(func, args, out)

    def _spec_copies(self, x: Tensor, weight: Tensor, y: Tensor) -> int:
        """cuDNN's, where tensor cores are used: they read and write channels last."""
        by_tensor_cores = x.element_size() == 2 or (x.dtype == torch.float32 and self._tensor_cores_fp32)
        depthwise = weight.shape[1] == 1 and weight.shape[0] > 1  # torch's own kernel, no tensor cores
        if not self.has("cudnn_workspace") or not by_tensor_cores or depthwise or is_channels_last(x, weight):
            return 0
        return x.nbytes + weight.nbytes + y.nbytes
