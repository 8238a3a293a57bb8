"""Batches for the ranks: replicas read different samples, the ranks of a replica their slice of the same one.

What is read as sample i, augmentation included, follows from (seed, epoch, i) alone, so no rank can drift from
another and a resumed run reads on exactly. A dataset that draws from a generator of a module, say, escapes this; the
ranks of a replica compare what they read, and refuse to go on with different samples.
"""

import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import default_collate

from fullframe.arguments import checked
from fullframe.data.slices import SliceReader
from fullframe.errors import CheckpointError, RecipeError
from fullframe.processes.forking import worker_context
from fullframe.processes.stop_signals import STOP_SIGNALS
from fullframe.ranks.agreement import first_to_say
from fullframe.ranks.channel import generation
from fullframe.ranks.mesh import spatial_of
from fullframe.ranks.randomness import mixed_seed, sample_randomness
from fullframe.training.loading.delivery import Collation, Delivery, Grid, Sample, Split
from fullframe.training.loading.generators import generators_of, seed_generators
from fullframe.training.loading.listing import listing_of
from fullframe.wording import described, plural

_numbers: "defaultdict[str, count[int]]" = defaultdict(count)  # the next loader's that is looped over, by its mesh


@checked
class ShardedLoader:
    """Iterates over one epoch of `loader`, from where it stands; the next iteration is the next epoch.

    `loader` is an ordinary DataLoader (or torchdata's StatefulDataLoader) over a map-style dataset; its batch_size is
    that of the whole job, its shuffle, drop_last, workers, collate_fn and pinning are kept. A last incomplete batch
    that the replicas cannot share evenly is refused, unless `weighted` says that the loop multiplies the mean over each
    batch by `weight`. `split` says which tensors are split over height and width: "auto" takes those
    of 3 or more dims with the last two dims of the largest one, or with these over one whole number and at least 8 (a
    split is exact for any tensor, so this is a matter of speed only), or the keys of the batch. On a mesh with depth
    they are those of 4 or more dims with its last three. On a mesh without a split (height 1, width 1) all tensors stay
    plain. A dataset that is a `fullframe.data.SliceReader` is asked for this rank's part only.

    Tensors are moved to the mesh's device; on a GPU, host memory is pinned and `prefetch` batches (1 unless given) are
    copied while those before them are computed on, which costs the memory of their parts. The order of the samples,
    and what a data set draws, follow from `seed`.

    Raises RecipeError when the loader cannot be spread over the mesh, or when ranks of a replica read different
    samples; MeshError for a mesh that `init_mesh` did not make.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        mesh: DeviceMesh,
        *,
        split: Split = "auto",
        seed: int = 0,
        prefetch: int | None = None,
        weighted: bool = False,
    ):
        spatial_of(mesh)  # raises MeshError for another mesh
        replica, replicas = mesh.get_local_rank("data"), mesh.size(0)
        shuffle = _require_spreadable(loader, replicas, weighted)
        if prefetch is not None and prefetch < 0:
            raise RecipeError(f"prefetch must be a number of batches >= 0, got {prefetch}")
        samples = len(loader.dataset)  # type: ignore[arg-type]
        self._order = _Order(samples, loader.batch_size or 1, replica, replicas, shuffle, seed, loader.drop_last)
        self._deliver, self._prefetch = Delivery(mesh, split), prefetch
        self._all_taken = False  # of the current epoch's batches
        self._mesh, self._passes = mesh, 0
        self._number = -1  # among the mesh's loaders, from its first pass on
        self._dataset: Dataset[Any] = loader.dataset
        self._listing = f"listed as {listing:08x}, " if (listing := listing_of(loader.dataset)) else ""
        grid = Grid.of(mesh)
        self._loader = DataLoader(
            _Samples(loader.dataset, seed, grid),
            batch_sampler=self._order,
            num_workers=loader.num_workers,
            collate_fn=Collation(loader.collate_fn, grid, split, seed),
            pin_memory=loader.pin_memory or mesh.device_type != "cpu",
            timeout=loader.timeout,
            worker_init_fn=partial(_start_worker, loader.worker_init_fn),
            multiprocessing_context=worker_context(loader.multiprocessing_context) if loader.num_workers else None,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            # Its own, for a DataLoader draws from the process's generator each time it is iterated.
            generator=torch.Generator().manual_seed(seed),
        )

    def __len__(self) -> int:
        """Batches in an epoch, the same on all ranks."""
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        if self._all_taken:  # by a loop that counted them, and did not ask for the end
            self.set_epoch(self.epoch + 1)
        self._require_one_order()
        for batch in self._deliver(self._loader, self._prefetch):
            self._order.position += 1
            self._all_taken = self._order.position == len(self)
            yield batch
            del batch  # or it would be there until the next one but one is
        self.set_epoch(self.epoch + 1)

    def _require_one_order(self) -> None:
        """Raises RecipeError where another rank, at as many loops over its loader before, reads in another order.

        Replicas read different samples, so nothing else would tell. The ranks do not wait for each other here.
        """
        mesh = f"{tuple(self._mesh.shape)}, {generation()}"
        if self._number < 0:
            self._number = next(_numbers[mesh])
        what = f"pass {self._passes} of loader {self._number} on {mesh}"
        self._passes += 1
        mine = f"{self._order.words}, {self._listing}from batch {self._order.position} of epoch {self._order.epoch} on"
        first = first_to_say(what, mine)
        if first != mine:
            raise RecipeError(
                f"rank {dist.get_rank()} reads {mine}, another rank {first}, so samples would be read twice or never. "
                "Make and loop over each ShardedLoader on all ranks, of the same data, in one order (sort what a "
                "folder lists, give random_split a generator) and with the same options; leave a loop early, and call "
                "set_epoch, on all of them"
            )

    @property
    def dataset(self) -> Dataset[Any]:
        """The data set that is read."""
        return self._dataset

    @property
    def weight(self) -> float:
        """What the mean over the batch that was handed out last is to be multiplied by, on this replica.

        Averaged over the replicas it is then the mean over the whole job's batch. 1 but for a last incomplete batch
        whose samples the replicas share unevenly; 0 on a replica that had none left and got another's again, so that
        all replicas take the same steps.
        """
        return self._order.weight

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; the current epoch is left where it stands."""
        if epoch != self._order.epoch:
            self._order.epoch, self._order.position, self._all_taken = epoch, 0, False

    def state_dict(self) -> dict[str, int]:
        """The loader's position: epoch and batches handed out of it, and what must not change to go on."""
        return {"epoch": self._order.epoch, "position": self._order.position, **self._order.identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state`, on a mesh of any size; raises CheckpointError when the order would be another."""
        if lacking := [name for name in self.state_dict() if name not in state]:
            raise CheckpointError(f"this is no state of a ShardedLoader: it lacks {', '.join(lacking)}")
        for name, value in self._order.identity().items():
            if state[name] != value:
                raise CheckpointError(
                    f"the checkpoint's loader had {name} {state[name]}, this one has {value}: "
                    "the order of the samples would change; resume with the same data, batch_size, shuffle and seed"
                )
        self._order.epoch, self._order.position, self._all_taken = state["epoch"], state["position"], False


def evaluation_batches(
    dataset: Dataset[Any],
    mesh: DeviceMesh,
    seed: int,
    *,
    workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Iterator[tuple[Any, bool]]:
    """Batches of one sample, each sample of `dataset` once, spread over the replicas; and whether the batch counts.

    All replicas get equally many, as a forward pass may wait for the other replicas (sharded parameters do): one that
    has no sample left gets another's again, which does not count.
    """
    samples, grid = len(dataset), Grid.of(mesh)  # type: ignore[arg-type]
    mine = range(mesh.get_local_rank("data"), -(-samples // mesh.size(0)) * mesh.size(0), mesh.size(0))
    host: DataLoader[Any] = DataLoader(
        _Samples(dataset, seed, grid),
        batch_sampler=[[(0, min(index, samples - 1))] for index in mine],
        num_workers=workers,
        multiprocessing_context=worker_context(None) if workers else None,
        collate_fn=Collation(collate or default_collate, grid, "auto", seed),
        worker_init_fn=partial(_start_worker, None),
        pin_memory=mesh.device_type != "cpu",
        generator=torch.Generator().manual_seed(seed),
    )
    for index, batch in zip(mine, Delivery(mesh)(host), strict=True):
        yield batch, index < samples


def _start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """A loader worker's `worker_init_fn` around the user's, `then`: the worker ignores what asks its rank to stop.

    Schedulers signal every process of a job. A worker that ended at once would take its rank with it before the rank
    has written its checkpoint; one that ignores the signal ends with its rank.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's, which `then` may set up
    if then is not None:
        then(worker)


class _Order(Sampler[list[tuple[int, int]]]):
    """Which samples this replica reads: a slice of every whole-job batch of an order that all ranks know."""

    def __init__(
        self, samples: int, batch_size: int, replica: int, replicas: int, shuffle: bool, seed: int, drop_last: bool
    ):
        self._samples, self._batch_size, self._shuffle, self._seed = samples, batch_size, shuffle, seed
        self._replica, self._replicas = replica, replicas
        self._left = 0 if drop_last else samples % batch_size  # samples of a last incomplete batch
        self.epoch = self.position = 0

    @property
    def words(self) -> str:
        """What the order follows from, beside the place in it."""
        order = f"in an order shuffled by seed {self._seed}" if self._shuffle else "in order"
        rest = " and the rest" if self._left else ""
        return f"{self._samples} samples {order}, {self._batch_size} a batch{rest}"

    def identity(self) -> dict[str, int]:
        sizes = {"samples": self._samples, "batch_size": self._batch_size}
        return {**sizes, "shuffle": int(self._shuffle), "seed": self._seed}

    def __len__(self) -> int:
        return self._samples // self._batch_size + (self._left > 0)

    @property
    def weight(self) -> float:
        """The weight of the batch before `position`, see `ShardedLoader.weight`."""
        if not self._left or self.position < len(self):
            return 1.0
        return len(self._mine(self._left)) * self._replicas / self._left

    def _mine(self, size: int) -> range:
        """Which of a batch of `size` samples this replica reads: as many as the others, or one more."""
        each, more = divmod(size, self._replicas)
        first = self._replica * each + min(self._replica, more)
        return range(first, first + each + (self._replica < more))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        order: Any = range(self._samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(mixed_seed(self._seed, epoch))
            order = torch.randperm(self._samples, generator=generator, device="cpu").tolist()
        for batch in range(self.position, len(self)):
            first = batch * self._batch_size
            size = min(self._batch_size, self._samples - first)
            mine = self._mine(size) or range(size - 1, size)  # a replica that has none left steps with another's
            yield [(epoch, order[first + number]) for number in mine]


class _Samples(Dataset[Sample]):
    """The dataset, each sample, or this rank's part of it, read under random states of its own.

    The epoch comes with the index, so that workers that live through many epochs need not be told.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, grid: Grid):
        self.dataset, self._seed, self._grid = dataset, seed, grid
        self._generators: list[Any] | None = None  # of the data set's own, sought by whoever reads

    def __getitem__(self, epoch_and_index: tuple[int, int]) -> Sample:
        epoch, index = epoch_and_index
        if self._generators is None:
            self._generators = generators_of(self.dataset)
        seed_generators(self._generators, self._seed, epoch, index)
        with sample_randomness(self._seed, epoch, index):
            if self._grid.ranks > 1 and isinstance(self.dataset, SliceReader):
                return self._part(self.dataset, epoch, index)
            return Sample(self.dataset[index], (epoch, index), None)

    def _part(self, dataset: SliceReader, epoch: int, index: int) -> Sample:
        size = tuple(dataset.size(index))
        if len(size) < self._grid.dims:
            raise RecipeError(
                f"{type(dataset).__name__}.size gives {size}, and the mesh has depth {self._grid.depth}: "
                "give (D, H, W) and take read(index, slices, rows, columns), or leave depth out of the mesh"
            )
        read: Any = dataset.read  # of volumes also by slices
        value = read(index, *self._grid.part(size))
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        return Sample(value, (epoch, index, *size, drawn), size)


def require_indexed(dataset: Any) -> None:
    """Raises RecipeError where `dataset` gives no sample by its number."""
    if isinstance(dataset, DataLoader):
        raise RecipeError("a DataLoader was given where its dataset is asked for, whose samples ranks share out")
    if isinstance(dataset, IterableDataset):
        raise RecipeError(
            f"{type(dataset).__name__} is an IterableDataset, which ranks cannot share out; "
            "give a dataset with __len__ and __getitem__"
        )
    has_both = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, (type, str, Mapping)) or not has_both:
        raise RecipeError(f"a dataset with __len__ and __getitem__(number) is needed, got {described(dataset)}")


def _require_spreadable(loader: "DataLoader[Any]", replicas: int, weighted: bool) -> bool:
    """Whether `loader` shuffles; raises RecipeError where its order cannot be kept."""
    require_indexed(loader.dataset)
    samples = len(loader.dataset)  # type: ignore[arg-type]
    shuffles = type(loader.sampler) in _random_samplers()  # a class of the user's has an order of its own
    whole = not shuffles or (not loader.sampler.replacement and loader.sampler.num_samples == samples)  # type: ignore[attr-defined]
    if loader.batch_size is None or not whole or not (shuffles or type(loader.sampler) is SequentialSampler):
        raise RecipeError(
            f"ShardedLoader chooses the samples itself and cannot keep the loader's {type(loader.sampler).__name__}; "
            "make the DataLoader with batch_size=... and shuffle=True or False, and draw what a sampler would draw in "
            "the data set's __getitem__"
        )
    if getattr(loader, "next_iter_state", None) is not None:
        raise RecipeError(
            "the StatefulDataLoader was given a state, which holds for one process only; "
            "give ShardedLoader.load_state_dict the state of a ShardedLoader, which holds for any mesh"
        )
    if loader.batch_size % replicas:
        raise RecipeError(
            f"batch_size {loader.batch_size} (of the whole job) is no multiple of the {replicas} data replicas; "
            f"use {max(loader.batch_size // replicas, 1) * replicas}"
        )
    if samples < loader.batch_size and (loader.drop_last or not samples):
        remedy = f"use a batch_size of at most {samples}" if samples else "does its folder or file list exist?"
        raise RecipeError(
            f"the dataset has {plural(samples, 'sample')}, fewer than one batch of {loader.batch_size}; {remedy}"
        )
    left = 0 if loader.drop_last else samples % loader.batch_size
    if left % replicas and not weighted:
        raise RecipeError(
            f"{samples} samples in batches of {loader.batch_size} leave a last batch of {left}, which {replicas} "
            "replicas cannot share evenly: the mean of their means would not be that of the batch; give the DataLoader "
            "drop_last=True, or ShardedLoader weighted=True and multiply each batch's mean loss by loader.weight"
        )
    return shuffles


def _random_samplers() -> tuple[type, ...]:
    """The classes of samplers that shuffle: torch's, and torchdata's own where that is in use."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader.sampler")
    return (RandomSampler,) if torchdata is None else (RandomSampler, torchdata.RandomSampler)
