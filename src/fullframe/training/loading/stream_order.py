"""The order of a data set without numbers: all ranks read the whole of it, and a replica keeps its share of each batch.

So it is what one process would read, whatever the mesh; the price is that each replica reads what the others keep.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fullframe.data.nested import leaves
from fullframe.errors import CheckpointError, RecipeError
from fullframe.ranks.collectives import all_gather_no_grad, device_of_facts
from fullframe.ranks.randomness import sample_randomness
from fullframe.training.loading.delivery import Collation, Sample, begun, checksum
from fullframe.training.loading.generators import generators_of, seed_generators
from fullframe.training.loading.order import NEEDS_WEIGHTS, Share, Standing
from fullframe.wording import plural

ENDED = -1  # in the place of a batch's number of samples
_LINE = "the next batch of the stream"


def of_all_ranks(samples: int, number: int, device: torch.device) -> list[list[int]]:
    """Of each rank the samples of the batch that it read, `ENDED` where it has none, and the batch's checksum."""
    everyone = dist.group.WORLD
    assert everyone is not None
    mine = torch.tensor([samples, number], device=device_of_facts(everyone, device))
    found: list[list[int]] = all_gather_no_grad(mine, everyone, "batches of a stream", _LINE).tolist()
    return found


class StreamOrder(Standing):
    """Where this replica stands in an `IterableDataset`, and what it keeps of it.

    Batches are those of one process's DataLoader with as many workers, each of which reads by `get_worker_info()` its
    own part. Raises RecipeError where batches cannot be shared out.
    """

    def __init__(self, loader: "DataLoader[Any]", seed: int, share: Share, device: torch.device):
        super().__init__(share)
        if loader.batch_size is None:
            raise RecipeError(
                "ShardedLoader shares batches out, and this DataLoader's data set makes them itself; give the "
                "DataLoader batch_size=... and single samples, or loop over ff.ShardedStream(batches, mesh)"
            )
        share.require_divides(loader.batch_size)
        if share.replicas > 1 and not (loader.drop_last or share.weighted):  # rather than at the end of an epoch
            raise RecipeError(
                f"where a {type(loader.dataset).__name__} ends is not known, and {share.replicas} replicas may not be "
                f"able to share its last batch evenly; {NEEDS_WEIGHTS}"
            )
        self._batch_size, self._seed, self._device = loader.batch_size, seed, device
        self._name, self._workers = type(loader.dataset).__name__, loader.num_workers
        self.reading = _Reading(loader, seed, share)
        self._made: deque[tuple[int, int]] = deque()  # of batches not yet handed out, their samples and checksums
        self._size = self._read = 0  # of the last one handed out its samples, and the checksum of all up to it

    def begin(self) -> None:
        """Tell those who read which epoch it is, and how many batches of it are behind."""
        self.reading.begin(self.epoch, self.position)
        self._made.clear()

    @property
    def words(self) -> str:
        """What the order follows from, beside the place in it."""
        return (
            f"samples as a {self._name} gives them by seed {self._seed}, {self._batch_size} a batch, "
            f"with {self._workers} workers"
        )

    def agreed(
        self, made: Iterable[tuple[Any, int, int, int]], progress: Callable[[int, int], object]
    ) -> Iterator[tuple[Any, int]]:
        """Batches and their checksums, from where the epoch stands, once all ranks have read the same.

        Raises RecipeError where they have not, or where an epoch has no batch, and CheckpointError where what is
        behind was not what had been read: on all ranks.
        """
        behind, read = self.position, 0
        before = self._read if behind else 0
        batches = begun(made)
        for number in count():
            batch, kept, samples, mark = next(batches, (None, 0, ENDED, 0))
            self._require_same(samples, mark)
            if read != before and (number == behind or (samples == ENDED and number < behind)):
                raise CheckpointError(
                    f"{behind} batches of epoch {self.epoch} had been read, and the {self._name} now gives others; let "
                    "what it gives follow from torch's, numpy's or Python's random states, from generators that it "
                    "holds and from set_epoch(epoch), and from nothing that changes as it is read"
                )
            if samples == ENDED:
                if not number:
                    raise RecipeError(
                        f"the {self._name} gives no batch of {plural(self._batch_size, 'sample')} in epoch "
                        f"{self.epoch}; does its folder or file list exist?"
                    )
                return
            read = zlib.crc32(repr((samples, mark)).encode(), read)
            if number < behind:
                progress(number, behind)
                continue
            self._made.append((samples, read))
            yield batch, kept

    def advance(self) -> None:
        super().advance()
        self._size, self._read = self._made.popleft()

    @property
    def weight(self) -> float:
        return self._share.weight(self._size) if self.position else 1.0

    def __len__(self) -> int:
        raise TypeError(f"how many batches a {self._name} gives is known once it has given them")

    def _identity(self) -> dict[str, int]:
        return {"batch_size": self._batch_size, "workers": self._workers, "seed": self._seed}

    def _checksum(self) -> int | None:
        return self._read

    def _go_on(self, checksum: int | None) -> None:
        self._read = checksum or 0

    def _require_same(self, samples: int, mark: int) -> None:
        """Raises RecipeError on all ranks where they have not read the same samples."""
        found = of_all_ranks(samples, mark, self._device)
        if other := next((rank for rank, each in enumerate(found) if each != found[0]), 0):
            what = "ends on one of them" if ENDED in (found[0][0], found[other][0]) else "differs"
            raise RecipeError(
                f"ranks 0 and {other} do not read the same samples of the {self._name}: what they read {what}. Give "
                "all ranks the same files and the whole stream, not a part by rank, as ShardedLoader keeps each "
                "replica's share itself, what shuffles by the clock a seed (WebDataset: detshuffle=True, seed=...); "
                "a stream whose parts are shared out already goes through ff.ShardedStream"
            )


