"""Parameters with hooks that one replica alone uses, larger than what ranks of one machine send by their own memory."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from fullframe.model.hooked import MeansForHooks
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


def _gradients(hooked: tuple[str, ...], by_message: bool) -> list[float]:
    """Of three passes, against one process's; `by_message`: messages tell what they are, as by gloo."""
    on = mesh(1, 1)
    torch.manual_seed(0)
    here = Net().double()
    torch.manual_seed(0)
    there = Net().double()
    for name in hooked:
        for net in (here, there):
            getattr(net, name).weight.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
    model = ff.parallelize(there, on)
    assert isinstance(model._averaging._for_hooks, MeansForHooks)
    if not by_message:
        channel = channel_of(group_of_all())
        channel.boxes, channel.carrier, channel.tagged, channel.gathers = None, None, False, True
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


@pytest.mark.parametrize("by_message", [True, False])
def test_hooks_that_replicas_come_to_in_other_orders_are_refused_on_all_ranks(by_message: bool) -> None:
    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(_gradients, ("some", "first"), by_message)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["DivergenceError"] * 2
