"""Things timed in turn on all ranks, so that a machine that slows down slows all of them."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class Timed(NamedTuple):
    """A thing to time; `run` is None on a rank that stands by."""

    name: str
    run: Callable[[], object] | None


def slowest(seconds: float) -> float:
    """The largest over the ranks. A rank that waits here is blocked in the kernel; it does not spin."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def interleaved(variants: Sequence[Timed], rounds: int, before: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of each variant, by round; every round times all of them, each time beginning with another one."""
    for variant in variants:  # warm-up
        before()
        dist.barrier()
        if variant.run is not None:
            variant.run()
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(rounds):
        first = number % len(variants)
        for variant in [*variants[first:], *variants[:first]]:
            before()
            dist.barrier()
            begin = time.perf_counter()
            if variant.run is not None:
                variant.run()
            seconds[variant.name].append(slowest(time.perf_counter() - begin))
    return seconds


def ratio(over: list[float], under: list[float]) -> dict[str, float]:
    """Median over median, and the quartiles of the ratio within a round with the median between them."""
    low, paired, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
    return {"median": statistics.median(over) / statistics.median(under), "low": low, "paired": paired, "high": high}