class _Kept(NamedTuple):
    """What is kept of a batch of the whole job: this replica's samples, none where the batch is behind."""

    mine: list[Sample]
    samples: int
    checksum: int


class _Reading(IterableDataset[_Kept]):
    """The stream in batches of the whole job, in the process that reads it."""

    def __init__(self, loader: "DataLoader[Any]", seed: int, share: Share):
        self.dataset, self._seed, self._share = loader.dataset, seed, share
        self._batch_size, self._drop_last = loader.batch_size or 1, loader.drop_last
        self._start = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()  # seen by workers that live on

    def begin(self, epoch: int, behind: int) -> None:
        """Start the next iteration at `epoch`, of which so many batches need not be collated again."""
        self._start[0], self._start[1] = epoch, behind

    def __iter__(self) -> Iterator[_Kept]:
        epoch, behind = self._start.tolist()
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        samples, share = self._samples(epoch, worker), self._share
        for number in count():
            mine, last, size, mark = [], None, 0, 0
            for sample in islice(samples, self._batch_size):
                if size % share.replicas == share.replica:
                    mine.append(sample)
                last, size, mark = sample, size + 1, _checksum_of(sample.value, mark)
            if last is None or (self._drop_last and size < self._batch_size):
                return
            # Workers take turns, and those that have ended leave theirs to the others.
            is_behind = number < behind // workers
            yield _Kept([] if is_behind else mine or [last], size, mark)

    def _samples(self, epoch: int, worker: int) -> Iterator[Sample]:
        dataset: Any = self.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        # Not those of a worker's own: from one it may draw an order of files of which each worker takes a part.
        seed_generators(generators_of(dataset), self._seed, epoch)
        stream: Iterator[Any] | None = None
        for number in count():
            place = (epoch, worker, number)
            with sample_randomness(self._seed, *place):
                stream = iter(dataset) if stream is None else stream
                try:
                    value = next(stream)
                except StopIteration:
                    return
            yield Sample(value, (), None, place)


@dataclass(frozen=True)
class StreamCollation:
    """Collates what was kept of a batch: (batch, its checksum, samples of the whole job's, the checksum of those)."""

    collation: Collation

    def __call__(self, kept: _Kept) -> tuple[Any, int, int, int]:
        batch, own = self.collation(kept.mine) if kept.mine else (None, 0)
        return batch, own, kept.samples, kept.checksum


def _checksum_of(value: Any, start: int) -> int:
    """Of the numbers, words, tensors, arrays and images that a sample consists of."""
    plain = (np.asarray(one) if hasattr(one, "__array_interface__") else one for one in leaves(value))
    return checksum([one for one in plain if isinstance(one, (Tensor, np.ndarray, str, bytes, int, float))], start)
