"""A batch on its way to the model: cut in the process that read it, compared within the replica, moved to the device.

Workers know nothing of meshes: they cut by a `Grid` of plain numbers, so that only this rank's part is pinned and
travels between processes.
"""

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from fullframe.data.nested import held, leaves, replaced
from fullframe.errors import RecipeError, ShapeError
from fullframe.geometry.extents import Extents
from fullframe.ranks.collectives import all_gather_no_grad, device_of_facts
from fullframe.ranks.device import current
from fullframe.ranks.mesh import has_stages, spatial_of, stage_axis
from fullframe.ranks.randomness import sample_randomness
from fullframe.ranks.raw_bytes import in_bytes, plain
from fullframe.spatial.shard import even_spec
from fullframe.spatial.tensor import without_class, wrap
from fullframe.training.loading.order import Place

Split = Literal["auto"] | Collection[str]
_Batch = TypeVar("_Batch")
_FINGERPRINT_ELEMENTS = 65536  # of each tensor; reading all of an 8 megapixel frame would cost as much as decoding it
_LINE = "the next batch of the loader"  # which a progress bar may ask for, on one rank only


@dataclass(frozen=True)
class Grid:
    """The ranks of a replica as a worker process knows them: how many along H, W, D, and which of them this one is.

    With `stages` as many others get the same parts.
    """

    height: int = 1
    width: int = 1
    row: int = 0
    column: int = 0
    depth: int = 1
    plane: int = 0
    stages: int = 1

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Grid":
        """This rank's place in its replica."""
        axes = {axis.name: axis for axis in spatial_of(mesh).axes}
        height, width, depth = axes["height"], axes["width"], axes.get("depth")
        stages = stage_axis(mesh).size if has_stages(mesh) else 1
        here = cls(height.size, width.size, height.coordinate, width.coordinate, stages=stages)
        return here if depth is None else replace(here, depth=depth.size, plane=depth.coordinate)

    @property
    def ranks(self) -> int:
        """Ranks in a replica."""
        return self.depth * self.height * self.width

    @property
    def dims(self) -> int:
        """How many of a tensor's last dims are cut: (H, W), or (D, H, W)."""
        return 2 if self.depth == 1 else 3

    def part(self, size: tuple[int, ...]) -> tuple[slice, ...]:
        """This rank's rows and columns of a frame of `size` (H, W), or slices, rows and columns of a volume (D, H, W).

        All of a dim that has fewer rows than ranks.
        """
        places = ((self.depth, self.plane), (self.height, self.row), (self.width, self.column))
        found = []
        for rows, (ranks, number) in zip(size, places[-len(size) :], strict=True):
            mine = Extents.even(rows, ranks).ranges[number] if rows >= ranks else range(rows)
            found.append(slice(mine.start, mine.stop))
        return tuple(found)


class Sample(NamedTuple):
    """One sample as it was read."""

    value: Any
    facts: tuple[Any, ...]  # what the ranks of a replica must have in common, whatever part they read
    size: tuple[int, ...] | None  # (H, W), or (D, H, W), of the frame where only this rank's part of it was read
    place: Place = ()  # in the order of all samples


@dataclass(frozen=True)
class Cut:
    """This rank's part of a tensor of `shape`."""

    local: Tensor
    shape: tuple[int, ...]

    def pin_memory(self) -> "Cut":
        """This part in page-locked memory; a DataLoader calls it."""
        return Cut(self.local.pin_memory(), self.shape)


