"""What a program reads of its DataLoaders: which samples, and how long it waits for them."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import dataloader as torch_dataloader

from fullframe.data.nested import tensors_in
from fullframe.doctor.probes.clock import seconds
from fullframe.doctor.probes.notes import BatchRead, Event, Loader
from fullframe.doctor.probes.sketches import checksum_of_batch
from fullframe.simulation.fake.replaced import replaced
from fullframe.training.loading.listing import length_of, listing_of

_MOST_PLANNED = 100_000
_ITERATION = torch_dataloader._BaseDataLoaderIter


class Loading:
    """Notes every iteration over a DataLoader and every batch that comes of it."""

    def __init__(self, note: Callable[[Event], None]):
        self._note = note
        self._numbers: dict[int, int] = {}  # id of a loader -> its number
        self._epochs: dict[int, int] = {}  # number -> iterations so far
        self._alive: list[weakref.ref[DataLoader[Any]]] = []
        self._iterations: weakref.WeakKeyDictionary[Any, _Iteration] = weakref.WeakKeyDictionary()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, torch's DataLoader tells of itself."""
        begin, take = DataLoader.__iter__, _ITERATION.__next__
        index: Callable[[Any], Any] = _ITERATION._next_index
        early: dict[int, list[tuple[int, ...] | None]] = {}

        def __iter__(loader: "DataLoader[Any]") -> Any:
            kept = getattr(loader, "_iterator", None)  # persistent workers go on with it
            if kept is not None:
                self._iterations.pop(kept, None)
            iteration = self._begin(loader)
            found = begin(loader)
            iteration.ahead.extend(early.pop(id(found), ()))
            self._iterations[found] = iteration
            return found

        def __next__(iterator: Any) -> Any:
            started = seconds()
            batch = take(iterator)
            waited = max(seconds() - started, 0.0)
            if iterator in self._iterations:
                self._note(self._iterations[iterator].read(batch, waited))
            return batch

        def _next_index(iterator: Any) -> Any:
            found = index(iterator)
            if iterator in self._iterations:
                self._iterations[iterator].ahead.append(_indices(found))
            else:  # workers are handed their first batches while the iterator is made
                early.setdefault(id(iterator), []).append(_indices(found))
            return found

        with (
            replaced(DataLoader, "__iter__", __iter__),
            replaced(_ITERATION, "__next__", __next__),
            replaced(_ITERATION, "_next_index", _next_index),
        ):
            yield

    def _begin(self, loader: "DataLoader[Any]") -> "_Iteration":
        if id(loader) not in self._numbers:
            self._numbers[id(loader)] = len(self._numbers)
            self._alive.append(weakref.ref(loader))
        number = self._numbers[id(loader)]
        epoch = self._epochs[number] = self._epochs.get(number, 0) + 1
        self._note(
            Loader(
                loader=number,
                epoch=epoch,
                samples=length_of(loader.dataset),
                workers=loader.num_workers,
                sampler=_name(loader),
                planned=_planned(loader),
                trains=torch.is_grad_enabled(),
                listing=_listing(loader.dataset),
            )
        )
        return _Iteration(number, epoch)


class _Iteration:
    """One iteration over one loader."""

    def __init__(self, loader: int, epoch: int):
        self._loader, self._epoch, self._number = loader, epoch, 0
        self.ahead: deque[tuple[int, ...] | None] = deque()  # samples that were asked for and have not come yet

    def read(self, batch: Any, waited: float) -> BatchRead:
        self._number += 1
        tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
        return BatchRead(
            loader=self._loader,
            epoch=self._epoch,
            number=self._number,
            indices=self.ahead.popleft() if self.ahead else None,
            waited=waited,
            contents=checksum_of_batch(batch),
            samples=max(tensors, key=torch.Tensor.numel).shape[0] if tensors else None,
        )


def _indices(found: Any) -> tuple[int, ...] | None:
    """Numbers of samples of what a sampler gives; a pair (epoch, number) counts by its last."""
    items = found if isinstance(found, (list, tuple)) else [found]
    numbers = [item[-1] if isinstance(item, tuple) and item else item for item in items]
    return tuple(int(n) for n in numbers) if all(isinstance(n, int) for n in numbers) else None


def _name(loader: "DataLoader[Any]") -> str:
    """Of the class that says which samples come when."""
    source: Any = loader.batch_sampler if loader.batch_size is None and loader.batch_sampler else loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        source = loader.dataset
    own = type(source).__module__.startswith("fullframe.training.loading")
    return "ShardedLoader" if own else type(source).__name__


def _listing(dataset: Any) -> int:
    try:
        return listing_of(dataset, ordered=False)
    except Exception:  # of the dataset's own len(), say
        return 0


def _planned(loader: "DataLoader[Any]") -> tuple[int, ...] | None:
    """All samples of an epoch, where the sampler is one of torch's that can be asked without changing anything."""
    sampler: Any = loader.sampler
    samples = length_of(loader.dataset)
    if samples is None or samples > _MOST_PLANNED or loader.batch_size is None:
        return None
    if type(sampler) is SequentialSampler:
        return tuple(range(samples))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        return tuple(range(samples))
    return tuple(map(int, sampler)) if type(sampler) is DistributedSampler else None
