"""Which samples of an epoch are still to be read, however many workers read them."""

import math
import random
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch

from fullframe.horovod.functions import allgather_object
from fullframe.horovod.queries import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """A distributed sampler that leaves out what was processed in this epoch, when the workers change in its middle.

    Tell it of every batch with `record_batch`; put it into a `TorchState`. The last samples are filled up with the
    first, so that all ranks have as many.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self._untold: set[int] = set()  # of these, what only this rank knows of
        self.num_replicas, self.rank = 0, 0
        self.remaining_indices: list[int] = []
        self.num_samples = self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing is processed, and the order is another."""
        self.epoch = epoch
        self.processed_indices, self._untold = set(), set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank's batch `batch_idx` is processed."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Sequence[int]) -> None:
        """These samples are processed."""
        self.processed_indices.update(indices)
        self._untold.update(indices)

    def share(self) -> None:
        """Tell the other ranks what this one has processed, and hear of theirs; all ranks do."""
        for epoch, indices in allgather_object((self.epoch, self._untold), "elastic.samples"):
            if epoch == self.epoch:
                self.processed_indices |= indices
        self._untold = set()

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch `batch_idx`, as the last iteration gave them."""
        first = batch_idx * batch_size
        return self.indices[first : min(first + batch_size, len(self.indices))]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.epoch = state_dict["epoch"]
        self.processed_indices, self._untold = set(state_dict["processed_indices"]), set()
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what is processed of it."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def reset(self) -> None:
        """Share what is not processed among the ranks that are there now."""
        self.num_replicas, self.rank = size(), rank()
        self.remaining_indices = [i for i in range(len(self.dataset)) if i not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        order = list(self.remaining_indices)
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # alike on all ranks
        while order and len(order) < self.total_size:
            order += order[: self.total_size - len(order)]
        self.indices = order[self.rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
