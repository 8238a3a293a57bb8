"""Batches for the ranks: replicas read different samples, the ranks of a replica their slice of the same one.

What is read as sample i, augmentation included, follows from (seed, epoch, i) alone, so no rank can drift from
another and a resumed run reads on exactly. A dataset that draws from a generator of its own escapes this; the ranks
of a replica compare what they read, and refuse to go on with different samples.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.dataloader import default_collate

from fullframe.errors import CheckpointError, RecipeError
from fullframe.spatial.exchange import gathered
from fullframe.spatial.mesh import spatial_of
from fullframe.spatial.shard import shard
from fullframe.training.randomness import mixed_seed, sample_randomness

Split = Literal["auto"] | Collection[str]
_FINGERPRINT_ELEMENTS = 65536  # of each tensor; reading all of an 8 megapixel frame would cost as much as decoding it


class ShardedLoader:
    """Iterates over one epoch of `loader`, from where it stands; the next iteration is the next epoch.

    `loader` is an ordinary DataLoader over a map-style dataset of dicts; its batch_size is that of the whole job,
    its shuffle, workers, collate_fn and pinning are kept, a last incomplete batch is dropped. `split` says which
    tensors are split over height and width: "auto" takes those of 3 or more dims with the last two dims of the
    largest one (a split is exact for any tensor, so this is a matter of speed only), or the keys of the batch. On a
    mesh without a split (height 1, width 1) all tensors stay plain. Tensors are moved to the mesh's device.

    Raises RecipeError when the loader cannot be spread over the mesh, or when ranks of a replica read different
    samples; ShapeError when a tensor has fewer rows than there are ranks.
    """

    def __init__(self, loader: "DataLoader[Any]", mesh: DeviceMesh, *, split: Split = "auto", seed: int = 0):
        replica, replicas = mesh.get_local_rank("data"), mesh.size(0)
        _require_spreadable(loader, replicas)
        shuffle = isinstance(loader.sampler, RandomSampler)
        samples = len(loader.dataset)  # type: ignore[arg-type]
        self._order = _Order(samples, loader.batch_size or 1, replica, replicas, shuffle, seed)
        self._deliver = Delivery(mesh, split)
        self._loader = DataLoader(
            _SeededSamples(loader.dataset, seed),
            batch_sampler=self._order,
            num_workers=loader.num_workers,
            collate_fn=_Fingerprinted(loader.collate_fn),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            # Its own, for a DataLoader draws from the process's generator each time it is iterated.
            generator=torch.Generator().manual_seed(seed),
        )

    def __len__(self) -> int:
        """Batches in an epoch, the same on all ranks."""
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        for batch, fingerprint in self._loader:
            self._order.position += 1
            yield self._deliver(batch, fingerprint)
        self._order.epoch += 1
        self._order.position = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; naming the epoch it is in changes nothing."""
        if epoch != self._order.epoch:
            self._order.epoch, self._order.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where it stands: batches already handed out of which epoch, and what must not change to go on."""
        return {"epoch": self._order.epoch, "position": self._order.position, **self._order.identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state`, on a mesh of any size; raises CheckpointError when the order would be another."""
        for name, value in self._order.identity().items():
            if state[name] != value:
                raise CheckpointError(
                    f"the checkpoint's loader had {name} {state[name]}, this one has {value}: "
                    "the order of the samples would change; resume with the same data, batch_size and seed"
                )
        self._order.epoch, self._order.position = state["epoch"], state["position"]


