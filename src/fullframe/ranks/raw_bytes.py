"""Values sent as bytes: of any dtype and layout, where NCCL takes contiguous tensors of the dtypes it knows."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from fullframe.ranks.waiting import naming_lost_ranks

KNOWN = {  # to NCCL, through torch 2.13
    torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
BUCKET_BYTES = 25 << 20  # of a message in which tensors travel together, as in DDP
_LARGE_BYTES = 1 << 20  # of a tensor that makes a message by itself
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def plain(tensor: Tensor) -> Tensor:
    """Contiguous, with its values in memory: of a conjugate, or a negative, it may have the other ones and a mark."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.contiguous()


def in_bytes(tensor: Tensor) -> Tensor:
    """A view of the bytes of a tensor whose memory has no gaps, for where NCCL does not know the dtype."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """For each tensor the sum of its elements, their bits read as whole numbers."""
    sums = [checksum(tensor) for tensor in tensors]
    return torch.stack(sums).tolist() if sums else []


def checksum(tensor: Tensor) -> Tensor:
    """That sum, of 64 bits, where the tensor lies; the host does not wait for it."""
    return _words(tensor.detach()).sum(dtype=torch.int64)


def _words(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.view(INTEGERS[real.element_size()])


def some_elements(tensor: Tensor, turn: int, most: int) -> Tensor:
    """At most so many of its elements, in one dim: of a large tensor those of a row, another at each `turn`."""
    values = tensor.detach()
    while values.dim() > 1 and values.numel() > most:
        values = values[turn % len(values)]
    return values.reshape(-1)[:most]


@torch.no_grad()
@naming_lost_ranks()
def share_values(tensors: Iterable[Tensor]) -> None:
    """Every rank of the job takes the first rank's values, in few messages; all ranks call it with equal shapes."""
    together = []
    for tensor in map(without_repeats, tensors):
        is_plain = type(tensor) in (Tensor, nn.Parameter, FakeTensor) and tensor.layout == torch.strided
        is_large = tensor.dtype in KNOWN and tensor.nbytes >= _LARGE_BYTES
        if not is_plain or tensor.is_inference():
            dist.broadcast(tensor, 0)
        elif is_large:  # whatever its layout, of which each rank has its own
            sent = tensor.contiguous()
            dist.broadcast(sent, 0)
            if sent is not tensor:
                take(tensor, sent)
        elif tensor.numel():
            together.append(tensor)
    for bucket in _buckets(together):
        # Clones, as what is contiguous for want of several elements may have any strides.
        copies = [tensor.clone(memory_format=torch.contiguous_format).view(-1) for tensor in bucket]
        flat = torch.cat([tensor.view(torch.uint8) for tensor in copies])
        dist.broadcast(flat, 0)
        for tensor, raw in zip(bucket, flat.split([tensor.nbytes for tensor in bucket]), strict=True):
            take(tensor, raw.clone().view(tensor.dtype).view(tensor.shape))  # a clone begins where any dtype may


def take(tensor: Tensor, values: Tensor) -> None:
    """Write what the first rank has sent; replaced in a simulation, where each rank has the same numbers."""
    tensor.copy_(values)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one device that make a message."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        other = bucket and tensor.device != bucket[0].device
        if other or sum(one.nbytes for one in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """`tensor.copy_(values)`, also where torch refuses it: where the tensor is expanded, as those of `meshgrid` are."""
    for dim in repeated_dims(tensor):
        tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def repeated_dims(tensor: Tensor) -> list[int]:
    """The dims along which a tensor was expanded."""
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return [dim for dim, stride in enumerate(strides) if stride == 0 and tensor.size(dim) > 1]


def without_repeats(tensor: Tensor) -> Tensor:
    """Without its graph; of an expanded tensor what was expanded, which can be written to."""
    tensor = tensor.detach()
    for dim in repeated_dims(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor
