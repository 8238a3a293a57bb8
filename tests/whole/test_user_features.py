"""What users' models do, two or three at a time, with a random strategy: three steps against plain torch, float64."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fullframe as ff
from fullframe.model.parallelize_for import parallelize_for
from fullframe.model.sharding.values import whole_value
from fullframe.techniques.optimizers import build_optimizer
from tests.rank_group import rank_group

CHANNELS, STEPS = 4, 3
MESHES = [{"width": 2}, {"height": 2}, {"width": 3}, {"height": 2, "width": 2}]
OPTIONS: list[dict[str, Any]] = [
    {}, {"recompute": "blocks"}, {"update_in_backward": True}, {"shard_parameters": True}, {"shard_optimizer": True},
    {"recompute": "blocks", "update_in_backward": True}, {"recompute": "blocks", "shard_parameters": True},
]  # fmt: skip


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient.clamp(-0.01, 0.01) * (x.abs() < 1)


class Piece(nn.Module):
    """A convolution, and what is done with it and with what comes in."""

    def __init__(self, does: Callable[["Piece", Tensor], Tensor], spectral: bool = False):
        super().__init__()
        conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.conv = parametrizations.spectral_norm(conv) if spectral else conv
        self.norm, self.does = nn.BatchNorm2d(CHANNELS), does
        self.register_buffer("mean", torch.zeros(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def _hooked(p: Piece, x: Tensor) -> Tensor:
    y: Tensor = p.conv(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
    return y.tanh()


def _counted(p: Piece, x: Tensor) -> Tensor:
    y: Tensor = p.conv(x)
    with torch.no_grad():
        p.mean.mul_(0.9).add_(y.mean((0, 2, 3)).view(-1, 1, 1), alpha=0.1)
    return (y - p.mean).tanh()


def _written(p: Piece, x: Tensor) -> Tensor:
    y: Tensor = p.conv(x)
    y[:, :2] += 0.5
    y[..., ::2].mul_(1.5)
    y[y < -0.5] = 0.1
    return y.tanh_()


def _decided(p: Piece, x: Tensor) -> Tensor:
    y: Tensor = p.conv(x)
    while y.detach().abs().max().item() > 0.8:
        y = y * 0.7
    return y * (1 + float(y.detach().std()))


def _made_weight(p: Piece, x: Tensor) -> Tensor:
    weights = {"weight": p.conv.weight * x.mean(), "bias": p.conv.bias}
    return torch.func.functional_call(p.conv, weights, (x,)).tanh()


PIECES: dict[str, Callable[[Piece, Tensor], Tensor]] = {
    "norm": lambda p, x: F.relu_(p.norm(p.conv(x))),
    "checkpoint": lambda p, x: checkpoint(lambda y: p.conv(y).sin(), x * 1, use_reentrant=False),
    "hook": _hooked,
    "buffer": _counted,
    "in place": _written,
    "decision": _decided,
    "made weight": _made_weight,
    "own function": lambda p, x: Rounded.apply(p.conv(x)) + x,
    "tied": lambda p, x: p.conv(p.conv(x).relu()) + F.conv_transpose2d(x, p.conv.weight, padding=1),
    "detached": lambda p, x: p.conv(x) + (x.round() - x).detach(),
    "spectral": lambda p, x: F.leaky_relu(p.conv(x), 0.1),
    "gate": lambda p, x: p.conv(x) * x.mean((2, 3), keepdim=True).sigmoid(),
}


class Block(nn.Module):
    def __init__(self, names: list[str]):
        super().__init__()
        self.pieces = nn.ModuleList(Piece(PIECES[name], name == "spectral") for name in names)

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces:
            x = x * 0.5 + piece(x)
        return x


class Network(nn.Module):
    def __init__(self, names: list[str]):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1)
        self.blocks, self.head = nn.Sequential(Block(names), Block(names)), nn.Conv2d(CHANNELS, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        return F.interpolate(self.head(self.blocks(self.stem(image))), size=image.shape[-2:], mode="bilinear")


def _network(names: list[str]) -> Network:
    torch.manual_seed(0)
    return Network(names).double()


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["target"])


def _batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    image = torch.randn(2, 3, 13, 19, generator=generator, dtype=torch.float64)
    return {"image": image, "target": torch.randint(0, 4, (2, 13, 19), generator=generator)}


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _state(losses: list[float], net: nn.Module) -> list[Tensor]:
    whole = [whole_value(t.detach()).double() for t in (*net.parameters(), *net.buffers())]
    return [torch.tensor(losses, dtype=torch.float64), *whole]


def _plain(names: list[str]) -> list[Tensor]:
    net, losses = _network(names), []
    optimizer = _momentum(net.parameters())
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(net, _batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _state(losses, net)


def _trained(names: list[str], strategy: ff.Strategy) -> list[Tensor]:
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    model = parallelize_for(strategy, _network(names), mesh)
    step = ff.TrainStep(model, _loss, build_optimizer(_momentum, model, strategy), strategy)
    batches = ({name: ff.shard(t, mesh) for name, t in _batch(number).items()} for number in range(STEPS))
    return _state([step(batch).loss for batch in batches], model.module)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.further] * (s > 2)) for s in range(40)])
def test_the_steps_are_plain_torch_s(seed: int) -> None:
    r = random.Random(seed)
    names = r.sample(list(PIECES), r.choice([2, 2, 3]))
    strategy = ff.Strategy(**r.choice(MESHES), **r.choice(OPTIONS))
    expected = _plain(names)
    for found in rank_group(strategy.ranks).run(_trained, names, strategy):
        for here, there in zip(expected, found, strict=True):
            torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-11, msg=lambda m: f"{names} {strategy}: {m}")
