"""Whole networks with compiled blocks, at an uneven size: losses, gradients and buffers of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from benchmarks.networks import UNet
from fullframe.model.blocks import blocks_that_repeat
from fullframe.model.compiled.blocks import CompiledBlocks, Programs
from tests.rank_group import rank_group

SIZE = (2, 3, 100, 150)
WIDTHS, DEPTHS = [16, 32, 48, 64], [2, 2, 3, 2]


def convnext() -> nn.Module:
    import transformers

    config = transformers.ConvNextConfig(hidden_sizes=WIDTHS, depths=DEPTHS, layer_scale_init_value=0.1)
    return transformers.ConvNextModel(config)


def resnet() -> nn.Module:
    """Batch norm in training."""
    import transformers

    return transformers.ResNetModel(transformers.ResNetConfig(embedding_size=16, hidden_sizes=WIDTHS, depths=DEPTHS))


def unet() -> nn.Module:
    return UNet(8)


def segformer() -> nn.Module:
    """Attention over tokens of a stride of its own, stochastic depth off."""
    import transformers

    config = transformers.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[2, 1, 1, 2], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        initializer_range=0.2, num_labels=5,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config)


def swin() -> nn.Module:
    """Windows, shifted in every other block; the last ones set their own window when they first see the map."""
    import transformers

    config = transformers.SwinConfig(
        image_size=96, embed_dim=8, depths=[2, 2, 1, 1], num_heads=[1, 2, 2, 4], window_size=4, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    return transformers.SwinModel(config, add_pooling_layer=False)


class Pair(nn.Module):
    """A network of two views, called with one tensor of both."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, views: Tensor) -> Any:
        return self.network(*views.chunk(2))


def stereo() -> nn.Module:
    from examples.stereo_depth.network import StereoNetwork

    return Pair(StereoNetwork(channels=8, groups=4, disparities=4))


class Update(nn.Module):
    """One iteration of RAFT: correlations looked up where the flow points, a GRU's gate, a step."""

    def __init__(self, width: int):
        super().__init__()
        self.motion, self.gate = nn.Conv2d(9 + 2, width, 3, padding=1), nn.Conv2d(2 * width, width, 3, padding=1)
        self.step = nn.Conv2d(width, 2, 3, padding=1)

    def lookup(self, volume: Any, where: Any) -> Any:
        """Of a volume (N * H * W, 1, H, W), nine values around each pixel's place: (N, 9, H, W)."""
        n, _, h, w = where.shape
        near = torch.arange(-1, 2, dtype=where.dtype)
        delta = torch.stack(torch.meshgrid(near, near, indexing="ij"), dim=-1)
        grid = where.permute(0, 2, 3, 1).reshape(n * h * w, 1, 1, 2) + delta.unsqueeze(0)
        grid = torch.stack([2 * grid[..., 0] / (w - 1) - 1, 2 * grid[..., 1] / (h - 1) - 1], dim=-1)
        found = F.grid_sample(volume, grid, align_corners=True)
        return found.view(n, h, w, -1).permute(0, 3, 1, 2).contiguous()

    def forward(self, state: Any, volume: Any, start: Any) -> Any:
        hidden, flow = state
        found = self.lookup(volume, start + flow)
        motion = F.relu(self.motion(torch.cat([found, flow], 1)))
        gate = torch.sigmoid(self.gate(torch.cat([hidden, motion], 1)))
        hidden = gate * hidden + (1 - gate) * torch.tanh(motion)
        return hidden, flow + self.step(hidden)


class Raft(nn.Module):
    """Features, correlations of all pairs of pixels, and iterations that share their weights."""

    def __init__(self, recompute: Any = "none", width: int = 8):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 7, 8, 3), nn.InstanceNorm2d(width), nn.ReLU())
        self.updates = ff.unroll(Update(width), 4, recompute=recompute)

    def forward(self, image: Tensor) -> Any:
        x = self.features(image)
        n, c, h, w = x.shape
        volume = torch.matmul(x.view(n, c, h * w).transpose(1, 2), x.flip(1).reshape(n, c, h * w))
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        start = torch.stack([columns, rows], dim=0).to(x).repeat(n, 1, 1, 1)
        return self.updates((torch.tanh(x), 0.1 * x[:, :2]), volume.reshape(n * h * w, 1, h, w), start)


NETWORKS = {
    "convnext": convnext, "resnet": resnet, "unet": unet, "segformer": segformer, "swin": swin, "stereo": stereo,
    "raft": Raft, "raft, recomputed": lambda: Raft("iterations"),
}  # fmt: skip


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def loss(model: nn.Module, x: Tensor) -> Tensor:
    found: Any = model(x)
    leaves = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
    maps = [value for value in leaves if isinstance(value, Tensor)]
    return sum((t.square().mean() + t.tanh().mean() for t in maps), torch.zeros((), dtype=torch.float64))


def accumulated(model: nn.Module, run: Any, mesh: Any) -> list[float]:
    """Losses of two batches, whose gradients add up."""
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(2):
        x = torch.randn(SIZE, generator=draw, dtype=torch.float64)
        value = loss(run, x if mesh is None else ff.shard(x, mesh))
        value.backward()
        losses.append(float(value))
    return losses


def compared(
    name: str, height: int, width: int, backend: str, as_it_is: int, as_one: bool = False
) -> tuple[float, dict[str, str]]:
    """The largest relative difference, and why blocks were not compiled; rank `as_it_is` compiles none."""
    mesh, here, there = ff.init_mesh(height=height, width=width), built(name), built(name)
    expected = accumulated(here, here, None)
    parallel, programs = ff.parallelize(there, mesh, find_unused_parameters=True), Programs(backend)
    if dist.get_rank() != as_it_is:
        CompiledBlocks(there, [""] if as_one else blocks_that_repeat(there), programs)
    found = accumulated(there, parallel, mesh)
    worst = max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))
    pairs: list[Any] = [(p.grad, q.grad) for p, q in zip(here.parameters(), there.parameters(), strict=True)]
    pairs += zip(here.buffers(), there.buffers(), strict=True)
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None:
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-6)))
    return worst, programs.whys


MESHES = [(1, 2), (2, 1), (2, 2)]


@pytest.mark.slow  # a program takes seconds to capture, and longer to compile
@pytest.mark.parametrize(
    ("name", "height", "width", "backend", "as_it_is"),
    [
        *((name, *mesh, "aot_eager", -1) for name in NETWORKS for mesh in MESHES),
        *((name, 1, 2, "inductor", -1) for name in NETWORKS),
        ("resnet", 2, 2, "aot_eager", 1),
    ],
)
def test_a_network_is_that_of_one_process(name: str, height: int, width: int, backend: str, as_it_is: int) -> None:
    everyone = rank_group(height * width).run(compared, name, height, width, backend, as_it_is, timeout_seconds=900)
    for rank, (difference, whys) in enumerate(everyone):
        assert difference < 1e-9, difference
        assert not any(whys.values()) and bool(whys) is (rank != as_it_is), whys


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "height", "width"),
    [("convnext", 1, 2), ("resnet", 2, 1), ("unet", 2, 2), ("segformer", 2, 1), ("stereo", 1, 2), ("raft", 1, 2)],
)
def test_a_network_compiled_as_one_program_is_that_of_one_process(name: str, height: int, width: int) -> None:
    ranks = rank_group(height * width)
    for difference, whys in ranks.run(compared, name, height, width, "aot_eager", -1, True, timeout_seconds=900):
        assert difference < 1e-9 and whys == {"": ""}, (difference, whys)
