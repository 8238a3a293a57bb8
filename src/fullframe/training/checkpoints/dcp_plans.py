"""Which rank writes and reads which part of a tensor: torch.distributed.checkpoint's planners decide it.

They share out what all ranks hold alike, and match any sharding with any other. DCP's storage, which pickles its
metadata, is not used: `copy_to_host` takes copies for `writer.py`, `read_into` reads safetensors files.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor

from fullframe.errors import CheckpointError
from fullframe.ranks import device
from fullframe.ranks.agreement import from_all_ranks, on_all_ranks, on_first_rank
from fullframe.ranks.raw_bytes import overwrite
from fullframe.training.checkpoints.manifest import Chunk, Manifest, StoredTensor, key_in_file


@dataclass(frozen=True)
class Copies:
    """This rank's share of a state in host memory, and what the shares of all ranks make up."""

    tensors: dict[str, Tensor]  # named as in this rank's file
    stored: dict[str, StoredTensor]


def copy_to_host(tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> Copies:
    """This rank's share of the group's tensors, as they are now; all its ranks call it.

    A tensor that several ranks give whole is taken from one of them.
    """
    rank = dist.get_rank(group)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    planned: dcp.planner.SavePlan | CheckpointError
    try:
        planner.set_up_planner(tensors, is_coordinator=rank == 0)
        planned = planner.create_local_plan()
    except Exception as error:  # the other ranks wait for the plan
        planned = CheckpointError(f"the state cannot be copied for a checkpoint: {error}")
    everyones = from_all_ranks(planned, group)
    plans = on_first_rank(lambda: _shared_out(planner, everyones), group)
    copies: dict[str, Tensor] = {}
    wholes: dict[str, StoredTensor] = {}
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for number, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            assert data is not None  # only tensors are given to DCP
            whole = wholes[name] = StoredTensor(data.properties.dtype, tuple(data.size), ())
            chunk = Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes), file_of(number))
            chunks[name].append(chunk)
            if number == rank:
                copies[key_in_file(name, whole, chunk)] = _host_copy(planner.resolve_data(item))
    device.wait()
    return Copies(copies, {name: replace(whole, chunks=tuple(chunks[name])) for name, whole in wholes.items()})


def _shared_out(
    planner: dcp.DefaultSavePlanner, everyones: list[dcp.planner.SavePlan | CheckpointError]
) -> list[dcp.planner.SavePlan]:
    """The ranks' plans, with what several of them hold left to one; raises the first CheckpointError instead."""
    plans = []
    for plan in everyones:
        if isinstance(plan, CheckpointError):
            raise plan
        plans.append(plan)
    try:
        return planner.create_global_plan(plans)[0]
    except ValueError as error:
        raise CheckpointError(f"the state cannot be copied for a checkpoint: {error}") from error


def read_into(tensors: dict[str, Tensor], folder: Path, manifest: Manifest) -> None:
    """Fill the tensors, whole or sharded in any way, in place; all ranks call it.

    Raises CheckpointError on all ranks when one of them cannot read its part.
    """

    def read() -> None:
        try:
            _read(tensors, folder, manifest)
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be read: {error}") from error

    on_all_ranks(read)


def _read(tensors: dict[str, Tensor], folder: Path, manifest: Manifest) -> None:
    """Read each file once, and of it what this rank needs."""
    metadata = _metadata(manifest)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, metadata)
    by_file: dict[str, list[tuple[dcp.planner.ReadItem, Chunk]]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        chunk = metadata.storage_data[item.storage_index]
        by_file[chunk.file].append((item, chunk))
    for name, wanted in by_file.items():
        with safe_open(folder / name, framework="pt") as file:
            for item, chunk in wanted:
                box = tuple(slice(o, o + length) for o, length in zip(item.storage_offsets, item.lengths, strict=True))
                stored = item.storage_index.fqn
                key = key_in_file(stored, manifest.tensors[stored], chunk)
                overwrite(planner.resolve_tensor(item).detach(), file.get_slice(key)[box])


def _metadata(manifest: Manifest) -> dcp.metadata.Metadata:
    """The manifest as DCP describes a checkpoint."""
    described: dict[str, Any] = {}
    places: dict[dcp.metadata.MetadataIndex, Chunk] = {}
    for name, tensor in manifest.tensors.items():
        boxes = [dcp.metadata.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        described[name] = dcp.metadata.TensorStorageMetadata(
            dcp.metadata.TensorProperties(tensor.dtype), torch.Size(tensor.sizes), boxes
        )
        places |= {dcp.metadata.MetadataIndex(name, chunk.offsets): chunk for chunk in tensor.chunks}
    return dcp.metadata.Metadata(described, storage_data=places)


def file_of(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"rank-{rank}.safetensors"


def _host_copy(value: Any) -> Tensor:
    tensor: Tensor = value.detach()
    pinned = tensor.device.type != "cpu"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=pinned)
