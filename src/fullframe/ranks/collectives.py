"""Sums and gathers over the ranks of a group, with and without a gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.channel import Channel, channel_of
from fullframe.ranks.exchange import joined
from fullframe.ranks.shared_memory import Mailboxes, fits
from fullframe.ranks.tags import line
from fullframe.ranks.waiting import waiting_for_ranks


class _AllSum(torch.autograd.Function):
    """A sum over ranks, held by each of them: the gradient of a summand is the sum of all copies' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_sum_no_grad(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _AllSum.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


def all_sum(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `value` over the ranks of `group`, on all of them; differentiable."""
    if dist.get_world_size(group) == 1:
        return value
    return _AllSum.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def all_sum_no_grad(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `value` over the ranks of `group`; outside autograd, in a new tensor."""
    channel = channel_of(group)
    if channel.boxes is not None and value.device.type == "cpu" and value.numel() and fits(value):
        everyone = _through(channel.boxes, channel, value.detach().contiguous(), "sum", line())
        return everyone.sum(0, dtype=value.dtype)  # in rank order, so equal to the last bit on all ranks
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if total.numel():
        channel.agree("sum", total)
        with waiting_for_ranks():
            dist.all_reduce(total, group=group)
    return total


class _AllGather(torch.autograd.Function):
    """Every rank's value on every rank: the gradient of a rank's own is the sum of the gradients of all its copies."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_no_grad(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return all_sum(gradient, ctx.group)[dist.get_rank(ctx.group)], None


def all_gather(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`value` of every rank of `group`, stacked in rank order along a new first dim; differentiable."""
    if dist.get_world_size(group) == 1:
        return value[None]
    return _AllGather.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def all_gather_no_grad(
    value: Tensor, group: dist.ProcessGroup, kind: str = "all values", at: str | None = None
) -> Tensor:
    """`value` of every rank of `group`, stacked in rank order along a new first dim; outside autograd.

    `kind` says in a word what for. `at` stands for the line where ranks may come from different ones.
    """
    value = value.detach().contiguous()
    channel = channel_of(group)
    if not channel.others or not value.numel():
        return value.expand(len(channel.ranks), *value.shape).clone()
    if channel.boxes is not None and value.device.type == "cpu" and fits(value):
        return _through(channel.boxes, channel, value, kind, at or line())
    channel.agree(kind, value, at)
    everyone = [torch.empty_like(value) for _ in channel.ranks]
    # As bytes: gloo knows no int16, no complex numbers.
    plain = [t.view(-1).view(torch.uint8) for t in (value, *everyone)]
    with waiting_for_ranks():
        dist.all_gather(plain[1:], plain[0], group=group)
    return joined([each[None] for each in everyone], 0)


def _through(boxes: Mailboxes, channel: Channel, value: Tensor, kind: str, at: str) -> Tensor:
    """(ranks, ...) the values of all ranks, in rank order, through shared memory."""
    head = channel.head(kind, at, value)
    for rank in channel.others:
        boxes.send(rank, head, value)
    everyone = value.new_empty((len(channel.ranks), *value.shape))
    for target, rank in zip(everyone, channel.ranks, strict=True):
        if rank in channel.others:
            boxes.receive(boxes.expect(rank), head, target)
        else:
            target.copy_(value)
    return everyone
