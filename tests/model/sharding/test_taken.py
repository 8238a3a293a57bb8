"""Forward passes that take a sharded layer's weight without calling the layer have one process's gradients."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullframe as ff
from fullframe.model.attributes import kept_attributes
from fullframe.model.sharding import units
from fullframe.model.sharding.taken import Replaced, stand_in
from fullframe.model.sharding.values import whole_value
from tests.exactness import mesh
from tests.rank_group import RankFailure, rank_group

CHANNELS = 4


class Net(nn.Module):
    """Two convolutions are units of their own, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, CHANNELS, 1), nn.Conv2d(CHANNELS, 2, 1)
        self.layers = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Conv2d(CHANNELS, CHANNELS, 1) for name in ("first", "second")}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(x)))  # type: ignore[no-any-return]

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).sin()
        return x


class Functional(Net):
    """No layer is called; hypernetworks and weight norm by hand are written like this."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.conv2d(x, layer.weight / layer.weight.norm(), layer.bias, padding=1).sin()  # type: ignore[operator,arg-type]
        return x


class Recomputed(Functional):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(super().middle, x, use_reentrant=False)  # type: ignore[return-value]


class Tied(Net):
    """Each is called, and its weight taken for the way back."""

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.conv_transpose2d(layer(x).sin(), layer.weight, padding=1)  # type: ignore[arg-type]
        return x


class Before(Net):
    """A weight is taken before its layer is called, and used after that, too."""

    def middle(self, x: Tensor) -> Tensor:
        weight: Tensor = self.layers[0].weight  # type: ignore[assignment]
        x = super().middle(super().middle(F.conv2d(x, weight, padding=1).sin()))
        return x + F.conv2d(x, weight.flip(2), padding=1)


class Between(Net):
    """Called, taken, and called again."""

    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x)
        return super().middle(x + F.conv2d(x, self.layers[1].weight, padding=1).sin())  # type: ignore[arg-type]


class NowAndThen(Net):
    """Taken in every other pass."""

    passes = 0

    def middle(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = super().middle(x)
        return x + F.conv2d(x, self.layers[0].weight, padding=1) if self.passes % 2 else x  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.half(x))  # type: ignore[no-any-return]

    def half(self, x: Tensor) -> Tensor:
        return self.first(x).sin()  # type: ignore[no-any-return]


class Blocks(Net):
    """A method of a block is called, and a weight of another taken."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return F.conv2d(third(second.half(first(x))), first.second.weight) + second.second(x)  # type: ignore[operator,union-attr,arg-type]


class Kept(Net):
    """Weights are in a tuple of its own beside the modules, as they were before they were sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = (self.stem.weight, *(layer.weight for layer in self.layers))

    def middle(self, x: Tensor) -> Tensor:
        for weight in self.weights[1:]:
            x = x + F.conv2d(x, weight, padding=1).sin()  # type: ignore[arg-type]
        return x + F.conv2d(F.conv_transpose2d(x, self.weights[0]), self.weights[0])  # type: ignore[arg-type]


NETS: list[Callable[[], Net]] = [
    Net, Functional, Recomputed, Tied, Before, Between, NowAndThen, Blocks, Kept,
]  # fmt: skip


def _steps(build: Callable[[], Net], ranks: int, height: int, width: int, is_rehearsed: bool = False) -> list[Tensor]:
    """Three steps, an evaluation before the last, and perhaps a pass that does not count before all: the parameters."""
    on = mesh(height, width)
    torch.manual_seed(0)
    net = build().double()
    with mock.patch.object(units, "_SMALL_BYTES", 0):
        model = ff.parallelize(net, on, shard_parameters=True) if ranks > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        images = torch.randn(2, 3, 7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = images.chunk(on.size(0))[on.get_local_rank("data")] if ranks > 1 else images
        mine = ff.shard(mine, on) if height * width > 1 and ranks > 1 else mine
        if step == 2:
            with torch.no_grad():
                model(mine)
        if step == 0 and is_rehearsed:
            with kept_attributes(net):
                model(mine)
        model(mine).sin().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole_value(parameter.detach()) for parameter in net.parameters()]


def _apart(height: int, width: int, is_rehearsed: bool) -> None:
    ranks = torch.distributed.get_world_size()
    for build in NETS:
        found, expected = _steps(build, ranks, height, width, is_rehearsed), _steps(build, 1, 1, 1)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("ranks", "height", "width", "is_rehearsed"),
    [(2, 1, 2, False), (2, 1, 1, False), (4, 1, 2, False), (2, 1, 2, True)],
)
def test_what_is_taken_of_a_unit_is_whole(ranks: int, height: int, width: int, is_rehearsed: bool) -> None:
    rank_group(ranks).run(_apart, height, width, is_rehearsed)


def _accumulated(ranks: int) -> list[Tensor]:
    """Two losses of one pass, one after the other, and one of another pass; the last two within no_sync()."""
    on = mesh(1, ranks)
    torch.manual_seed(0)
    net, images = Before().double(), torch.randn(2, 3, 7, 10, dtype=torch.float64)
    with mock.patch.object(units, "_SMALL_BYTES", 0):
        model = ff.parallelize(net, on, shard_parameters=True) if ranks > 1 else net
    mine = ff.shard(images, on) if ranks > 1 else images
    first, second = model(mine), model(mine.cos())
    first.mean().backward(retain_graph=True)
    first.square().mean().backward()
    second.mean().backward()
    if isinstance(model, nn.Module) and ranks > 1:
        with model.no_sync():  # type: ignore[operator]
            model(mine).sin().mean().backward()
    else:
        model(mine).sin().mean().backward()
    model(mine).cos().mean().backward()
    return [whole_value(parameter.grad) for parameter in net.parameters() if parameter.grad is not None]


def test_several_backward_passes() -> None:
    expected = _accumulated(1)
    for found in rank_group(2).run(_accumulated, 2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def _held_after_a_pass() -> list[bool]:
    on = mesh(1, 2)
    with mock.patch.object(units, "_SMALL_BYTES", 0):
        model = ff.parallelize(Functional(), on, shard_parameters=True)
    out = model(ff.shard(torch.zeros(1, 3, 4, 6), on))
    kinds = [all(hasattr(p, "full_tensor") for p in model.parameters())]
    out.mean().backward()
    return [*kinds, all(hasattr(p, "full_tensor") for p in model.parameters())]


def test_it_is_sharded_again_after_each_pass() -> None:
    assert rank_group(2).run(_held_after_a_pass) == [[True, True]] * 2


class Penalised(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(parameter.square().sum() for parameter in self.parameters())


def _penalised() -> None:
    on = mesh(1, 2)
    with mock.patch.object(units, "_SMALL_BYTES", 0):
        model = ff.parallelize(Penalised(), on, shard_parameters=True)
    model(ff.shard(torch.zeros(1, 3, 4, 6), on))


def test_what_goes_over_all_parameters_is_told_what_to_do() -> None:
    with pytest.raises(RankFailure, match=r"take them by name .*, or in the loss by parameter.full_tensor\(\)"):
        rank_group(2).run(_penalised)


def test_a_parameter_stands_for_the_one_in_its_place() -> None:
    module = nn.Linear(3, 2, bias=False)
    kept, module.weight = module.weight, nn.Parameter(torch.ones(2, 3))
    stand_in(kept, module, "weight")
    assert isinstance(kept, Replaced)
    assert kept.shape == (2, 3)
    assert repr(kept) == repr(module.weight)
    (kept * 2).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]