@dataclass(frozen=True)
class Collation:
    """Makes (batch, checksum) of samples, in the process that read them; tensors of the frame become a `Cut`."""

    collate: Callable[[list[Any]], Any]
    grid: Grid
    split: Split
    seed: int = 0  # of what `collate` draws

    def __call__(self, samples: list[Sample]) -> tuple[Any, int]:
        sizes = sorted({sample.size for sample in samples if sample.size is not None})
        if len(sizes) > 1:
            raise ShapeError(
                f"frames of sizes {sizes} cannot be one batch of parts; "
                "make them one size in the data set, or use as many replicas as samples in a batch"
            )
        batch = replaced(self._collated([sample.value for sample in samples], samples[0].place), _lockable)
        facts = zlib.crc32(repr([(*sample.place, *sample.facts) for sample in samples]).encode())
        if self.grid.ranks == 1:  # without stages there is nobody to compare with
            return batch, facts if self.grid.stages == 1 else checksum(batch, facts)
        if not sizes:
            return self.cut(batch), checksum(batch, facts)
        batch = self._marked(batch, sizes[0])
        return batch, checksum(batch, facts)

    def _collated(self, values: list[Any], first: Place) -> Any:
        if self.collate is not default_collate:
            with sample_randomness(self.seed, *first, len(values)):
                return self.collate(values)
        try:
            return default_collate(values)
        except (RuntimeError, TypeError) as error:
            shapes = [_shapes(value) for value in values]
            if isinstance(error, RuntimeError) and all(shape == shapes[0] for shape in shapes):
                raise  # no memory, say
            said = "; ".join(f"sample {number}: {shape}" for number, shape in enumerate(shapes[:4]))
            raise RecipeError(
                f"these samples make no batch: {error}. {said}. Give them as tensors of one size each, or a collate "
                "function of your own"
            ) from error

    def cut(self, batch: Any) -> Any:
        """`batch` with each whole tensor of the frame cut to this rank's part.

        Raises RecipeError for an object of another class that holds tensors.
        """
        frame = None if self.split != "auto" else _frame(batch, self.grid.dims)

        def cut(tensor: Any, path: tuple[Any, ...]) -> Any:
            _require_seen(tensor)
            if not isinstance(tensor, Tensor) or not (self._splits(tensor, frame, path) or _is_reduced(tensor, frame)):
                return tensor
            if tensor.dim() < 2:
                raise ShapeError(f"split names {path[0]!r}, whose shape {tuple(tensor.shape)} has no dims (..., H, W)")
            items: Any = (..., *self.grid.part(tensor.shape[-self.grid.dims :]))
            part = without_class(tensor)[items]
            # A copy: a view would keep the whole frame in memory, and send it along, for as long as this part of it.
            return Cut(part.clone(memory_format=torch.contiguous_format), tuple(tensor.shape))

        return replaced(batch, cut)

    def _marked(self, batch: Any, size: tuple[int, ...]) -> Any:
        """`batch` with each tensor that was read as a part of a frame of `size` (H, W), or (D, H, W), as a `Cut`."""
        part = self.grid.part(size)
        here = tuple(rows.stop - rows.start for rows in part)
        names = ("slices", "rows", "columns")[-len(size) :]
        asked = " and ".join(f"{name} {rows.start}:{rows.stop}" for name, rows in zip(names, part, strict=True))
        found = 0

        def mark(tensor: Any, path: tuple[Any, ...]) -> Any:
            nonlocal found
            if not isinstance(tensor, Tensor) or not self._splits(tensor, here, path):
                return tensor
            if tuple(tensor.shape[-len(size) :]) != here:
                raise ShapeError(
                    f"read() gave {path[0]!r} with the shape {tuple(tensor.shape)} where {asked} were asked for; "
                    f"the last dims must be {here}"
                )
            found += 1
            return Cut(without_class(tensor), (*tensor.shape[: -len(size)], *size))

        marked = replaced(batch, mark)
        if not found:
            shapes = [tuple(tensor.shape) for tensor in _leaves(batch)]
            raise ShapeError(
                f"read() gave no tensor of {asked}, but those of shapes {shapes}; "
                "return that part of the frame, H and W last"
            )
        return marked

    def _splits(self, tensor: Tensor, frame: tuple[int, ...] | None, path: tuple[Any, ...]) -> bool:
        if self.split == "auto":
            return frame is not None and tensor.dim() > len(frame) and tuple(tensor.shape[-len(frame) :]) == frame
        return bool(path) and path[0] in self.split


