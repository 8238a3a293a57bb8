"""Sums and gathers over the ranks of a group, with and without a gradient."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from fullframe.ranks.adjoint import linear
from fullframe.ranks.channel import channel_of
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.raw_bytes import in_bytes, plain
from fullframe.ranks.recording import recorder
from fullframe.ranks.shared_memory import fits
from fullframe.ranks.tags import line
from fullframe.ranks.waiting import waiting_for_ranks

# By its name since torch 2.13, or before.
_scatter_in_one: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The process group is called itself, as `dist.all_reduce` calls it, in a third of that one's time.
_TO_SUM, _TO_GATHER = c10d.AllreduceOptions(), c10d.AllgatherOptions()
_TO_SUM.asyncOp = _TO_GATHER.asyncOp = False
_COMMON = frozenset((torch.float32, torch.float64, torch.int64, torch.uint8))  # to all backends; others go as bytes


def all_sum(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `value` over the ranks of `group`, on all of them; differentiable.

    The gradient of a summand is the sum of all copies' gradients.
    """
    if dist.get_world_size(group) == 1:
        return value
    add = partial(all_sum_no_grad, group=group)
    return linear(value, add, add)


def all_sum_no_grad(
    value: Tensor, group: dist.ProcessGroup, into_itself: bool = False, at: str | None = None
) -> Tensor:
    """The sum of `value` over the ranks of `group`; outside autograd, in a new tensor.

    `into_itself` allows to write it over `value`, which then is contiguous and nobody else's. `at` stands for the line
    where that is known already.
    """
    by = recorder()
    if by is not None:
        return by.all_sum(value, group)
    channel = channel_of(group)
    boxes = channel.boxes
    if boxes is not None and value.is_cpu and value.numel() and fits(value):
        value = value.detach().contiguous()
        return boxes.together(channel.ranks, channel.head("sum", at or line(), value), value, _sum)
    total = value
    if not into_itself:
        total = (value.detach() if value.requires_grad else value).clone(memory_format=torch.contiguous_format)
    if channel.others and total.numel():
        if channel.tagged:
            channel.agree("sum", total, at)
        sent = channel.placed(total)
        numbers = torch.view_as_real(sent) if sent.is_complex() else sent
        with waiting_for_ranks():
            work = group.allreduce([numbers], _TO_SUM)
            if work is not None:  # else the backend has waited
                work.wait()
        if sent is not total:
            total.copy_(sent)
    return total


def _sum(values: list[Tensor]) -> Tensor:
    """In rank order, so equal to the last bit on all ranks."""
    if len(values) == 2:
        return values[0] + values[1]
    return _stacked(values).sum(0, dtype=values[0].dtype)


def _stacked(values: list[Tensor]) -> Tensor:
    """(ranks, ...), whatever autocast is on: the CPU's would refuse tensors of the other 16-bit dtype."""
    with torch._C._DisableAutocast():
        return torch.stack(values)


def all_owned(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each element from the one rank of `group` that has it, where the others have zeros; differentiable.

    On all ranks, to the last bit, as bytes are added: also of NaN, signed zeros and short dtypes.
    """
    if dist.get_world_size(group) == 1:
        return value

    def add_bytes(value: Tensor) -> Tensor:
        found = torch.empty_like(value, memory_format=torch.contiguous_format)  # no view: it may be written to
        in_bytes(found).copy_(all_sum_no_grad(in_bytes(plain(value.detach())), group))
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
    gradients of all its copies. The memory format is kept, of which each rank has its own: so no message hangs on it.
    """
    kept = memory_format_of(part)

    def row(part: Tensor) -> Tensor:
        everyone = all_gather_no_grad(part, group, "all parts")
        shape = list(part.shape)
        shape[dim] *= len(everyone)
        everyone = everyone.movedim(0, dim)
        if kept == torch.contiguous_format:
            return torch.ops.aten._unsafe_view(everyone.contiguous(), shape)  # type: ignore[no-any-return]
        whole = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=kept)
        whole.unflatten(dim, everyone.shape[dim : dim + 2]).copy_(everyone)
        return whole

    return linear(part, row, partial(_shared_out, dim=dim, group=group))


def _shared_out(gradient: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The adjoint of `in_one_row`: each rank's part of the sum over all ranks."""
    ranks = dist.get_world_size(group)
    parts = plain(gradient.unflatten(dim, (ranks, gradient.shape[dim] // ranks)).movedim(dim, 0))
    by = recorder()
    return share_out(parts, group) if by is None else by.share_out(parts, group)


def share_out(parts: Tensor, group: dist.ProcessGroup, at: str | None = None) -> Tensor:
    """This rank's part of the sum over the ranks of `parts` (ranks, ...), contiguous; outside autograd."""
    channel = channel_of(group)
    mine = torch.empty_like(parts[0])
    if mine.numel():
        channel.agree("gradient of all parts", mine, at)
        own = channel.placed(mine)
        numbers = [torch.view_as_real(t) if t.is_complex() else t for t in (own, channel.placed(parts))]
        with waiting_for_ranks():
            _scatter_in_one(*(t.view(-1) for t in numbers), group=group)
        if own is not mine:
            mine.copy_(own)
    return mine


def all_gather_no_grad(
    value: Tensor, group: dist.ProcessGroup, kind: str = "all values", at: str | None = None
) -> Tensor:
    """`value` of every rank of `group`, stacked in rank order along a new first dim; outside autograd.

    `kind` says in a word what for. `at` stands for the line where ranks may come from different ones.
    """
    by = recorder()
    if by is not None:
        return by.all_gather(value, group, kind)
    value = plain(value.detach() if value.requires_grad else value)
    channel = channel_of(group)
    if not channel.others or not value.numel():
        return value.expand(len(channel.ranks), *value.shape).clone()
    boxes = channel.boxes
    if boxes is not None and value.is_cpu and fits(value):
        return boxes.together(channel.ranks, channel.head(kind, at or line(), value), value, _stacked)
    if channel.tagged:
        channel.agree(kind, value, at)
    mine = channel.placed(value) if channel.carrier is None else value.cpu()  # gloo gathers from the host
    everyone = mine.new_empty(len(channel.ranks), *mine.shape)
    rows, row = everyone.view(-1), mine if mine.dim() == 1 else mine.view(-1)
    if mine.dtype not in _COMMON:
        rows, row = in_bytes(rows), in_bytes(row)
    with waiting_for_ranks():
        work = group._allgather_base(rows, row, _TO_GATHER)
        if work is not None:
            work.wait()
    return everyone if mine is value else everyone.to(value.device)


def device_of_facts(group: dist.ProcessGroup, otherwise: torch.device | str) -> torch.device | str:
    """Where a tensor of what the host knows is made, to be sent: the host, if its messages go there."""
    return "cpu" if "gloo" in dist.get_backend_config(group) else otherwise
