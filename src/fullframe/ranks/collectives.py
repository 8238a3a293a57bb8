"""Sums and gathers over the ranks of a group, with and without a gradient."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.adjoint import linear
from fullframe.ranks.channel import Channel, channel_of
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.shared_memory import Mailboxes, fits
from fullframe.ranks.tags import line
from fullframe.ranks.waiting import waiting_for_ranks

# By their names since torch 2.13, or before.
_gather_in_one: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_in_one: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_sum(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `value` over the ranks of `group`, on all of them; differentiable.

    The gradient of a summand is the sum of all copies' gradients.
    """
    if dist.get_world_size(group) == 1:
        return value
    add = partial(all_sum_no_grad, group=group)
    return linear(value, add, add)


def all_sum_no_grad(value: Tensor, group: dist.ProcessGroup, into_itself: bool = False) -> Tensor:
    """The sum of `value` over the ranks of `group`; outside autograd, in a new tensor.

    `into_itself` allows to write it over `value`, which then is contiguous and nobody else's.
    """
    channel = channel_of(group)
    if channel.boxes is not None and value.device.type == "cpu" and value.numel() and fits(value):
        everyone = _through(channel.boxes, channel, value.detach().contiguous(), "sum", line())
        return everyone.sum(0, dtype=value.dtype)  # in rank order, so equal to the last bit on all ranks
    total = value if into_itself else value.detach().clone(memory_format=torch.contiguous_format)
    if total.numel():
        channel.agree("sum", total)
        with waiting_for_ranks():
            dist.all_reduce(total, group=group)
    return total


def all_owned(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each element from the one rank of `group` that has it, where the others have zeros; differentiable.

    On all ranks, to the last bit, as bytes are added: also of NaN, signed zeros and short dtypes.
    """
    if dist.get_world_size(group) == 1:
        return value

    def add_bytes(value: Tensor) -> Tensor:
        found = torch.empty_like(value, memory_format=torch.contiguous_format)  # no view: it may be written to
        raw, target = (t.view(-1).view(torch.uint8) for t in (value.detach().contiguous(), found))
        target.copy_(all_sum_no_grad(raw, group))
        return found

    add = partial(all_sum_no_grad, group=group)
    return linear(value, add_bytes, add, add)


def all_gather(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`value` of every rank of `group`, stacked in rank order along a new first dim; differentiable.

    The gradient of a rank's own value is the sum of the gradients of all its copies.
    """
    if dist.get_world_size(group) == 1:
        return value[None]

    def own(gradient: Tensor) -> Tensor:
        return all_sum_no_grad(gradient, group)[dist.get_rank(group)].clone()

    return linear(value, partial(all_gather_no_grad, group=group), own)


def in_one_row(part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks of `group`, which are of one shape, one after another along `dim`; differentiable.

    By one collective each way, where `fetch` sends each part to each rank. The gradient of a part is the sum of the
    gradients of all its copies. The memory format is kept.
    """
    if dim > 1 and memory_format_of(part) != torch.contiguous_format:
        return in_one_row(part.movedim(1, -1), dim - 1, group).movedim(-1, 1)

    def row(part: Tensor) -> Tensor:
        everyone = all_gather_no_grad(part, group, "all parts")
        shape = list(part.shape)
        shape[dim] *= len(everyone)
        everyone = everyone.movedim(0, dim)
        return torch.ops.aten._unsafe_view(everyone.contiguous(), shape)  # type: ignore[no-any-return]

    return linear(part, row, partial(_shared_out, dim=dim, group=group))


def _shared_out(gradient: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The adjoint of `in_one_row`: each rank's part of the sum over all ranks."""
    channel = channel_of(group)
    ranks = len(channel.ranks)
    parts = gradient.unflatten(dim, (ranks, gradient.shape[dim] // ranks)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(parts[0])
    if mine.numel():
        channel.agree("gradient of all parts", mine)
        numbers = [torch.view_as_real(t) if t.is_complex() else t for t in (mine, parts)]
        with waiting_for_ranks():
            _scatter_in_one(*(t.view(-1) for t in numbers), group=group)
    return mine


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
    mine = value if channel.carrier is None else value.cpu()  # gloo gathers from the host
    everyone = mine.new_empty((len(channel.ranks), *mine.shape))
    with waiting_for_ranks():
        # As bytes: gloo knows no int16, no complex numbers.
        _gather_in_one(everyone.view(-1).view(torch.uint8), mine.view(-1).view(torch.uint8), group)
    return everyone.to(value.device)


def device_of_facts(group: dist.ProcessGroup, otherwise: torch.device | str) -> torch.device | str:
    """Where a tensor of what the host knows is made, to be sent: the host, if its messages go there."""
    return "cpu" if "gloo" in dist.get_backend_config(group) else otherwise


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