class Delivery:
    """Moves batches, as `Collation` made them, to this rank's device, each while up to `ahead` before it are used.

    By default one ahead where there is a GPU, which copies beside computing, and none where there is not. Raises
    RecipeError for a number below 0.
    """

    def __init__(self, mesh: DeviceMesh, split: Split = "auto", ahead: int | None = None):
        if ahead is not None and ahead < 0:
            raise RecipeError(f"prefetch must be a number of batches >= 0, got {ahead}")
        self._mesh, self._split, self._spatial = mesh, split, spatial_of(mesh)
        self._stages = stage_axis(mesh) if has_stages(mesh) else None
        self._device = mesh_device(mesh)
        self._stream = _copying(self._device) if self._device.type != "cpu" else None
        self._ahead = int(self._stream is not None) if ahead is None else ahead

    def __call__(self, host: Iterable[tuple[Any, int | None]]) -> Iterator[Any]:
        """The batches in order; with None in the place of a checksum they have been compared already."""
        sent: deque[tuple[Any, torch.Event | None]] = deque()
        for batch, fingerprint in begun(host):
            sent.append(self._sent(batch, fingerprint))
            del batch
            if len(sent) > self._ahead:
                yield self._received(*sent.popleft())
        while sent:
            yield self._received(*sent.popleft())

    def _sent(self, batch: Any, fingerprint: int | None) -> tuple[Any, torch.Event | None]:
        """The batch on the device, its copies under way, and an event for their end."""
        if self._spatial.size > 1:
            self._require_keys(batch)
        if fingerprint is not None and (self._spatial.size > 1 or self._stages is not None):
            self._require_same(fingerprint)
        if self._stream is None:
            return self.place(batch), None
        with self._stream:
            return self.place(batch), self._stream.record_event()

    def _received(self, batch: Any, arrival: torch.Event | None) -> Any:
        """The batch, ready for the current stream: its memory came from the copying one."""
        if arrival is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(arrival)
            for tensor in _leaves(batch):
                for held in _held(tensor):
                    held.record_stream(stream)
        return batch

    def place(self, batch: Any) -> Any:
        """This rank's batch on its device, from what `Collation` made."""
        return replaced(batch, self._on_device)

    def _on_device(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Cut):
            spec = even_spec(value.shape, self._mesh)
            return wrap(value.local.to(self._device, non_blocking=True), spec)
        return value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value

    def _require_keys(self, batch: Any) -> None:
        known = list(batch) if isinstance(batch, Mapping) else []
        unknown = [key for key in self._split if key not in known] if self._split != "auto" else []
        if unknown:
            raise RecipeError(f"split names {unknown}, which the batch does not have; its keys are {known}")

    def _require_same(self, fingerprint: int) -> None:
        group = self._spatial.replica
        mine = torch.tensor(fingerprint, device=device_of_facts(group, self._device))
        found, ranks = all_gather_no_grad(mine, group, "samples", _LINE), list(self._spatial.replica_ranks)
        if self._stages is not None:  # of all of them, so that all raise
            mine = torch.stack([found, torch.tensor(ranks).to(found)])
            of_stages = all_gather_no_grad(mine, self._stages.group, "samples of stages", _LINE)
            found, ranks = of_stages[:, 0].flatten(), of_stages[:, 1].flatten().tolist()
        require_alike(ranks, found.tolist())


def begun(batches: Iterable[_Batch]) -> Iterator[_Batch]:
    """Their iterator. A DataLoader's draws a seed where tensors are made, with a generator of the host."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        return iter(batches)


@cache
def _copying(device: torch.device) -> torch.Stream:
    """The one stream on which batches come to a GPU: torch keeps the memory of each stream's tensors apart."""
    return torch.Stream(device)


