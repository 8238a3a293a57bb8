"""What forward leaves in attributes is differentiated with whole parameters, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import GradientError
from fullframe.model.sharding.left import LeftIn
from tests.exactness import mesh, relative
from tests.rank_group import RankFailure, rank_group

LEFT: dict[str, Any] = {
    "a penalty of a weight": lambda block, y: block.conv.weight.square().mean(),
    "a head's map": lambda block, y: block.head(y),
    "within others": lambda block, y: {"maps": [y, block.head(y)], "names": ["y", "head"]},
    "a pooled value": lambda block, y: y.mean(),
    "a weight": lambda block, y: block.conv.weight,
    "a view of one": lambda block, y: block.conv.weight.detach().flatten(),
}
REFUSED = ("a weight", "a view of one")


class Block(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.head, self.what = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 1, 1), what

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        self.left = LEFT[self.what](self, y)
        return y


class Net(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 4, 3, padding=1), nn.Sequential(*(Block(what) for _ in range(4)))
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        self.kept = self.last(x)
        return x.detach()


def _loss(model: nn.Module, net: Net, x: Tensor) -> Tensor:
    """Of what was left alone: backward reaches nothing that forward returned."""
    model(x)
    left = [block.left["maps"][1] if block.what == "within others" else block.left for block in net.blocks]  # type: ignore[index,union-attr]
    return net.kept.square().mean() + sum(each.square().mean() for each in left)  # type: ignore[no-any-return]


def _off(what: str) -> float:
    torch.manual_seed(0)
    plain, on = Net(what).double(), mesh(1, 2)
    net = Net(what).double()
    net.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 7, 11, dtype=torch.float64)
    model = ff.parallelize(net, on, shard_parameters=True)
    for _ in range(2):
        _loss(plain, plain, x).backward()
        _loss(model, net, ff.shard(x, on)).backward()
    pairs = zip(plain.parameters(), net.parameters(), strict=True)
    return max(relative(p.grad, q.grad.full_tensor()) for p, q in pairs if p.grad is not None)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("what", [what for what in LEFT if what not in REFUSED])
def test_what_is_left_in_attributes_has_one_process_s_gradient(what: str) -> None:
    assert max(rank_group(2).run(_off, what)) < 1e-12


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_a_gathered_parameter_is_refused_by_the_name_of_the_attribute(what: str) -> None:
    with pytest.raises(RankFailure, match=r"GradientError: .* in the attribute blocks\.0\.left, whose memory"):
        rank_group(2).run(_off, what)


class Rows(nn.Module):
    """Rows read by torch's own recurrent modules, which list their parameters in an attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.read = nn.Conv2d(3, 4, 3, padding=1), getattr(nn, kind)(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.stem(x).mean(3).transpose(1, 2))[0]  # type: ignore[no-any-return]


def _rows_off(kind: str) -> float:
    torch.manual_seed(0)
    plain, on = Rows(kind).double(), mesh(1, 2)
    net = Rows(kind).double()
    net.load_state_dict(plain.state_dict())
    model = ff.parallelize(net, on, shard_parameters=True)
    for seed in range(2):
        x = torch.randn(2, 3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        plain(x).square().mean().backward()
        model(ff.shard(x, on)).square().mean().backward()
        with torch.no_grad():
            for both in (plain, net):
                for p in both.parameters():
                    p -= 0.5 * p.grad  # type: ignore[operator]
    pairs = zip(plain.parameters(), net.parameters(), strict=True)
    return max(relative(p.grad, q.grad.full_tensor()) for p, q in pairs)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_recurrent_modules_may_be_sharded(kind: str) -> None:
    assert max(rank_group(2).run(_rows_off, kind)) < 1e-12


def test_modules_of_units_within_are_theirs() -> None:
    assert issubclass(GradientError, RuntimeError)
    left = LeftIn(net := Net("a pooled value"), "model")
    assert [path for path, _ in left._modules][:3] == ["model", "model.stem", "model.blocks"]
    assert len(left._modules) == len([*net.modules()])
