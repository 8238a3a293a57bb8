"""torch.distributed.checkpoint's storage, made of safetensors files and a JSON manifest instead of pickles.

DCP plans: it deals what all ranks hold alike out to them, and reads any sharding into any other. `save` here only
takes copies in host memory; writing them is `checkpoint.py`'s affair.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fullframe.errors import CheckpointError
from fullframe.training.checkpoints.manifest import Chunk, Manifest, StoredTensor, key_in_file


class Copies(StorageWriter):
    """Takes this rank's share of a state into host memory, named as in its file."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.stored: dict[str, StoredTensor] = {}  # on rank 0: the whole state, by all ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy; nothing is written."""
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor) and item.tensor_data is not None  # only tensors are given to DCP
            whole = StoredTensor(tensor.dtype, tuple(item.tensor_data.size), ())
            offsets, sizes = tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)
            self.tensors[key_in_file(item.index.fqn, whole, offsets, sizes)] = _host_copy(tensor)
            results.append(WriteResult(item.index, tensor.nbytes, (offsets, sizes)))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: learn which rank has which part."""
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for rank, written in enumerate(results):
            for result in written:
                offsets, sizes = result.storage_data
                chunks[result.index.fqn].append(Chunk(offsets, sizes, file_of(rank)))
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            self.stored[name] = StoredTensor(tensor.properties.dtype, tuple(tensor.size), tuple(chunks[name]))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any will do."""
        return True


class StoredFiles(StorageReader):
    """Reads the boxes that DCP asks for out of a checkpoint's files."""

    def __init__(self, folder: Path, manifest: Manifest):
        self._folder, self._tensors = folder, manifest.tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in DCP's words."""
        described: dict[str, Any] = {}
        places: dict[MetadataIndex, Chunk] = {}
        for name, tensor in self._tensors.items():
            boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
            described[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.sizes), boxes)
            places |= {MetadataIndex(name, chunk.offsets): chunk for chunk in tensor.chunks}
        return Metadata(described, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember where the chunks are."""
        self._places: Mapping[MetadataIndex, Chunk] = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each file once."""
        by_file: dict[str, list[tuple[ReadItem, Chunk]]] = defaultdict(list)
        for item in plan.items:
            chunk = self._places[item.storage_index]
            by_file[chunk.file].append((item, chunk))
        for name, wanted in by_file.items():
            with safe_open(self._folder / name, framework="pt") as file:
                for item, chunk in wanted:
                    box = tuple(
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    stored = item.storage_index.fqn
                    part = file.get_slice(key_in_file(stored, self._tensors[stored], chunk.offsets, chunk.sizes))[box]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        return _done(None)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any will do."""
        return True


class _SavePlanner(dcp.DefaultSavePlanner):
    """Is given all tensors under one name, as `dcp.save` logs each name that it is given, 0.2 ms each."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[""], storage_meta, is_coordinator)


def copy_to_host(tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> Copies:
    """This rank's share of the group's tensors, as they are now; all its ranks call it.

    A tensor that several ranks give whole is taken from one of them.
    """
    copies = Copies()
    try:
        planner = _SavePlanner(flatten_state_dict=False)
        dcp.save({"": tensors}, storage_writer=copies, planner=planner, process_group=group)
    except dcp.CheckpointException as error:  # no Exception, so that it would pass by every handler
        raise CheckpointError(f"the state cannot be copied for a checkpoint: {error}") from error
    return copies


def read_into(tensors: dict[str, Tensor], folder: Path, manifest: Manifest) -> None:
    """Fill the tensors, whole or sharded in any way, in place; all ranks call it."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    try:
        dcp.load(tensors, storage_reader=StoredFiles(folder, manifest), planner=planner)
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def file_of(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"rank-{rank}.safetensors"


def _host_copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    pinned = tensor.is_cuda
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=pinned)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
