"""Tensors moved between the ranks of one process set. All ranks call the same methods in the same order.

Whatever only moves is sent as bytes, so that every dtype can be.
"""

import datetime
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.horovod.board import BLOCK, Board, board_between
from fullframe.horovod.request import ReduceOp
from fullframe.ranks.raw_bytes import in_bytes

_ROOM = BLOCK - 4  # of a message that all ranks send at once; its length comes first
_KEPT_BYTES = 64 << 20  # of a buffer that is not given back
# Gloo has no sums of these.
_WIDER = {torch.int16: torch.int32, torch.bool: torch.uint8}
_OPS: dict[ReduceOp, Any] = {
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Average: dist.ReduceOp.SUM,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
}


class Collectives:
    """The ranks `0 .. size - 1` of a process set, connected through `store`; gloo, and nccl for CUDA tensors.

    Ranks of one machine tell each other short messages through memory.
    """

    def __init__(self, store: Any, rank: int, size: int, connect_seconds: float, timeout_seconds: float):
        self.rank, self.size = rank, size
        self._store, self._timeout = store, datetime.timedelta(seconds=timeout_seconds)
        self._gloo: Any = None
        if size > 1:
            connect = datetime.timedelta(seconds=connect_seconds)
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, connect)
            self._gloo._set_default_timeout(self._timeout)
        self._nccl: Any = None
        self._block = torch.zeros(BLOCK, dtype=torch.uint8, device="cpu")
        self._blocks = torch.zeros(size * BLOCK, dtype=torch.uint8, device="cpu")
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._board: Board | None = None
        if size > 1:
            self._board = board_between(rank, size, timeout_seconds, self.exchange)

    @property
    def asks_quickly(self) -> bool:
        """Whether a short message takes a small part of the time that a small allreduce does."""
        return self._board is not None

    def close(self) -> None:
        """Let the connections go: a rank that waits for this one gets an error."""
        if self._board is not None:
            self._board.close()
        for group in (self._gloo, self._nccl):
            if group is not None:
                group.abort()
        self._gloo = self._nccl = None

    def exchange(self, message: bytes, eager: bool = False) -> list[bytes]:
        """The messages of all ranks, by rank; any lengths. `eager`: a caller waits, so this may keep a core busy."""
        if self.size == 1:
            return [message]
        head = len(message).to_bytes(4, "little") + message[:_ROOM]
        blocks = self._heads(head) if self._board is None else self._board.exchange(head, eager)
        lengths = [int.from_bytes(block[:4], "little") for block in blocks]
        heads = [block[4 : 4 + length] for block, length in zip(blocks, lengths, strict=True)]
        longest = max(lengths) - _ROOM
        if longest <= 0:
            return heads
        rest = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if message[_ROOM:]:
            rest[: len(message) - _ROOM] = torch.frombuffer(bytearray(message[_ROOM:]), dtype=torch.uint8)
        rests = torch.zeros(self.size * longest, dtype=torch.uint8, device="cpu")
        self._gloo._allgather_base(rests, rest).wait()
        tails = [
            bytes(row)[: max(n - _ROOM, 0)]
            for row, n in zip(rests.view(self.size, longest).numpy(), lengths, strict=True)
        ]
        return [head + tail for head, tail in zip(heads, tails, strict=True)]

    def allreduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Reduce a contiguous tensor in place, average apart: that is summed, and divided by the caller."""
        if self.size == 1 or not tensor.numel():
            return
        group = self._group(tensor)
        wider = _WIDER.get(tensor.dtype)
        if wider is None and group is self._gloo and tensor.is_cuda:
            wider = tensor.dtype
        if wider is None:
            group.allreduce(tensor, _OPS[op]).wait()
            return
        if tensor.dtype == torch.bool:  # a sum of truths is "any", a product "all"
            op = {ReduceOp.Sum: ReduceOp.Max, ReduceOp.Product: ReduceOp.Min}.get(op, op)
        copy = tensor.to(wider) if group is not self._gloo else tensor.cpu().to(wider)
        group.allreduce(copy, _OPS[op]).wait()
        tensor.copy_(copy)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite a contiguous tensor with the root's."""
        if self.size > 1 and tensor.numel():
            raw, group = self._bytes(tensor)
            group.broadcast(raw, root).wait()
            self._back(raw, tensor)

    def allgather(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """(rows[rank], ...) of each rank -> (sum(rows), ...)."""
        shape = (sum(rows), *tensor.shape[1:])
        whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        if self.size == 1:
            return whole.copy_(tensor)
        if not whole.numel():
            return whole
        if len(set(rows)) == 1:
            mine, group = self._bytes(tensor.contiguous())
            raw, _ = self._bytes(whole)
            group._allgather_base(raw, mine).wait()
            self._back(raw, whole)
            return whole
        pieces = list(whole.split(list(rows)))
        pieces[self.rank].copy_(tensor)
        for root, piece in enumerate(pieces):  # exactly as many bytes as there are, where the ranks have unequally many
            self.broadcast(piece, root)
        return whole

    def alltoall(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows of `tensor`, `send[rank]` to each rank; those received, in the order of the ranks."""
        shape = (sum(receive), *tensor.shape[1:])
        out = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        if self.size == 1:
            return out.copy_(tensor)
        row = math.prod(tensor.shape[1:]) * tensor.element_size()  # bytes
        if not row:
            return out
        mine, group = self._bytes(tensor.contiguous())
        raw, _ = self._bytes(out)
        options = dist.AllToAllOptions()
        group.alltoall_base(raw, mine, [n * row for n in receive], [n * row for n in send], options).wait()
        self._back(raw, out)
        return out

    def reducescatter(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """The sum over the ranks of the rows that are this rank's, `rows[rank]` of them, added in the ranks' order."""
        own = rows[self.rank]
        pieces = self.alltoall(tensor, rows, [own] * self.size).view(self.size, own, *tensor.shape[1:])
        total = pieces[0].clone()
        for piece in pieces[1:]:
            total += piece
        return total

    def adasum(self, tensor: Tensor) -> None:
        """Reduce one layer's gradient in place by Adasum (Maleki et al. 2020): pairs of ranks, then pairs of pairs.

        Each two vectors a, b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are orthogonal,
        their mean where they are equal.
        """
        distance = 1
        while distance < self.size:
            partner = self.rank ^ distance
            rows = [int(rank == partner) for rank in range(self.size)]
            other = self.alltoall(tensor.unsqueeze(0), rows, rows).squeeze(0)
            a, b = (tensor, other) if self.rank < partner else (other, tensor)
            tensor.copy_(_adasum(a, b))
            distance *= 2

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(count,) for tensors that are reduced as one; on the CPU the same memory again, as new memory is paged in."""
        size = count * dtype.itemsize
        if device.type != "cpu" or size > _KEPT_BYTES:
            return torch.empty(count, dtype=dtype, device=device)
        if size > len(self._buffer):
            with torch.inference_mode(False):  # a caller's, which none but such a caller could write to
                self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._buffer[:size].view(dtype)

    def _heads(self, head: bytes) -> list[bytes]:
        """The first bytes of the ranks' messages, by gloo."""
        self._block[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._gloo._allgather_base(self._blocks, self._block).wait()
        return [bytes(block) for block in self._blocks.view(self.size, BLOCK).numpy()]

    def _group(self, tensor: Tensor) -> Any:
        if not tensor.is_cuda or not dist.is_nccl_available():
            return self._gloo
        if self._nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self._store), self.rank, self.size, options)
        return self._nccl

    def _bytes(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """A contiguous tensor as flat bytes, on the CPU where gloo moves them, and the group that does."""
        group = self._group(tensor)
        flat = in_bytes(tensor)
        return (flat.cpu() if group is self._gloo else flat), group

    def _back(self, raw: Tensor, tensor: Tensor) -> None:
        if raw.device != tensor.device:
            in_bytes(tensor).copy_(raw)


def _adasum(a: Tensor, b: Tensor) -> Tensor:
    x, y = a.double(), b.double()
    dot, of_a, of_b = (x * y).sum(), (x * x).sum(), (y * y).sum()
    share_a = 1 - torch.where(of_a > 0, dot / (2 * of_a), 0.0)
    share_b = 1 - torch.where(of_b > 0, dot / (2 * of_b), 0.0)
    return (share_a * x + share_b * y).to(a.dtype)
