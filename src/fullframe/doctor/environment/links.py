"""How many bytes a second go between every pair of ranks, one pair after the other."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from fullframe.doctor.environment import kinds
from fullframe.doctor.finding import Finding
from fullframe.ranks import device
from fullframe.ranks.agreement import from_all_ranks

_BYTES = 8 << 20
_ROUNDS = 5
_SLOW = 0.5  # of the median pair


def measure_links(file: Path) -> None:
    """All ranks call it in a process group; the first writes {"0-1": bytes a second} into `file`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpus = "nccl" in str(dist.get_backend())
    place = device.current("cuda" if gpus else "cpu")
    data, found = torch.zeros(_BYTES, dtype=torch.uint8, device=place), dict[str, float]()
    for first in range(ranks):
        for second in range(first + 1, ranks):
            dist.barrier()
            if rank in (first, second):
                found[f"{first}-{second}"] = _of_pair(data, rank == first, second if rank == first else first)
    everyone = from_all_ranks(found)
    if rank == 0:
        file.write_text(json.dumps({pair: rate for mine in everyone for pair, rate in mine.items()}))


def _of_pair(data: torch.Tensor, is_first: bool, other: int) -> float:
    """Bytes a second there and back, the median of some rounds."""
    rates = []
    for _ in range(_ROUNDS + 1):  # the first connects
        started = time.perf_counter()
        for sends in (is_first, not is_first):
            dist.send(data, other) if sends else dist.recv(data, other)
        if data.is_cuda:
            torch.cuda.synchronize()
        rates.append(2 * data.numel() / (time.perf_counter() - started))
    return median(rates[1:])


def judged_links(rates: Mapping[str, float]) -> Iterator[Finding]:
    """A finding for the slowest pair, where there are others to compare it with."""
    if len(rates) < 3:
        return
    usual = median(rates.values())
    pair = min(rates, key=lambda name: rates[name])
    if rates[pair] < _SLOW * usual:
        yield kinds.SLOW_LINK.found(
            f"{rates[pair] / 1e9:.3g} GB/s between ranks {pair.replace('-', ' and ')}, {usual / 1e9:.3g} GB/s between "
            f"most of {len(rates)} pairs"
        )


def said_of_links(rates: Mapping[str, float], backend: str) -> Sequence[str]:
    """One line a pair."""
    return [f"{backend}, ranks {pair}: {rate / 1e9:.3g} GB/s" for pair, rate in sorted(rates.items())]
