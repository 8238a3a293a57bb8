"""Whether the ranks still hold the same numbers: what is replicated must be equal to the last bit on all of them.

Parameters are compared over all ranks, buffers within a replica (batch norm's running statistics are its own until
the next forward), and of a sharded parameter what lies on several ranks. GPUs may compute a value that is not split
each with another kernel; so there buffers, which follow from such values, may differ by rounding, and are made equal.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import RunError
from fullframe.model.sharding.values import is_sharded, shard_of
from fullframe.ranks.agreement import from_all_ranks
from fullframe.ranks.collectives import all_gather_no_grad
from fullframe.ranks.mesh import Spatial, spatial_of
from fullframe.ranks.raw_bytes import checksums
from fullframe.spatial.tensor import SpatialTensor

_PRIME = 2**61 - 1
_REPLICA = "replica"  # what is alike on its ranks alone
_ROUNDING = 1e-3  # of a buffer's largest element: as TF32 rounds


K = TypeVar("K", bound=Hashable)


class _Held(NamedTuple):
    name: str
    part: Hashable  # ranks that name the same part must hold the same
    tensor: Tensor


def require_same_numbers(model: nn.Module, mesh: DeviceMesh, step: int) -> None:
    """Raises RunError on all ranks, naming the first tensor in which ranks differ; all ranks call it."""
    if dist.get_world_size() == 1:
        return
    held = list(_held(model, mesh))
    sums = checksums([one.tensor for one in held])
    totals: dict[Hashable, int] = defaultdict(int)
    for number, (one, checksum) in enumerate(zip(held, sums, strict=True), start=1):
        totals[one.part] = (totals[one.part] + number * checksum) % _PRIME
    if not _odd_ones(from_all_ranks(dict(totals))):
        return
    mine = {(number, one.part): checksum for number, (one, checksum) in enumerate(zip(held, sums, strict=True))}
    different = _odd_ones(from_all_ranks(mine))
    if _kernels_vary(mesh):
        rounded = _equalized(held, different, spatial_of(mesh))
        different = {key: ranks for key, ranks in different.items() if key not in rounded}
        if not different:
            return
    number, _ = min(different, key=lambda key: key[0])
    ranks = sorted({rank for key, found in different.items() if key[0] == number for rank in found})
    raise RunError(
        f"the ranks have drifted apart: after step {step}, {held[number].name} on rank {', '.join(map(str, ranks))} "
        f"differs from the other ranks' ({len({key[0] for key in different})} of {len(held)} tensors do); what was "
        "trained since the last check is wrong. Go on from the last checkpoint with --resume; if it happens again, a "
        "device computes wrongly, or the model keeps something of its own on each rank"
    )


def _kernels_vary(mesh: DeviceMesh) -> bool:
    """Whether equal devices may compute the same thing with different kernels."""
    return mesh.device_type != "cpu"


def _equalized(held: list[_Held], different: Iterable[tuple[int, Hashable]], spatial: Spatial) -> set[Any]:
    """Those of the keys of `different` that are buffers apart by rounding; they get the value of the first rank.

    All ranks call it with the same keys and get the same answer.
    """
    found = []
    for number, part in sorted(different, key=lambda key: key[0]):
        one = held[number]
        if one.part != part or part[0] != _REPLICA or not one.tensor.is_floating_point():  # type: ignore[index]
            continue
        everyone = all_gather_no_grad(one.tensor, spatial.replica, "buffers")
        spread = (everyone.amax(0) - everyone.amin(0)).max()
        if bool(spread <= _ROUNDING * everyone.abs().max()):
            one.tensor.copy_(everyone[0])
            found.append((number, part))
    return {key for keys in from_all_ranks(found) for key in keys}


def _held(model: nn.Module, mesh: DeviceMesh) -> Iterator[_Held]:
    parameter: Any
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            yield _Held(name, ("shard", shard_of(parameter)), parameter.to_local().detach())
        else:
            yield _Held(name, "all", parameter.detach())
    for name, buffer in model.named_buffers():
        if not isinstance(buffer, SpatialTensor):
            yield _Held(name, (_REPLICA, mesh.get_local_rank("data")), buffer.detach())


def _odd_ones(everywhere: list[dict[K, int]]) -> dict[K, list[int]]:
    """Key -> the ranks whose value is not the most common one, for the keys over which ranks differ."""
    by_key: dict[K, dict[int, int]] = defaultdict(dict)
    for rank, values in enumerate(everywhere):
        for key, value in values.items():
            by_key[key][rank] = value
    found = {}
    for key, by_rank in by_key.items():
        common, _ = Counter(by_rank.values()).most_common(1)[0]
        odd = [rank for rank, value in by_rank.items() if value != common]
        if odd:
            found[key] = odd
    return found
