"""Which kernels fake tensors take, as CUDA would choose."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullframe.simulation.fake.cuda_kernels import cuda_kernels


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def kernels(program: Any, *inputs: Tensor, flash: bool = True) -> tuple[list[str], Any]:
    with cuda_kernels(flash), FakeTensorMode(allow_non_fake_inputs=True), Names() as names:
        out = program(*(t.clone() for t in inputs))
    return names.seen, out


def heads(channels: int = 64, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.zeros(2, 3, 10, channels, dtype=dtype) for _ in range(3)]


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("inputs", "flash", "kernel"),
    [
        (heads(), True, FLASH),
        (heads(), False, EFFICIENT),
        (heads(dtype=torch.float32), True, EFFICIENT),
        (heads(512), True, EFFICIENT),  # more channels than flash attention takes
        (heads(60, torch.bfloat16), True, FLASH),  # padded to 64
    ],
)
def test_attention(inputs: list[Tensor], flash: bool, kernel: str) -> None:
    seen, out = kernels(F.scaled_dot_product_attention, *inputs, flash=flash)
    assert kernel in seen and out.shape == inputs[0].shape
    assert ("constant_pad_nd" in seen) == (inputs[0].shape[-1] % 8 > 0)


def test_attention_without_a_fused_kernel_and_with_a_mask() -> None:
    seen, _ = kernels(F.scaled_dot_product_attention, *heads(dtype=torch.float64))
    assert FLASH not in seen and EFFICIENT not in seen
    mask = torch.zeros(10, 10, dtype=torch.bool)
    seen, out = kernels(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), *heads(), mask)
    assert EFFICIENT in seen and "constant_pad_nd" in seen  # rows of the bias lie at aligned addresses
    assert out.shape == (2, 3, 10, 64)


def test_attention_of_rows_whose_elements_lie_apart_is_not_fused() -> None:
    """As of maps (N, C, H, W) seen as (N, 1, H x W, C)."""
    seen, _ = kernels(lambda x: F.scaled_dot_product_attention(*[x.mT] * 3), torch.zeros(2, 1, 64, 10).half())
    assert "_safe_softmax" in seen and FLASH not in seen and EFFICIENT not in seen


def test_dropout_keeps_a_mask_of_bytes() -> None:
    x = torch.zeros(4, 5)
    assert "native_dropout" in kernels(lambda x: F.dropout(x, 0.5), x)[0]
    assert "native_dropout" not in kernels(lambda x: F.dropout(x, 0.5, training=False), x)[0]
    assert "mul" in kernels(lambda x: F.dropout(x, 1.0), x)[0]


def test_afterwards_torch_chooses_as_before() -> None:
    kernels(lambda x: F.dropout(x, 0.5), torch.zeros(2))
    with Names() as names:
        F.dropout(torch.ones(4, requires_grad=True), 0.5)
    assert "native_dropout" not in names.seen
