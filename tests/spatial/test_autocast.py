"""Under autocast, the CPU's policy and CUDA's, a result has the dtype and the precision it has in one process."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.simulation.fake.autocast import cuda_autocast
from tests.exactness import mesh
from tests.rank_group import rank_group

MESHES = [(1, 2), (2, 1), (2, 2)]
SHAPE = (2, 4, 8, 14)

OPS: dict[str, Callable[[Tensor], Any]] = {
    "conv2d": lambda x: F.conv2d(x, _weight(6, 4, 3, 3).to(x.device), None, 1, 1),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, _weight(4, 3, 2, 2), None, 2),
    "linear": lambda x: F.linear(x, _weight(5, 14)),
    "linear over channels": lambda x: F.linear(x.permute(0, 2, 3, 1), _weight(5, 4), _weight(5)),
    "matmul": lambda x: [x @ x.transpose(2, 3), x.transpose(1, 3) @ _weight(4, 3)],
    "addmm": lambda x: torch.baddbmm(x[:, 0, :, :8].float(), x[:, 1], x[:, 2].transpose(1, 2)),
    "einsum": lambda x: torch.einsum("nchw,nchv->nwv", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.flatten(2).transpose(1, 2)] * 3),
    "layer norm": lambda x: [F.layer_norm(x, SHAPE[1:]), F.layer_norm(x.permute(0, 2, 3, 1), (4,))],
    "rms norm": lambda x: F.rms_norm(x, (8, 14)),
    "group norm": lambda x: F.group_norm(x, 2, _weight(4), _weight(4)),
    "batch norm": lambda x: F.batch_norm(x, None, None, _weight(4), _weight(4), True),
    "softmax": lambda x: [x.softmax(1), x.softmax(3), F.log_softmax(x, 2)],
    "reductions": lambda x: [x.sum(), x.mean((2, 3)), x.sum(3), x.var(2), x.norm(), x.amax(3), x.prod(3), x.cumsum(3)],
    "resized": lambda x: [
        F.interpolate(x, scale_factor=2, mode="bilinear"), F.interpolate(x, (11, 17), mode="bilinear"),
        F.interpolate(x, (11, 17), mode="bicubic"), F.interpolate(x, scale_factor=2),
    ],
    "pooling": lambda x: [F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, (3, 5))],
    "fold": lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 14), 2, stride=2),
    "joined": lambda x: [torch.cat([x, x.float()], 1), torch.stack([x.float(), x])],
    "losses": lambda x: [
        F.cross_entropy(x, (x[:, 0] > 0).long()), F.mse_loss(x, x * 0.5), F.l1_loss(x, x * 0.5),
        F.smooth_l1_loss(x, x * 0.5), F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype)),
        F.kl_div(x, x.sigmoid(), reduction="batchmean"),
    ],
    "pointwise": lambda x: [x.exp(), x * _weight(4, 1, 1), F.gelu(x), x.pow(2), F.softplus(x), x + x.float()],
    "normalize": lambda x: [F.normalize(x), F.normalize(x, dim=3), F.cosine_similarity(x, x + 1)],
    "grid_sample": lambda x: F.grid_sample(x, x[:, :2].tanh().permute(0, 2, 3, 1), align_corners=False),
    "padded": lambda x: [F.pad(x, (1, 1, 2, 0), mode="reflect"), F.pad(x, (1, 2))],
}  # fmt: skip


def _weight(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count).mul(7).sin().view(shape)


def _answers(op: Callable[[Tensor], Any], x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    with torch.autocast("cpu", dtype):
        results = [t for t in tree_leaves(op(x)) if isinstance(t, Tensor)]
    return [t.full() if isinstance(t, ff.SpatialTensor) else t for t in results]


def _compared(height: int, width: int, given: torch.dtype, cuda: bool) -> dict[str, Any]:
    lower = torch.bfloat16
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(given)
    found: dict[str, Any] = {}
    for name, op in OPS.items():
        if cuda:
            with cuda_autocast():
                here = _answers(op, x, lower)
                there = _answers(op, ff.shard(x, mesh(height, width)), lower)
        else:
            here, there = _answers(op, x, lower), _answers(op, ff.shard(x, mesh(height, width)), lower)
        found[name] = []
        for a, b in zip(here, there, strict=True):
            # in 16 bit two orders of a sum may round to neighbours; what was meant for fp32 agrees to its digits
            tolerance = 2e-5 if a.dtype == torch.float32 and given == torch.float32 else 0.02
            error = float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-6))
            found[name].append((str(a.dtype), str(b.dtype), error if error > tolerance else 0.0))
    return found


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu policy", "cuda policy"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("height", "width"), MESHES)
def test_dtypes_are_those_of_one_process(height: int, width: int, given: torch.dtype, cuda: bool) -> None:
    for found in rank_group(height * width).run(_compared, height, width, given, cuda):
        wrong = {n: f for n, f in found.items() if any(a != b or error for a, b, error in f)}
        assert not wrong, wrong


# fp16 tensors under the CPU's bf16 autocast: what fullframe joins on its way is no `torch.cat` of the user's.
SIXTEEN_BIT: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3, dtype=x.dtype), padding=1),
    "group norm": lambda x: F.group_norm(x, 2),
    "batch norm": lambda x: F.batch_norm(x, None, None, None, None, True),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "average pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "resize": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "softmax": lambda x: x.softmax(-1),
    "flip": lambda x: x.flip(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 3),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), "reflect"),
}


def far_off(dtype: torch.dtype) -> list[str]:
    x = torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    split, wrong = ff.shard(x, mesh(1, 2)), []
    for name, op in SIXTEEN_BIT.items():
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, got = op(x), op(split)
        whole = got.full() if isinstance(got, ff.SpatialTensor) else got
        near = torch.allclose(expected.double(), whole.double(), rtol=3e-2, atol=3e-2)
        if expected.dtype != whole.dtype or not near:
            wrong.append(f"{name}: {expected.dtype}, {whole.dtype}")
    return wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_tensors_have_torchs_dtype(dtype: torch.dtype) -> None:
    assert rank_group(2).run(far_off, dtype) == [[], []]
