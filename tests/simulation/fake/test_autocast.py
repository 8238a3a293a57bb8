"""CUDA's autocast policy on the CPU, held against the tables that torch ships and against dtypes it documents."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fullframe.simulation.fake import autocast

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
BF16, FP32 = torch.bfloat16, torch.float32
# The first is of builds for CUDA, and never met on CPU tensors; the second of torch 2.14, for square matrices.
IN_NO_LIST = {"_cudnn_rnn", "linalg_matrix_sqrth"}


def table(name: str) -> set[str]:
    """The operators of one of the header's lists, as `name.overload`."""
    body = re.search(rf"#define {name}\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL).group(1)
    return {".".join(filter(None, re.split(r",\s*", found))) for found in re.findall(r"_\((\w+(?:,\s*\w+)?)\)", body)}


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (autocast.LOWER_PRECISION, "AT_FORALL_LOWER_PRECISION_FP"),
        (autocast.FP32, "AT_FORALL_FP32"),
        (autocast.FP32_RESULT, "AT_FORALL_FP32_SET_OPT_DTYPE"),
        (autocast.PROMOTE, "AT_FORALL_PROMOTE"),
    ],
)
def test_the_tables_are_those_of_the_installed_torch(ours, torchs):
    listed = table(torchs)
    assert len(listed) > 8
    assert listed - ours == set()
    cudnn_only = {"cudnn_convolution", "cudnn_convolution_transpose"}  # registered beside the list
    on_cuda = autocast._with_kernel("AutocastCUDA")
    assert (ours - listed) & on_cuda <= cudnn_only


def test_every_operator_with_a_cuda_policy_is_in_a_table():
    known = autocast.LOWER_PRECISION | autocast.FP32 | autocast.FP32_RESULT | set(autocast.FP32_NORM)
    found = autocast._with_kernel("AutocastCUDA") - IN_NO_LIST
    assert found == known | autocast.PROMOTE | autocast.BANNED


# What https://docs.pytorch.org/docs/stable/amp.html says of CUDA ops, on a bf16 or fp32 input.
x, wide, weight = torch.ones(4, 8, dtype=BF16), torch.ones(4, 8), torch.ones(8, 8)
image, labels = torch.ones(1, 4, 6, 6, dtype=BF16), torch.zeros(4, dtype=torch.int64)
TO_BF16 = {
    "linear": lambda: F.linear(wide, weight),
    "matmul": lambda: wide @ weight,
    "einsum": lambda: torch.einsum("ij,jk->ik", wide, weight),
    "mv": lambda: torch.mv(weight, weight[0]),
    "conv2d": lambda: F.conv2d(image.float(), torch.ones(2, 4, 3, 3)),
    "prelu": lambda: F.prelu(wide, torch.ones(1)),
}
TO_FP32 = {
    "layer_norm": lambda: F.layer_norm(x, (8,)),
    "group_norm": lambda: F.group_norm(image, 2),
    "softmax": lambda: x.softmax(-1),
    "log_softmax": lambda: F.log_softmax(x, -1),
    "cross_entropy": lambda: F.cross_entropy(x, labels),
    "mse_loss": lambda: F.mse_loss(x, x),
    "binary_cross_entropy_with_logits": lambda: F.binary_cross_entropy_with_logits(x, x),
    "sum": lambda: x.sum(),
    "prod": lambda: x.prod(0),
    "cumsum": lambda: x.cumsum(0),
    "norm": lambda: x.norm(),
    "exp": lambda: x.exp(),
    "pow": lambda: x**2,
    "rsqrt": lambda: x.rsqrt(),
    "interpolate": lambda: F.interpolate(image, scale_factor=2, mode="bilinear"),
    "cosine_similarity": lambda: F.cosine_similarity(x, x),
}
AS_IT_COMES = {
    "gelu": lambda: F.gelu(x),
    "relu": lambda: F.relu(x),
    "add": lambda: x + x,
    "mean": lambda: x.mean(),
    "batch_norm": lambda: F.batch_norm(image, None, None, training=True),
    "max_pool2d": lambda: F.max_pool2d(image, 2),
    "adaptive_avg_pool3d": lambda: F.adaptive_avg_pool3d(image[None], 1),  # the CPU's own policy makes it fp32
    "softmax to bf16": lambda: F.softmax(x, -1, dtype=BF16),
    "cat": lambda: torch.cat([x, x]),
}


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        pytest.param(run, dtype, id=name)
        for cases, dtype in ((TO_BF16, BF16), (TO_FP32, FP32), (AS_IT_COMES, BF16))
        for name, run in cases.items()
    ],
)
def test_dtypes_under_the_imitated_policy(run, dtype):
    with autocast.cuda_autocast(), torch.autocast("cpu", BF16):
        assert run().dtype == dtype


