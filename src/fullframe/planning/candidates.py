"""Every strategy that is worth a thought for a batch of frames on a cluster; plain integers, nothing is simulated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fullframe.simulation.devices.table import Cluster, Device
from fullframe.strategy import OptimizerName, Precision, Strategy

_LEAST_ROWS = 16  # a rank with less of the frame's rows or columns owns nothing of the deeper maps, and only waits
OTHER_OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw8bit", "adafactor", "sgd")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be planned: a whole job's batch of frames of rows x columns on a cluster."""

    cluster: Cluster
    batch_size: int
    rows: int
    columns: int
    precisions: tuple[Precision, ...]
    optimizers: tuple[OptimizerName, ...] = ("recipe",)
    recompute_modules: tuple[str, ...] = ()  # where the model repeats no block

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
    for data in _divisors(batch_size):
        share = ranks // data
        if share:
            powers = [1 << power for power in reversed(range(share.bit_length()))]
            for counts in ([share, *powers], powers, [1]):
                splits = ([*_splits(parts, rows, columns)] for parts in counts)
                found |= {(data, *split) for split in next(filter(None, splits))}
    # Of as many ranks those with most replicas first, and of those the shortest cuts.
    return sorted(found, key=lambda mesh: (-mesh[0] * mesh[1] * mesh[2], -mesh[0], border(mesh, rows, columns), mesh))


def border(mesh: tuple[int, int, int], rows: int, columns: int) -> float:
    """Pixels along the cuts that one rank shares with its neighbours."""
    _, height, width = mesh
    return (height > 1) * columns / width + (width > 1) * rows / height


def candidates(job: Job, precisions: tuple[Precision, ...] | None = None) -> Iterator[Strategy]:
    """Every combination, but for budgets of recompute, which need to know what a strategy leaves free."""
    for data, height, width in meshes(job.cluster.ranks, job.batch_size, job.rows, job.columns):
        base = Strategy(data=data, height=height, width=width)
        for microbatches, precision, optimizer in product(
            _divisors(job.batch_size // data), precisions or job.precisions, job.optimizers
        ):
            named = replace(base, microbatches=microbatches, precision=precision, optimizer=optimizer)
            for saved, sharded in product(_savings(job), _shardings(base.ranks)):
                yield replace(named, **saved, **sharded)


def saves_more(strategy: Strategy, other: Strategy) -> bool:
    """Whether `strategy` is `other` with less memory for more work, and else the same."""
    axes = ("data", "height", "width", "precision", "optimizer", "update_in_backward")
    if strategy == other or any(getattr(strategy, axis) != getattr(other, axis) for axis in axes):
        return False
    return (
        strategy.microbatches >= other.microbatches
        and (strategy.recompute == other.recompute or other.recompute == "none")
        and strategy.offload >= other.offload
        and strategy.shard_parameters >= other.shard_parameters
        and strategy.shard_optimizer + strategy.shard_parameters >= other.shard_optimizer
    )


def _savings(job: Job) -> list[dict[str, Any]]:
    """Ways to hold less of the activations; on the CPU host memory is all there is."""
    blocks = {"recompute": "blocks", "recompute_modules": job.recompute_modules}
    found: list[dict[str, Any]] = [{}, blocks]
    return found + [{"offload": True}, {**blocks, "offload": True}] * job.cluster.device.is_cuda


def without_recompute(strategy: Strategy) -> Strategy:
    """The same with all activations kept."""
    return replace(strategy, recompute="none", recompute_modules=(), recompute_budget_bytes=None)


def _shardings(ranks: int) -> list[dict[str, Any]]:
    return [{}] if ranks == 1 else [{}, {"shard_optimizer": True}, {"shard_parameters": True}]


def _splits(parts: int, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    for height in _divisors(parts):
        width = parts // height
        if (height == 1 or rows // height >= _LEAST_ROWS) and (width == 1 or columns // width >= _LEAST_ROWS):
            yield height, width


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
