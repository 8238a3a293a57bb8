"""What NCCL would not take as it is arrives all the same. Gloo sends it here, held to NCCL's rules."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

import fullframe as ff
from fullframe.ranks import raw_bytes
from fullframe.ranks.channel import Channel, Record
from fullframe.ranks.exchange import InFlight, Message
from fullframe.ranks.mesh import spatial_of
from fullframe.ranks.raw_bytes import checksums, overwrite, share_values
from tests.rank_group import rank_group

NCCL = {torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16}
NCCL |= {torch.float32, torch.float64}
DTYPES = (torch.int16, torch.uint16, torch.complex64, torch.bool, torch.float64, torch.bfloat16)


def values(rank):
    """Tensors of every kind, with numbers of their own on each rank."""
    made = [torch.arange(35).reshape(5, 7).add(10 * rank).to(dtype) for dtype in DTYPES]
    made += [made[0].t(), made[4].t().requires_grad_(), torch.full((), 3 + rank, dtype=torch.int16)]
    made += [torch.arange(5.0).add(rank)[:, None].expand(5, 4), torch.full((1,), 2.0 + rank).expand(4)]
    made += [torch.full((2, 3, 4, 5), 7.0 + rank).to(memory_format=torch.channels_last), torch.empty(0, 3)]
    made += [torch.full((600, 600), 1.0 + rank), torch.full((600, 1200), 2.0 + rank).t()[::2]]  # a message each
    other = torch.arange(600.0 * 700.0).view(600, 700) + rank
    made.append(other.t().contiguous().t() if rank else other)  # in another layout than the first rank's
    return made


def shared(bucket_bytes):
    raw_bytes.BUCKET_BYTES, before, real, sent = bucket_bytes, raw_bytes.BUCKET_BYTES, dist.broadcast, []

    def by_the_rules(tensor, source):
        assert tensor.is_contiguous() and tensor.dtype in NCCL and not tensor.requires_grad
        sent.append(tensor.nbytes)
        real(tensor, source)

    mine = values(dist.get_rank())
    layouts = [tensor.stride() for tensor in mine]
    dist.broadcast = by_the_rules
    try:
        share_values(mine)
    finally:
        raw_bytes.BUCKET_BYTES, dist.broadcast = before, real
    assert [tensor.stride() for tensor in mine] == layouts
    return [torch.equal(own, first) for own, first in zip(mine, values(0), strict=True)], len(sent)


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(25 << 20, 4), (300, 7)])
def test_all_ranks_get_the_first_ranks_values(bucket_bytes, messages):
    for equal, sent in rank_group(3).run(shared, bucket_bytes):
        assert all(equal) and sent == messages


def test_what_is_expanded_is_written_where_it_repeats_nothing():
    grid = torch.meshgrid(torch.arange(2.0), torch.arange(3.0), indexing="ij")[0]
    tensors = [
        grid,
        torch.zeros(2, 3),
        torch.zeros(2, 1).expand(2, 3),
        torch.zeros(()).expand(2, 3),
        torch.zeros(3, 2).t(),
    ]
    for tensor in tensors:
        values = torch.tensor([[4.0], [5.0]]).expand(2, 3) if tensor is not tensors[3] else torch.full((2, 3), 4.0)
        strides = tensor.stride()
        overwrite(tensor, values.contiguous())
        assert torch.equal(tensor, values) and tensor.stride() == strides


def test_a_checksum_of_what_is_kept_as_its_conjugate():
    kept = torch.tensor([1 + 2j, 3 + 1j]).conj()  # a transfer function among the buffers, say
    assert checksums([kept]) == checksums([kept.resolve_conj()]) != checksums([kept.conj()])


def test_a_simulations_buffers_travel_together_too(monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: sent.append(tensor.nbytes))
    with FakeTensorMode():
        share_values([torch.zeros(3), torch.zeros((), dtype=torch.int64), torch.zeros(2, 5).t()])
    assert sent == [12 + 8 + 40]


def exchanged(dtype):
    """A row to each of two neighbours and one from each, by what NCCL does."""
    axis = spatial_of(ff.init_mesh(width=3)).axis("width")
    axis = replace(axis, channel=Channel(axis.ranks, record=Record()))
    peers = [(axis.coordinate + 1) % 3, (axis.coordinate - 1) % 3]
    rows = torch.arange(12).reshape(3, 2, 2)[axis.coordinate].to(dtype)
    sends = [Message(peer, (rows + peer).t()) for peer in peers]
    receives = [Message(peer, torch.empty(2, 2, dtype=dtype)) for peer in peers]
    real = dist.P2POp

    def by_the_rules(op, tensor, *args):
        assert tensor.is_contiguous() and tensor.dtype in NCCL
        return real(op, tensor, *args)

    dist.P2POp = by_the_rules
    try:
        got = InFlight(axis, sends, receives).wait()
    finally:
        dist.P2POp = real
    expected = [torch.arange(12).reshape(3, 2, 2)[peer].add(axis.coordinate).to(dtype).t() for peer in peers]
    return all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64, torch.float32], ids=str)
def test_rows_of_any_dtype_travel(dtype):
    assert rank_group(3).run(exchanged, dtype) == [True] * 3
