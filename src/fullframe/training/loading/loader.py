"""Batches for the ranks: replicas read different samples, the ranks of a replica their slice of the same one.

What is read as sample i, augmentation included, follows from (seed, epoch, i) alone, so no rank can drift from
another and a resumed run reads on exactly. A dataset that draws from a generator of a module, say, escapes this; the
ranks of a replica compare what they read, and refuse to go on with different samples.
"""

import random
import signal
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from fullframe.arguments import checked
from fullframe.data.slices import SliceReader
from fullframe.errors import RecipeError
from fullframe.processes.forking import worker_context
from fullframe.processes.stop_signals import STOP_SIGNALS
from fullframe.ranks.agreement import first_to_say
from fullframe.ranks.channel import generation
from fullframe.ranks.mesh import spatial_of
from fullframe.ranks.randomness import sample_randomness
from fullframe.training.loading.delivery import Collation, Delivery, Grid, Sample, Split, mesh_device
from fullframe.training.loading.generators import generators_of, seed_generators
from fullframe.training.loading.listing import listing_of
from fullframe.training.loading.order import Order, Place, Share
from fullframe.training.loading.stream_order import StreamCollation, StreamOrder
from fullframe.wording import described

_numbers: "defaultdict[str, count[int]]" = defaultdict(count)  # the next loader's that is looped over, by its mesh


