"""Parameters with hooks that one replica alone uses, or one rank alone has; larger than what goes by mailboxes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from fullframe.model import hooked
from fullframe.ranks.channel import channel_of
from fullframe.ranks.groups import group_of_all
from tests.exactness import mesh, relative
from tests.rank_group import RankFailure, rank_group

WIDTH = 300


class Net(nn.Module):
    """A layer that all samples use, one that some do, and two behind it, which backward comes to before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.last, self.end = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = self.first(x)
        x = x + self.some(x) if uses else x
        return self.end(self.last(x))  # type: ignore[no-any-return]


def as_by_nccl() -> None:
    """What is sent in the group of all ranks does not tell what it is."""
    channel = channel_of(group_of_all())
    channel.boxes, channel.carrier, channel.tagged, channel.gathers = None, None, False, True


def _gradients(names: tuple[str, ...], by_message: bool) -> list[float]:
    """Of three passes, against one process's; `by_message`: messages tell what they are, as by gloo."""
    on = mesh(1, 1)
    torch.manual_seed(0)
    here = Net().double()
    torch.manual_seed(0)
    there = Net().double()
    for name in names:
        for net in (here, there):
            getattr(net, name).weight.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
    model = ff.parallelize(there, on)
    if not by_message:
        as_by_nccl()
    found = []
    for step in range(3):
        images = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        uses = [step % 2 == 0, step == 2]
        here.zero_grad()
        there.zero_grad()
        losses = [here(image, use).sin().mean() for image, use in zip(images, uses, strict=True)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        rank = dist.get_rank()
        model(images[rank], uses[rank]).sin().mean().backward()
        for mine, its in zip(here.parameters(), there.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None)
            found += [] if mine.grad is None or its.grad is None else [relative(mine.grad, its.grad)]
    return found


@pytest.mark.parametrize("by_message", [True, False])
def test_what_one_replica_uses_is_averaged_apart_from_the_buckets_of_ddp(by_message: bool) -> None:
    for errors in rank_group(2).run(_gradients, ("some",), by_message):
        assert len(errors) == 4 + 3 + 4
        assert max(errors) < 1e-11


class Pair(nn.Module):
    """Two parameters of one shape, used on one line, in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor, turned: bool) -> Tensor:
        return torch.stack([(x * each).sin().mean() for each in ([self.b, self.a] if turned else [self.a, self.b])])


def _turned(_: tuple[str, ...], by_message: bool) -> None:
    net = Pair()
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model = ff.parallelize(net, mesh(1, 1))
    if not by_message:
        as_by_nccl()
    model(torch.ones(2, 3, dtype=torch.float64), dist.get_rank() == 1).sum().backward()


@pytest.mark.parametrize("by_message", [True, False])
@pytest.mark.parametrize("program", [_gradients, _turned])
def test_hooks_that_replicas_come_to_in_other_orders_are_refused_on_all_ranks(program: Any, by_message: bool) -> None:
    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(program, ("some", "first"), by_message)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["DivergenceError"] * 2


def _noted_by_one(width: int, after: int) -> list[float]:
    """A hook on the first rank alone, which notes gradients, from the pass `after` on; those of one process."""
    on, noted = mesh(1, width), list[Tensor]()
    nets = [nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 1, 1)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    model = ff.parallelize(nets[1], on)
    images = torch.randn(2 // width, 1, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        if step == after and dist.get_rank() == 0:
            nets[1][0].weight.register_hook(noted.append)
        for net in nets:
            net.zero_grad()
        (sum(nets[0](image).sin().mean() for image in images) / len(images)).backward()
        model(ff.shard(images[on.get_local_rank("data")], on)).sin().mean().backward()
    hooked = [relative(nets[0][0].weight.grad, gradient) for gradient in noted[-1:]]
    return [*hooked, *(relative(a.grad, b.grad) for a, b in zip(*(net.parameters() for net in nets), strict=True))]


@pytest.mark.parametrize("width", [1, 2])
def test_a_hook_on_one_rank_alone_notes_the_job_s_gradient_and_nobody_waits(width: int) -> None:
    first, other = rank_group(2).run(_noted_by_one, width, 0)
    assert len(first) == 5 and len(other) == 4
    assert max(first + other) < 1e-12


def test_the_group_is_opened_once_there_are_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the pass in which the first comes, and not by a job without any: it takes memory on a GPU."""
    opened: list[str] = []
    for name, fake in {"group_of_all": lambda: None, "open_group_of_all": opened.append}.items():
        monkeypatch.setattr(hooked, name, fake)
    monkeypatch.setattr(hooked, "averages_others", lambda: False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(hooked, "on_any_rank_each", lambda flags, checksum: (flags, True))
    spatial: Any = SimpleNamespace(
        size=2, channel=SimpleNamespace(tagged=True), mesh=SimpleNamespace(device_type="gpu")
    )
    means, net = hooked.MeansForHooks(spatial, True), Pair()
    means.tell(net.parameters())
    means.open(net.parameters())
    assert not opened
    net.a.register_post_accumulate_grad_hook(print)
    means.open(net.parameters())
    assert opened == ["gpu"]