def require_alike(ranks: list[int], checksums: list[int]) -> None:
    """Raises RecipeError where the `ranks` of a replica have batches of different `checksums`."""
    if len(set(checksums)) > 1:
        raise RecipeError(
            f"ranks {ranks} of one replica read different samples (checksums {checksums}); "
            "draw augmentation from torch, numpy.random, random or generators that the dataset holds, whose states "
            "are set for each sample, not from a module's or a file's, as many numbers whatever rows and columns "
            "are read, and give every rank the same files"
        )


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank."""
    return current(mesh.device_type)


def _frame(batch: Any, dims: int) -> tuple[int, ...] | None:
    """The last two, or three, dims of the largest tensor that has more."""
    largest = max((t for t in _leaves(batch) if t.dim() > dims), key=Tensor.numel, default=None)
    return None if largest is None else tuple(largest.shape[-dims:])


def _is_reduced(tensor: Tensor, frame: tuple[int, ...] | None) -> bool:
    """Whether it is an image, or a target, of the frame's size over one whole number: a low resolution, a heatmap.

    None with less than 8 rows or columns: boxes and matrices have as many.
    """
    if frame is None or tensor.dim() <= len(frame):
        return False
    size = tensor.shape[-len(frame) :]
    return min(size) >= 8 and frame[0] % size[0] == 0 and tuple(frame[0] // size[0] * s for s in size) == frame


def checksum(batch: Any, start: int = 0) -> int:
    """A checksum of what every rank of the replica has, and of the global shapes of the tensors that are cut.

    Raises RecipeError for an object of another class that holds tensors: it is neither compared nor moved.
    """
    found = start
    for value in leaves(batch):
        if not isinstance(value, (Tensor, Cut)):
            found = zlib.crc32(_told(value), found)
            continue
        tensor = value.local if isinstance(value, Cut) else value
        found = zlib.crc32(str((tuple(value.shape), tensor.dtype)).encode(), found)
        if isinstance(value, Cut):
            continue
        elements = without_class(tensor).detach().reshape(-1)
        # An odd step walks through the columns of an image of any even width.
        elements = plain(elements[:: elements.numel() // _FINGERPRINT_ELEMENTS | 1]).cpu()
        found = zlib.crc32(in_bytes(elements).numpy().tobytes(), found)
    return found


def _told(value: Any) -> bytes:
    """What ranks have in common of a leaf that is no tensor: numbers, words, arrays; nothing of other objects."""
    if isinstance(value, (np.ndarray, np.generic)):
        elements = np.asarray(value).reshape(-1)
        elements = elements[:: elements.size // _FINGERPRINT_ELEMENTS | 1]
        return repr(elements.tolist()).encode() if elements.dtype.hasobject else elements.tobytes()
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value).encode()
    _require_seen(value)
    return b""


def _require_seen(value: Any) -> None:
    if not isinstance(value, (Tensor, type)) and any(isinstance(leaf, Tensor) for leaf in held(value)):
        raise RecipeError(
            f"the batch holds a {type(value).__name__} with tensors in it, which is neither cut nor moved; let collate "
            "give dicts, lists or tuples of them"
        )


def _lockable(value: Any, path: tuple[Any, ...]) -> Any:
    """`value`, a copy where a tensor cannot be page-locked: on a device, or of shared elements, as by `expand`."""
    if not isinstance(value, Tensor):
        return value
    value = value.cpu()
    if value.layout != torch.strided:
        return value
    is_shared = any(not stride and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))
    return value.contiguous() if is_shared else value


def _held(tensor: Tensor) -> Iterable[Tensor]:
    """The tensors that hold its elements, which are several where it is sparse."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _leaves(value: Any) -> list[Any]:
    """Each tensor or `Cut` in nested containers."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, (Tensor, Cut))]


def _shapes(value: Any) -> Any:
    """What a sample holds, in a few words."""
    if isinstance(value, Mapping):
        return {key: _shapes(one) for key, one in value.items()}
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else tuple(shape)