def test_the_widest_operand_decides_where_cuda_promotes():
    with autocast.cuda_autocast(), torch.autocast("cpu", BF16):
        assert torch.addcmul(x, x, x).dtype == BF16
        assert torch.addcmul(x, x, wide).dtype == FP32
        assert torch.cat([x, wide]).dtype == FP32


def test_fp64_is_left_alone():
    with autocast.cuda_autocast(), torch.autocast("cpu", BF16):
        assert F.layer_norm(x.double(), (8,)).dtype == torch.float64


def test_an_fp16_softmax_makes_no_fp32_copy_of_its_input():
    with FakeTensorMode(), autocast.cuda_autocast(), torch.autocast("cpu", torch.float16):
        scores = torch.empty(4, 8, dtype=torch.float16, requires_grad=True)
        assert scores.softmax(-1).dtype == FP32
        assert scores.softmax(-1).grad_fn.next_functions[0][0].variable is scores


def test_gradients_come_back_in_the_dtype_of_the_parameters():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    with autocast.cuda_autocast(), torch.autocast("cpu", BF16):
        out = layer(wide)
    out.sum().backward()
    assert out.dtype == FP32
    assert {p.grad.dtype for p in layer.parameters()} == {FP32}


def test_what_cuda_bans_is_banned():
    with (
        autocast.cuda_autocast(),
        torch.autocast("cpu", BF16),
        pytest.raises(RuntimeError, match=r"binary_cross_entropy.*logits"),
    ):
        F.binary_cross_entropy(x, x)


def test_afterwards_the_cpu_has_its_own_policy_again():
    with torch.autocast("cpu", BF16):
        before = {name: run().dtype for name, run in TO_FP32.items()}
    with autocast.cuda_autocast():
        pass
    with torch.autocast("cpu", BF16):
        assert {name: run().dtype for name, run in TO_FP32.items()} == before
    assert BF16 in before.values()  # layer norm, for one: the policies do differ


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FP32)
    def forward(ctx, x):
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad @ weight.t()


def test_what_a_program_says_of_cuda_is_meant():
    mine, of_cpu = torch.autocast.__init__, torch.get_autocast_dtype("cpu")
    with autocast.cuda_autocast():
        with torch.autocast("cuda"):
            assert (wide @ weight).dtype == torch.float16 == torch.get_autocast_gpu_dtype()
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert Doubled.apply(wide.half()).dtype == FP32
            with torch.autocast("cuda", enabled=False):
                assert (wide @ weight).dtype == FP32 and not torch.is_autocast_enabled("cuda")
        with torch.autocast("cpu", BF16), torch.autocast(device_type="cuda"):
            assert (wide @ weight).dtype == BF16  # of the region around it, as on CUDA
        with pytest.warns(FutureWarning), torch.cuda.amp.autocast(dtype=BF16):
            assert (wide @ weight).dtype == BF16
        assert not torch.is_autocast_enabled()
    assert torch.autocast.__init__ is mine and torch.get_autocast_dtype("cpu") == of_cpu
