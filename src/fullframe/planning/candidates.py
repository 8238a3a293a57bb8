"""Every strategy that is worth a thought for a batch of frames on a cluster; plain integers, nothing is simulated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fullframe.errors import StrategyError
from fullframe.simulation.devices.table import Cluster, Device
from fullframe.strategy import TECHNIQUES, Strategy, divisors
from fullframe.technique import Asked, Precision, Technique

_LEAST_ROWS = 16  # a rank with less of the frame's rows or columns owns nothing of the deeper maps, and only waits

Mesh = tuple[int, int, int, int]  # data, depth, height, width
Frame = tuple[int, int, int]  # slices, rows, columns; an image is of one slice


@dataclass(frozen=True, kw_only=True)
class Job(Asked):
    """What is to be planned: a whole job's batch of frames of rows x columns on a cluster, or of volumes of slices."""

    cluster: Cluster
    rows: int
    columns: int
    slices: int = 1

    @property
    def frame(self) -> Frame:
        """(slices, rows, columns)"""
        return self.slices, self.rows, self.columns

    def of(self, strategy: Strategy) -> "Shares":
        """What one rank has to do with `strategy`."""
        frames = self.batch_size / strategy.data
        part = 1 / strategy.parts
        return Shares(held=frames / strategy.microbatches * part, work=frames * part)


@dataclass(frozen=True)
class Shares:
    """Of one rank, in frames: what a microbatch holds, and what a step works through."""

    held: float
    work: float


def precisions_of(device: Device) -> tuple[Precision, ...]:
    """The precisions that are worth their loss of digits on a device, fastest first; "fp32" is always among them.

    bf16 where the device has it, else fp16 with loss scaling; on the CPU only what was measured to be faster.
    """
    half: Precision = "bf16" if device.has_bf16 else "fp16"
    choices: tuple[Precision, ...] = (half, "tf32")
    faster = [p for p in choices if device.matmul_flops_per_second.get(p, 0) > device.rate("fp32")]
    return (*sorted(faster, key=device.rate, reverse=True), "fp32")


def meshes(ranks: int, batch_size: int, frame: Frame) -> list[Mesh]:
    """Those on up to `ranks` ranks, most ranks first.

    Replicas share out the batch evenly; each is split over all ranks that there are for it, or the largest power of
    two of them that the frame permits, or not at all. No rank gets less than 16 slices, rows or columns of a split
    frame.
    """
    found = set[Mesh]()
    for data in divisors(batch_size):
        share = ranks // data
        if share:
            powers = [1 << power for power in reversed(range(share.bit_length()))]
            for counts in ([share, *powers], powers, [1]):
                splits = ([*_splits(parts, frame)] for parts in counts)
                found |= {(data, *split) for split in next(filter(None, splits))}
    # Of as many ranks those with most replicas first, and of those the shortest cuts.
    return sorted(found, key=lambda mesh: (-prod(mesh), -mesh[0], border(mesh, frame), mesh))


def mesh_of(strategy: Strategy) -> Mesh:
    """(data, depth, height, width)"""
    return strategy.data, strategy.depth, strategy.height, strategy.width


def border(mesh: Mesh, frame: Frame) -> float:
    """Pixels along the cuts that one rank shares with its neighbours."""
    own = [size / ranks for size, ranks in zip(frame, mesh[1:], strict=True)]
    return sum(prod(own) / rows for rows, ranks in zip(own, mesh[1:], strict=True) if ranks > 1)


def candidates(job: Job) -> Iterator[Strategy]:
    """Every combination of what the techniques offer, the simplest of each mesh first."""
    for data, depth, height, width in meshes(job.cluster.ranks, job.batch_size, job.frame):
        found = [Strategy(data=data, depth=depth, height=height, width=width)]
        for technique in TECHNIQUES:
            found = [other for strategy in found for other in _with(technique, strategy, job)]
        yield from found


def _with(technique: Technique[Strategy], strategy: Strategy, job: Job) -> Iterator[Strategy]:
    """`strategy` with each value that the technique offers and that agrees with the rest."""
    for value in technique.choices(job, strategy) or (getattr(strategy, technique.name),):
        changed = with_value(strategy, technique, value)
        if changed is not None:
            yield changed


def with_value(strategy: Strategy, technique: Technique[Strategy], value: object) -> Strategy | None:
    """The strategy with this value of the technique; None where it contradicts the others."""
    if value == getattr(strategy, technique.name):
        return strategy
    try:
        changed: dict[str, Any] = {technique.name: value}
        return replace(strategy, **changed)
    except StrategyError:
        return None


def saves_more(strategy: Strategy, other: Strategy) -> bool:
    """Whether `strategy` is `other` with less memory for more work, and else the same."""
    if strategy == other or mesh_of(strategy) != mesh_of(other):
        return False
    return all(
        technique.saves(strategy, other)
        if technique.saves is not None
        else getattr(strategy, technique.name) == getattr(other, technique.name)
        for technique in TECHNIQUES
    )


def _splits(parts: int, frame: Frame) -> Iterator[tuple[int, int, int]]:
    for depth in divisors(parts):
        for height in divisors(parts // depth):
            split = depth, height, parts // depth // height
            if all(ranks == 1 or size // ranks >= _LEAST_ROWS for size, ranks in zip(frame, split, strict=True)):
                yield split
