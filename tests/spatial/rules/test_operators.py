"""torch's operators by themselves, and programs that torch.export made of models."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe.spatial.rules.operators import _BY_NAME
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.corners import noise
from tests.spatial.values import found, on_all_meshes

aten = torch.ops.aten
W = noise(4).detach()
CALLS: dict[str, Callable[[Tensor], Any]] = {  # of (2, 4, 7, 13)
    "pad": lambda x: [aten.pad(x, [1, 2, 0, 1], "reflect"), aten.pad.default(x, [0, 1], "constant", 2.0)],
    "adaptive_avg_pool2d": lambda x: aten.adaptive_avg_pool2d(x, [3, 4]),
    "adaptive_avg_pool3d": lambda x: aten.adaptive_avg_pool3d(x, [2, 3, 4]),
    "leaky_relu": lambda x: aten.leaky_relu(x, 0.2),
    "leaky_relu_": lambda x: aten.leaky_relu_(x * 2, 0.2),
    "silu": lambda x: aten.silu(x),
    "silu_": lambda x: aten.silu_(x * 2),
    "hardtanh": lambda x: aten.hardtanh(x, -0.5, 0.7),
    "hardtanh_": lambda x: aten.hardtanh_(x * 2, -0.5, 0.7),
    "hardswish": lambda x: aten.hardswish(x),
    "hardswish_": lambda x: aten.hardswish_(x * 2),
    "hardsigmoid": lambda x: aten.hardsigmoid(x),
    "mish": lambda x: aten.mish(x),
    "glu": lambda x: aten.glu(x, 1),
    "relu6": lambda x: aten.relu6(x * 9),
    "rms_norm": lambda x: aten.rms_norm(x, [7, 13], None, 1e-3),
    "elu": lambda x: aten.elu(x, 0.7),
    "upsample_linear1d": lambda x: aten.upsample_linear1d(x[:, :, 0], [17], False),
    "upsample_bilinear2d": lambda x: [
        aten.upsample_bilinear2d.vec(x, [9, 20], True, None), aten.upsample_bilinear2d.vec(x, None, False, [1.7, 2.1]),
    ],
    "upsample_bicubic2d": lambda x: aten.upsample_bicubic2d.vec(x, [9, 20], False, None),
    "upsample_trilinear3d": lambda x: aten.upsample_trilinear3d(x[None], [5, 9, 20], False),
    "upsample_nearest1d": lambda x: aten.upsample_nearest1d.vec(x[:, :, 0], None, [2.3]),
    "upsample_nearest2d": lambda x: aten.upsample_nearest2d.vec(x, [9, 20], None),
    "upsample_nearest3d": lambda x: aten.upsample_nearest3d(x[None], [5, 9, 20]),
    "slice": lambda x: [aten.slice(x, -1, 2, 9), aten.slice.Tensor(x, 2, 0, 9223372036854775807, 2), aten.slice(x)],
    "index": lambda x: aten.index(x, [None, torch.tensor([2, 0])]),
    "mT": lambda x: aten.mT(x),
    "numpy_T": lambda x: aten.numpy_T(x[0, 0]),
    "sym_size": lambda x: x * aten.sym_size.int(x, 3),
    "split": lambda x: [*aten.split.Tensor(x, 5, 3), *aten.split(x, [3, 4], 2)],
    "_assert_tensor_metadata": lambda x: aten._assert_tensor_metadata(x, x.shape, x.stride(), x.dtype) or x * 2,
    "einsum": lambda x: aten.einsum("nchw,c->nhw", [x, W]),
    "batch_norm": lambda x: aten.batch_norm(x, W, None, None, None, True, 0.1, 1e-3, True),
    "instance_norm": lambda x: aten.instance_norm(x, None, W, None, None, True, 0.1, 1e-3, True),
    "group_norm": lambda x: [aten.group_norm(x, 2, W, None, 1e-3), aten.group_norm.default(x, 4)],
    "layer_norm": lambda x: [aten.layer_norm(x.movedim(1, -1), [4], W, None, 1e-3), aten.layer_norm(x, [13])],
    "linalg_vector_norm": lambda x: aten.linalg_vector_norm(x, 3, [1], True),
    "adaptive_max_pool2d": lambda x: aten.adaptive_max_pool2d(x, [3, 4])[0],
    "embedding": lambda x: aten.embedding(noise(9, 3), (x.abs() * 9).long() % 9) * x[..., None],
    "cross_entropy_loss": lambda x: [
        aten.cross_entropy_loss(x, labels(x)), aten.cross_entropy_loss(x, labels(x), W.abs(), 2, 1, 0.1),
    ],
    "binary_cross_entropy_with_logits": lambda x: aten.binary_cross_entropy_with_logits(x, x.sigmoid(), None, None, 0),
    "mse_loss": lambda x: aten.mse_loss(x, x.sin()),
    "l1_loss": lambda x: aten.l1_loss(x, x.sin(), 2),
    "smooth_l1_loss": lambda x: aten.smooth_l1_loss(x, x.sin(), 0, 0.3),
    "huber_loss": lambda x: aten.huber_loss(x, x.sin(), 1, 0.3),
    "bound to their functions": lambda x: [
        aten.add.Tensor(x, x, alpha=2), aten.sum.dim_IntList(x, [3]), aten.view(x, [2, 28, 13]), aten.relu_(x + 1),
        aten.permute(x, [3, 0, 1, 2]), aten.conv2d(x, noise(2, 4, 3, 3), None, [1, 1], [1, 1]), aten.clamp(x, 0),
        aten.max.dim(x, 3)[0], aten.cat([x, x], 3), aten.to.dtype(x > 0, torch.float32), aten.softmax.int(x, 3),
        aten.max_pool2d(x, [3, 3], [2, 2], [1, 1]), aten.add.out(x.detach(), 1, out=torch.empty_like(x)),
    ],
}  # fmt: skip


def labels(x: Tensor) -> Tensor:
    return (x[:, 0].detach().abs() * 9).long() % 4


def test_every_operator_is_asked() -> None:
    assert CALLS.keys() - {"bound to their functions"} == _BY_NAME.keys()


def _called(world: int) -> list[str]:
    return found({name: (call, [noise(2, 4, 7, 13)], []) for name, call in CALLS.items()}, 1e-12, world)


def test_operators_as_in_one_process() -> None:
    assert not on_all_meshes(_called)


def _of_another_program() -> None:
    x = ff.shard(noise(2, 4, 7, 13), mesh(1, 2))
    with pytest.raises(RuntimeError, match="mismatch"):
        aten._assert_tensor_metadata(x, x.local.shape)
    with pytest.raises(ff.UnsupportedOp, match=r"aten\.stft"):  # whose function has its arguments in another order
        aten.stft(x[0, 0], 4)


def test_what_the_program_was_exported_for_is_the_whole_tensor() -> None:
    rank_group(2).run(_of_another_program)


class Net(nn.Module):
    """Down, attention, up; norms that learn and norms that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.groups = nn.Conv2d(8, 16, 3, 2, 2, 2, 2, bias=False), nn.GroupNorm(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.last, self.ends = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 2, 1), nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.norm(self.first(x)))
        b = self.groups(self.second(a)).relu_()
        n, c, h, w = b.shape
        tokens = F.adaptive_avg_pool2d(b, (3, 4)).flatten(2).mT
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        b = b + F.interpolate(tokens.mT.reshape(n, c, 3, 4), (h, w), mode="bilinear")
        b = F.interpolate(self.up(b), a.shape[2:], mode="nearest")
        y = self.ends(self.last(torch.cat([b, a], 1)).permute(0, 2, 3, 1))
        return y[:, 1:, :-1].softmax(-1)


def _trained(height: int, width: int) -> list[float]:
    x = noise(2, 3, 18, 22).detach()
    model = torch.export.export(Net().double(), (x,)).module()
    answers = []
    for net, image in ((model, x), (ff.parallelize(copy.deepcopy(model), mesh(height, width)), None)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y = net(x if image is not None else ff.shard(x, mesh(height, width)))
        y.square().mean().backward()
        y = y.full() if isinstance(y, ff.SpatialTensor) else y
        answers.append([y, *(p.grad for p in net.parameters()), *net.buffers()])
    assert len(answers[0]) > 18
    return [float((a - b).abs().max()) for a, b in zip(*answers, strict=True)]  # type: ignore[operator, union-attr]


def test_an_exported_program_trains() -> None:
    for shape in ((1, 2), (2, 2)):
        for errors in rank_group(shape[0] * shape[1]).run(_trained, *shape):
            assert max(errors) < 1e-12, errors