@checked
class ShardedLoader:
    """Iterates over one epoch of `loader`, from where it stands; the next iteration is the next epoch.

    `loader` is an ordinary DataLoader (or torchdata's StatefulDataLoader); its batch_size is that of the whole job, its
    shuffle, drop_last, workers, collate_fn and pinning are kept, and so is a sampler, or batch sampler, that gives
    every rank the same numbers; it is seeded and asked at the start of each epoch. Of an `IterableDataset`, whose
    samples have no numbers, every rank reads the whole, and a replica keeps its share: what shares its parts out by
    itself, or is too much to be read by each replica, goes through `ShardedStream`. A batch that the replicas cannot
    share evenly is refused, unless `weighted` says that the loop multiplies the mean over each batch by `weight`.

    `split` says which tensors are split over height and width: "auto" takes those of 3 or more dims
    with the last two dims of the largest one, or with these over one whole number and at least 8 (a split is exact for
    any tensor, so this is a matter of speed only), or the keys of the batch. On a mesh with depth they are those of 4
    or more dims with its last three. On a mesh without a split (height 1, width 1) all tensors stay plain. A dataset
    that is a `fullframe.data.SliceReader` is asked for this rank's part only.

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
        require_readable(loader.dataset)
        if getattr(loader, "next_iter_state", None) is not None:
            raise RecipeError(
                "the StatefulDataLoader was given a state, which holds for one process only; "
                "give ShardedLoader.load_state_dict the state of a ShardedLoader, which holds for any mesh"
            )
        grid, share = Grid.of(mesh), Share(mesh.get_local_rank("data"), mesh.size(0), weighted)
        collate = Collation(loader.collate_fn, grid, split, seed)
        self._order: Order | StreamOrder
        source: dict[str, Any]
        if isinstance(loader.dataset, IterableDataset):
            self._order = StreamOrder(loader, seed, share, mesh_device(mesh))
            reading = self._order.reading
            source = {"dataset": reading, "batch_size": None, "collate_fn": StreamCollation(collate)}
        else:
            self._order = Order(loader, seed, share)
            samples = _Samples(loader.dataset, seed, grid)
            source = {"dataset": samples, "batch_sampler": self._order, "collate_fn": collate}
        self._deliver = Delivery(mesh, split, prefetch)
        self.progress: Callable[[int, int], object] = lambda number, behind: None
        """Called as the batches of a stream that are behind are read again: with a batch's number, and how many are."""
        self._all_taken = False  # of the current epoch's batches
        self._left = self._said_left = False  # a loop over it, in the middle of an epoch
        self._mesh, self._passes = mesh, 0
        self._number = -1  # among the mesh's loaders, from its first pass on
        self._dataset: Dataset[Any] = loader.dataset
        self._listing = f"listed as {listing:08x}, " if (listing := listing_of(loader.dataset)) else ""
        self._loader: DataLoader[Any] = DataLoader(
            **source,
            num_workers=loader.num_workers,
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
        """Batches in an epoch, the same on all ranks; raises TypeError for an IterableDataset."""
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        if self._all_taken:  # by a loop that counted them, and did not ask for the end
            self.set_epoch(self.epoch + 1)
        if self._left:
            self._say_left()
        left = self._left and self._order.position
        self._order.begin()
        self._require_one_order()
        for batch in self._deliver(self._order.agreed(self._loader, self.progress)):
            self._order.advance()
            self._all_taken, self._left = self._order.position == self._order.batches, True
            yield batch
            del batch  # or it would be there until the next one but one is
        over = left and self._order.position == left  # by a loop over a stream that did not ask for the end
        self.set_epoch(self.epoch + 1)
        if over:
            yield from self

    def _say_left(self) -> None:
        """Warn, once, that the loop which begins goes on with an epoch, where a DataLoader's would begin anew."""
        if not self._said_left and dist.get_rank() == 0:
            of_all = f" of {batches}" if (batches := self._order.batches) is not None else ""
            warnings.warn(
                f"a loop over this ShardedLoader was left after batch {self._order.position}{of_all}, and the next one "
                "goes on from there with the same epoch, where a DataLoader would begin anew; to begin the next epoch "
                "call loader.set_epoch(loader.epoch + 1) before it",
                stacklevel=3,
            )
        self._said_left = True

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
            self._order.epoch, self._order.position, self._all_taken, self._left = epoch, 0, False, False

    def state_dict(self) -> dict[str, int]:
        """The loader's position: epoch and batches handed out of it, and what must not change to go on."""
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state`, on a mesh of any size.

        Raises CheckpointError when the order would be another; where a sampler gives it, as the next iteration begins.
        """
        self._order.load_state_dict(state)
        self._all_taken = self._left = False


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
    if isinstance(dataset, IterableDataset) and mesh.size(0) > 1:
        workers = min(workers, 1)  # or each worker would end with samples that are too few for all replicas
    host: DataLoader[Any] = DataLoader(dataset, mesh.size(0), num_workers=workers, collate_fn=collate)
    loader = ShardedLoader(host, mesh, seed=seed, weighted=True)
    for batch in loader:
        yield batch, loader.weight > 0


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


class _Samples(Dataset[Sample]):
    """The dataset, each sample, or this rank's part of it, read under random states of its own.

    The epoch comes with the index, so that workers that live through many epochs need not be told.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, grid: Grid):
        self.dataset, self._seed, self._grid = dataset, seed, grid
        self._generators: list[Any] | None = None  # of the data set's own, sought by whoever reads

    def __getitem__(self, place: Place) -> Sample:
        if self._generators is None:
            self._generators = generators_of(self.dataset)
        seed_generators(self._generators, self._seed, *place)
        with sample_randomness(self._seed, *place):
            if self._grid.ranks > 1 and isinstance(self.dataset, SliceReader):
                return self._part(self.dataset, place)
            return Sample(self.dataset[place[-1]], (), None, place)

    def _part(self, dataset: SliceReader, place: Place) -> Sample:
        index = place[-1]
        size = tuple(dataset.size(index))
        if len(size) < self._grid.dims:
            raise RecipeError(
                f"{type(dataset).__name__}.size gives {size}, and the mesh has depth {self._grid.depth}: "
                "give (D, H, W) and take read(index, slices, rows, columns), or leave depth out of the mesh"
            )
        read: Any = dataset.read  # of volumes also by slices
        value = read(index, *self._grid.part(size))
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        return Sample(value, (*size, drawn), size, place)


def require_readable(dataset: Any) -> None:
    """Raises RecipeError where `dataset` gives no samples by their numbers, nor one after the other."""
    if isinstance(dataset, DataLoader):
        raise RecipeError("a DataLoader was given where its dataset is asked for, whose samples ranks share out")
    has_both = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_dataset = has_both or isinstance(dataset, IterableDataset)
    if isinstance(dataset, (type, str, Mapping)) or not is_dataset:
        raise RecipeError(
            "a dataset with __len__ and __getitem__(number), or a torch IterableDataset, is needed, got "
            f"{described(dataset)}"
        )
