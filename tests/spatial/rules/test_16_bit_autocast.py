"""fp16 tensors under the CPU's bf16 autocast: what fullframe joins on its way is no `torch.cat` of the user's."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group

OPS: dict[str, Callable[[Tensor], Tensor]] = {
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
    for name, op in OPS.items():
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, got = op(x), op(split)
        whole = got.full() if isinstance(got, ff.SpatialTensor) else got
        near = torch.allclose(expected.double(), whole.double(), rtol=3e-2, atol=3e-2)
        if expected.dtype != whole.dtype or not near:
            wrong.append(f"{name}: {expected.dtype}, {whole.dtype}")
    return wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_have_torchs_dtype(dtype: torch.dtype) -> None:
    assert rank_group(2).run(far_off, dtype) == [[], []]
