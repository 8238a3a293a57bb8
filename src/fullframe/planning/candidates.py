"""Every strategy that is worth a thought for a batch of frames on a cluster; plain integers, nothing is simulated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fullframe.errors import StrategyError
from fullframe.simulation.devices.table import Cluster, Device
from fullframe.strategy import TECHNIQUES, Asked, Precision, Strategy, Technique, divisors

_LEAST_ROWS = 16  # a rank with less of the frame's rows or columns owns nothing of the deeper maps, and only waits


@dataclass(frozen=True, kw_only=True)
class Job(Asked):
    """What is to be planned: a whole job's batch of frames of rows x columns on a cluster."""

    cluster: Cluster
    rows: int
    columns: int

    def of(self, strategy: Strategy) -> "Shares":
        """What one rank has to do with `strategy`."""
        frames = self.batch_size / strategy.data
        part = 1 / (strategy.height * strategy.width)
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


def meshes(ranks: int, batch_size: int, rows: int, columns: int) -> list[tuple[int, int, int]]:
    """(data, height, width) on up to `ranks` ranks, most ranks first.

    Replicas share out the batch evenly; each is split over all ranks that there are for it, or the largest power of
    two of them that the frame permits, or not at all. No rank gets less than 16 rows or columns of a split frame.
    """
    found = set[tuple[int, int, int]]()
    for data in divisors(batch_size):
        share = ranks // data
        if share:
            powers = [1 << power for power in reversed(range(share.bit_length()))]
            for counts in ([share, *powers], powers, [1]):
                splits = ([*_splits(parts, rows, columns)] for parts in counts)
                found |= {(data, *split) for split in next(filter(None, splits))}
    # Of as many ranks those with most replicas first, and of those the shortest cuts.
    return sorted(found, key=lambda mesh: (-mesh[0] * mesh[1] * mesh[2], -mesh[0], border(mesh, rows, columns), mesh))


def mesh_of(strategy: Strategy) -> tuple[int, int, int]:
    """(data, height, width)"""
    return strategy.data, strategy.height, strategy.width


def border(mesh: tuple[int, int, int], rows: int, columns: int) -> float:
    """Pixels along the cuts that one rank shares with its neighbours."""
    _, height, width = mesh
    return (height > 1) * columns / width + (width > 1) * rows / height


def candidates(job: Job) -> Iterator[Strategy]:
    """Every combination of what the techniques offer, the simplest of each mesh first."""
    for data, height, width in meshes(job.cluster.ranks, job.batch_size, job.rows, job.columns):
        found = [Strategy(data=data, height=height, width=width)]
        for technique in TECHNIQUES:
            found = [other for strategy in found for other in _with(technique, strategy, job)]
        yield from found


def _with(technique: Technique, strategy: Strategy, job: Job) -> Iterator[Strategy]:
    """`strategy` with each value that the technique offers and that agrees with the rest."""
    for value in technique.choices(job, strategy) or (getattr(strategy, technique.name),):
        changed = with_value(strategy, technique, value)
        if changed is not None:
            yield changed


def with_value(strategy: Strategy, technique: Technique, value: object) -> Strategy | None:
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


def _splits(parts: int, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    for height in divisors(parts):
        width = parts // height
        if (height == 1 or rows // height >= _LEAST_ROWS) and (width == 1 or columns // width >= _LEAST_ROWS):
            yield height, width