class Delivery:
    """Turns a batch on the host into this rank's: the tensors of the frame split, all of them on the device."""

    def __init__(self, mesh: DeviceMesh, split: Split = "auto"):
        self._mesh, self._split, self._spatial = mesh, split, spatial_of(mesh)
        self._device = mesh_device(mesh)

    def __call__(self, batch: Any, fingerprint: int) -> Any:
        if self._spatial.size > 1:
            self._require_same(fingerprint)
            return self._placed(batch, self._frame(batch), ())
        return _mapped(batch, self._moved)

    def _placed(self, value: Any, frame: tuple[int, ...], path: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor):
            return self._moved(self._cut(value) if self._splits(value, frame, path) else value)
        return _descend(value, lambda item, key: self._placed(item, frame, (*path, key)))

    def _splits(self, tensor: Tensor, frame: tuple[int, ...], path: tuple[Any, ...]) -> bool:
        if self._split == "auto":
            return tensor.dim() >= 3 and tuple(tensor.shape[-2:]) == frame
        return bool(path) and path[0] in self._split

    def _frame(self, batch: Any) -> tuple[int, ...]:
        """The last two dims of the largest tensor that has at least three."""
        if self._split != "auto":
            known = list(batch) if isinstance(batch, Mapping) else []
            unknown = [key for key in self._split if key not in known]
            if unknown:
                raise RecipeError(f"split names {unknown}, which the batch does not have; its keys are {known}")
            return ()
        largest = max((t for t in _tensors(batch) if t.dim() >= 3), key=Tensor.numel, default=None)
        return () if largest is None else tuple(largest.shape[-2:])

    def _cut(self, tensor: Tensor) -> Tensor:
        # A copy: a view would keep the whole frame in memory for as long as this rank's part of it.
        return shard(tensor, self._mesh, check=False).contiguous()

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _require_same(self, fingerprint: int) -> None:
        group = self._spatial.replica
        device = "cpu" if "gloo" in torch.distributed.get_backend_config(group) else self._device
        found = gathered(torch.tensor(fingerprint, device=device), group).tolist()
        if len(set(found)) > 1:
            raise RecipeError(
                f"ranks {list(self._spatial.replica_ranks)} of one replica read different samples (checksums {found}); "
                "draw augmentation from torch, numpy.random or random, whose states are set for each sample, "
                "not from a generator of the dataset's own, and give every rank the same files"
            )


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def evaluation_batches(dataset: Dataset[Any], mesh: DeviceMesh, seed: int) -> Iterator[Any]:
    """Batches of one sample: each sample of `dataset` once, spread over the replicas, which may get unequally many."""
    deliver, samples = Delivery(mesh), _SeededSamples(dataset, seed)
    for index in range(mesh.get_local_rank("data"), len(dataset), mesh.size(0)):  # type: ignore[arg-type]
        yield deliver(*_Fingerprinted(default_collate)([samples[0, index]]))


class _Order(Sampler[list[tuple[int, int]]]):
    """Which samples this replica reads: a slice of every whole-job batch of an order that all ranks know."""

    def __init__(self, samples: int, batch_size: int, replica: int, replicas: int, shuffle: bool, seed: int):
        self._samples, self._batch_size, self._shuffle, self._seed = samples, batch_size, shuffle, seed
        self._replica, self._share = replica, batch_size // replicas
        self.epoch = self.position = 0

    def identity(self) -> dict[str, int]:
        return {"samples": self._samples, "batch_size": self._batch_size, "seed": self._seed}

    def __len__(self) -> int:
        return self._samples // self._batch_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        order: Any = range(self._samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(mixed_seed(self._seed, epoch))
            order = torch.randperm(self._samples, generator=generator).tolist()
        for batch in range(self.position, len(self)):
            first = batch * self._batch_size + self._replica * self._share
            yield [(epoch, index) for index in order[first : first + self._share]]


class _SeededSamples(Dataset[Any]):
    """The dataset, each sample read under random states of its own.

    The epoch comes with the index, so that workers that live through many epochs need not be told.
    """

    def __init__(self, dataset: Dataset[Any], seed: int):
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, epoch_and_index: tuple[int, int]) -> Any:
        epoch, index = epoch_and_index
        with sample_randomness(self._seed, epoch, index):
            return self._dataset[index]


class _Fingerprinted:
    """Collates and takes a checksum, in the worker that read the samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        batch = self._collate(samples)
        checksum = 0
        for tensor in _tensors(batch):
            elements = tensor.detach().reshape(-1)
            # An odd step walks through the columns of an image of any even width.
            elements = elements[:: elements.numel() // _FINGERPRINT_ELEMENTS | 1].contiguous()
            checksum = zlib.crc32(str((tuple(tensor.shape), tensor.dtype)).encode(), checksum)
            checksum = zlib.crc32(elements.view(torch.uint8).numpy().tobytes(), checksum)
        return batch, checksum


def _require_spreadable(loader: "DataLoader[Any]", replicas: int) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise RecipeError(
            f"{type(loader.dataset).__name__} is an IterableDataset, which ranks cannot share out; "
            "give a dataset with __len__ and __getitem__"
        )
    if loader.batch_size is None or not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        raise RecipeError(
            f"ShardedLoader chooses the samples itself and cannot keep the loader's {type(loader.sampler).__name__}; "
            "make the DataLoader with batch_size=... and shuffle=True or False"
        )
    if loader.batch_size % replicas:
        raise RecipeError(
            f"batch_size {loader.batch_size} (of the whole job) is no multiple of the {replicas} data replicas; "
            f"use {max(loader.batch_size // replicas, 1) * replicas}"
        )
    samples = len(loader.dataset)  # type: ignore[arg-type]
    if samples < loader.batch_size:
        raise RecipeError(f"the dataset has {samples} samples, fewer than one batch of {loader.batch_size}")


def _descend(value: Any, place: Callable[[Any, Any], Any]) -> Any:
    """A container with `place(item, key)` of each item; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: place(item, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [place(item, number) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return _descend(value, lambda item, key: _mapped(item, function))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
