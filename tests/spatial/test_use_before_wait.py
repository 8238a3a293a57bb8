"""Nothing is used before it was waited for: on ranks of which what is received is NaN until `wait` has returned.

NCCL fills a buffer at some time before `wait`, and gloo through shared memory within it, so what is read too early is
often right. Here the exchange takes the way it takes between GPUs, by gloo, into buffers that `wait` copies from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fullframe as ff
from fullframe.ranks import channel
from fullframe.ranks.exchange import InFlight
from fullframe.ranks.mesh import forget_meshes
from fullframe.simulation.fake.replaced import replaced
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import TOLERANCE, all_cases, differences_of

FAMILIES = (
    "attention", "convolution", "grid_sample", "indexing", "integrals", "joining", "normalization", "padding", "points",
    "pooling", "resampling", "reshape", "scan", "transposed_convolution", "unfolding", "unpooling",
)  # fmt: skip


class _Arriving:
    """A receive into `target`, which holds NaN, or the largest integer, until it is waited for."""

    def __init__(self, work: Any, buffer: Tensor, target: Tensor):
        self._work, self._buffer, self._target = work, buffer, target
        target.fill_(torch.nan if target.is_floating_point() or target.is_complex() else _largest(target.dtype))

    def wait(self) -> bool:
        self._work.wait()
        self._target.copy_(self._buffer)
        return True


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


@contextmanager
def poisoned() -> Iterator[list[int]]:
    """Inside, messages go as between GPUs, and what is received is poisoned; how many were."""
    received, counted = dist.ProcessGroup.recv, [0]

    def recv(group: dist.ProcessGroup, tensors: list[Tensor], rank: int, tag: int) -> _Arriving:
        (target,) = tensors
        buffer = torch.empty_like(target)
        counted[0] += 1
        return _Arriving(received(group, [buffer], rank, tag), buffer, target)

    def unnoticed(group: dist.ProcessGroup) -> channel.Channel:
        return channel.Channel(tuple(dist.get_process_group_ranks(group)))

    forget_meshes()
    with replaced(dist.ProcessGroup, "recv", recv), replaced(channel, "_channel", unnoticed):
        try:
            yield counted
        finally:
            forget_meshes()


def _differences() -> tuple[dict[str, float], int]:
    found = {}
    with poisoned() as counted:
        for name, case in all_cases().items():
            if name.partition(":")[0] in FAMILIES:
                answers = differences_of(case, [(1, 2)], [case.smallest])
                found[name] = max(0.0 if error <= TOLERANCE else 1.0 for _, error in answers)
    return found, counted[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_no_rule_uses_what_has_not_come() -> None:
    for found, counted in rank_group(2).run(_differences, timeout_seconds=800):
        assert len(found) > 100 and counted > len(found)
        assert {name for name, wrong in found.items() if wrong} == set()


def _too_early() -> tuple[bool, bool]:
    """Whether a convolution is right, and whether it is when it does not wait."""
    case = all_cases()["convolution: conv 3/1/1"]
    waited = InFlight.wait

    def at_once(flight: InFlight, *after: Any) -> list[Tensor]:
        taken = [message.tensor.clone() for message in flight._receives]
        waited(flight, *after)
        return taken

    with poisoned():
        right = [error for _, error in differences_of(case, [(1, 2)], [case.smallest])]
        InFlight.wait = at_once  # type: ignore[method-assign]
        try:
            wrong = [error for _, error in differences_of(case, [(1, 2)], [case.smallest])]
        finally:
            InFlight.wait = waited  # type: ignore[method-assign]
    return max(right) <= TOLERANCE, max(wrong) <= TOLERANCE


def test_what_is_used_before_it_has_come_is_found() -> None:
    assert rank_group(2).run(_too_early) == [(True, False)] * 2


def _whole() -> bool:
    with poisoned():
        full = torch.arange(24.0).view(1, 1, 4, 6)
        return torch.equal(ff.shard(full, mesh(1, 2)).full(), full)


def test_the_numbers_come_through() -> None:
    assert rank_group(2).run(_whole) == [True, True]
