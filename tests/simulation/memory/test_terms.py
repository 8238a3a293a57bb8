"""The terms of a GPU beside the program's tensors."""

import torch

from fullframe.simulation.devices.table import device_named
from fullframe.simulation.memory.scratch import cpu_scratch
from fullframe.simulation.memory.terms import TERMS, Terms

aten = torch.ops.aten
MIB = 2**20


def terms(device: str, precision: str = "bf16", *without: str) -> Terms:
    return Terms(device_named(device), precision, without)


def test_which_terms_count() -> None:
    assert all(terms("A100-80GB").has(name) for name in TERMS)
    assert [name for name in TERMS if terms("cpu").has(name)] == ["context", "ddp_buckets"]
    assert not terms("A100-80GB", "bf16", "nccl").has("nccl")
    assert terms("A100-80GB", "bf16", "context").context_bytes == 0 < terms("A100-80GB").context_bytes


def test_workspace_of_cublas() -> None:
    assert terms("H100").cublas_bytes == 32 * MIB
    assert terms("A100-80GB").cublas_bytes == 8_519_680
    assert terms("cpu").cublas_bytes == terms("H100", "bf16", "cublas_workspace").cublas_bytes == 0


def test_buffers_of_nccl() -> None:
    by_nvlink = terms("A100-80GB")
    assert by_nvlink.nccl_bytes([1]) == 0
    assert by_nvlink.nccl_bytes([2, 2, 3, 8]) == (2 * 544 + 2 * 688) * MIB
    assert terms("T4").nccl_bytes([2]) == 544 * MIB * 2 // 24
    assert terms("cpu").nccl_bytes([2]) == 0


def test_copies_that_tensor_cores_want() -> None:
    x, w, y = torch.zeros(2, 8, 9, 9), torch.zeros(6, 8, 3, 3), torch.zeros(2, 6, 9, 9)
    forward, backward = aten.convolution.default, aten.convolution_backward.default
    both = x.nbytes + w.nbytes + y.nbytes
    half = x.half(), w.half()
    gpu = terms("A100-80GB")
    assert gpu.scratch(forward, half, y.half()) == gpu.scratch(backward, (y.half(), *half), None) == both // 2
    assert gpu.scratch(forward, (x, w), y) == both  # tf32
    assert terms("A100-80GB", "fp32").scratch(forward, (x, w), y) == 0
    assert terms("V100-16GB").scratch(forward, (x, w), y) == 0
    assert terms("A100-80GB", "bf16", "cudnn_workspace").scratch(forward, half, y.half()) == 0
    last = x.half().to(memory_format=torch.channels_last)
    assert gpu.scratch(forward, (last, w.half()), y.half()) == 0
    assert gpu.scratch(forward, (half[0], torch.zeros(8, 1, 3, 3).half()), y.half()) == 0  # depthwise
    assert gpu.scratch(aten.relu.default, (x,), x) == 0


def test_the_queries_gradient_is_added_up_in_fp32() -> None:
    q = torch.zeros(2, 4, 16, 8, dtype=torch.bfloat16)
    func = aten._scaled_dot_product_flash_attention_backward.default
    assert terms("A100-80GB").scratch(func, (q, q, q, q), None) == 4 * q.numel()


def test_on_the_cpu_it_is_onednn_s() -> None:
    x, w = torch.zeros(2, 8, 9, 9), torch.zeros(8, 8, 3, 3)
    args = x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    assert terms("cpu").scratch(aten.convolution.default, args, x) == cpu_scratch(aten.convolution.default, args, x)
