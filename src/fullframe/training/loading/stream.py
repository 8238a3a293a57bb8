"""Batches of a stream, which has no numbers by which samples could be shared out: each replica reads its own part."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import default_collate

from fullframe.arguments import checked
from fullframe.errors import RecipeError
from fullframe.ranks.mesh import spatial_of
from fullframe.training.loading.delivery import (
    Collation,
    Delivery,
    Grid,
    Split,
    begun,
    checksum,
    mesh_device,
    require_alike,
)
from fullframe.training.loading.stream_order import ENDED, of_all_ranks


@checked
class ShardedStream:
    """Iterates over `batches`, each moved to the mesh's device, its images split over height and width.

    `batches` is any iterable of batches (a DataLoader over an IterableDataset, WebDataset, DALI, torchdata's nodes), of
    a replica, not of the whole job: the ranks of a replica read the same ones, each replica others, as number
    `mesh.get_local_rank("data")` of `mesh.size(0)`. Order, seeds and position are the stream's own; each iteration asks
    it anew. All replicas take the same steps: an iteration ends as soon as one replica's does, and what the others have
    left is left out, which is said once. `split` and `prefetch` are those of `ShardedLoader`. Batches of which replicas
    have unequal numbers of samples are refused, unless `weighted` says that the loop multiplies the mean over each
    batch by `weight`; where a batch does not tell its number, by tensors or lists of one length, they count as equal.

    Raises RecipeError for a DataLoader whose data set has numbers, when ranks of a replica read different samples, and
    for unequal batches; MeshError for a mesh that `init_mesh` did not make.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        mesh: DeviceMesh,
        *,
        split: Split = "auto",
        prefetch: int | None = None,
        weighted: bool = False,
    ):
        spatial_of(mesh)  # raises MeshError for another mesh
        if isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset):
            raise RecipeError(
                f"{type(batches.dataset).__name__} has numbers by which its samples are shared out; use "
                "ff.ShardedLoader(loader, mesh), whose batch_size is that of the whole job"
            )
        self._batches, self._grid = batches, Grid.of(mesh)
        self._collation = Collation(default_collate, self._grid, split)
        self._deliver, self._weighted = Delivery(mesh, split, prefetch), weighted
        self._replicas: list[list[int]] = mesh.mesh.flatten(1).tolist()  # their ranks
        self._mine, self._device = mesh.get_local_rank("data"), mesh_device(mesh)
        self._said: set[str] = set()
        self.weight = 1.0
        """What the mean over the batch that was handed out last is to be multiplied by, on this replica.

        Averaged over the replicas it is then the mean over the whole job's batch.
        """

    def __iter__(self) -> Iterator[Any]:
        weights: deque[float] = deque()  # of batches that were made and not yet handed out
        for batch in self._deliver(self._agreed(weights)):
            self.weight = weights.popleft()
            yield batch
            del batch  # or it would be there until the next one but one is

    def _agreed(self, weights: "deque[float]") -> Iterator[tuple[Any, None]]:
        """Batches that were compared, as long as all ranks have one."""
        batches = begun(self._batches)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                self._gathered(ENDED, 0)
                return
            everyone = self._gathered(_samples(batch), checksum(batch))
            sizes = [everyone[ranks[0]][0] for ranks in self._replicas]
            if ENDED in sizes:
                return
            for ranks in self._replicas:
                require_alike(ranks, [everyone[rank][1] for rank in ranks])
            self._tell_of_repeats([everyone[ranks[0]][1] for ranks in self._replicas])
            if len(set(sizes)) > 1 and not self._weighted:
                raise RecipeError(
                    f"replicas have batches of {sizes} samples: the mean of their means would not be that of the "
                    "batch; let the stream drop incomplete batches (drop_last=True, partial=False), or give "
                    "ShardedStream weighted=True and multiply each batch's mean loss by stream.weight"
                )
            weights.append(sizes[self._mine] * len(sizes) / sum(sizes) if any(sizes) else 1.0)
            yield (batch if self._grid.ranks == 1 else self._collation.cut(batch)), None

    def _gathered(self, samples: int, number: int) -> list[list[int]]:
        """Of each rank the samples of its batch, `ENDED` where it has none, and the batch's checksum.

        Raises RecipeError on all ranks where those of a replica do not end together.
        """
        found = of_all_ranks(samples, number, self._device)
        ended = {rank for rank, (size, _) in enumerate(found) if size == ENDED}
        for ranks in self._replicas:
            if ended and not ended.issuperset(ranks) and not ended.isdisjoint(ranks):
                raise RecipeError(
                    f"the stream ends on {sorted(ended.intersection(ranks))} of the ranks {ranks} of one replica, and "
                    "not on the others; give all of them the same samples"
                )
        if ended and len(ended) < len(found):
            over = [number for number, ranks in enumerate(self._replicas) if ranks[0] in ended]
            self._say(
                f"the stream of replicas {over} has ended and others go on: what those have left is left out, so that "
                "all replicas take the same steps"
            )
        return found

    def _tell_of_repeats(self, checksums: list[int]) -> None:
        """Warn where two replicas have read the same batch."""
        first = [checksums.index(each) for each in checksums]
        for replica, same in enumerate(first):
            if same != replica:
                self._say(
                    f"replicas {same} and {replica} read the same batch, whose samples then count twice; give each "
                    'replica its own part of the stream, number mesh.get_local_rank("data") of mesh.size(0)'
                )

    def _say(self, text: str) -> None:
        """Warn on the job's first rank, once."""
        if text not in self._said and dist.get_rank() == 0:
            warnings.warn(text, stacklevel=6)
        self._said.add(text)


def _samples(batch: Any) -> int:
    """How many samples a batch has, by its tensors outside of lists, or by its lists; 0 where these do not tell."""
    entries = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    for entry in entries:
        entries += entry.values() if isinstance(entry, Mapping) else ()
    found = {len(entry) for entry in entries if isinstance(entry, (Tensor, np.ndarray)) and entry.ndim}
    found = found or {len(entry) for entry in entries if isinstance(entry, (list, tuple))}
    return found.pop() if len(found) == 1 else 0
