"""Streams: each replica reads its own part, its ranks their columns of it, and all take the same steps."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import fullframe as ff
from fullframe.errors import MeshError, RecipeError
from tests.rank_group import RankFailure, rank_group
from tests.training.tiny import Frames

COLUMNS = 11


class Stream(IterableDataset):
    """Numbered images, of which a replica gives each `step`-th."""

    def __init__(self, first, step, samples):
        self.numbers = range(first, samples, step)

    def __iter__(self):
        for number in self.numbers:
            generator = torch.Generator("cpu").manual_seed(number)
            image = torch.randn(2, 6, COLUMNS, generator=generator, dtype=torch.float64, device="cpu")
            yield {"image": image, "mask": image[0] > 0, "number": number}


def stream_of(mesh, samples, size=2, workers=0, drop_last=False, **options):
    replica, replicas = mesh.get_local_rank("data"), mesh.size(0)
    data = Stream(replica, replicas, samples)
    return ff.ShardedStream(DataLoader(data, size, num_workers=workers, drop_last=drop_last), mesh, **options)


def read(width, samples, options):
    mesh = ff.init_mesh(width=width)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [
            (batch["number"].tolist(), _whole(batch["image"]), batch["image"].shape[3], _local(batch["image"]))
            for batch in stream_of(mesh, samples, **options)
        ]
    return found, [str(one.message) for one in said if "stream" in str(one.message)]


def _whole(value):
    return value.full() if isinstance(value, ff.SpatialTensor) else value


def _local(value):
    return value.local.shape[3] if isinstance(value, ff.SpatialTensor) else value.shape[3]


@pytest.mark.parametrize(("width", "workers"), [(2, 0), (1, 1)])
def test_replicas_read_their_parts_and_end_together(width, workers):
    ranks = rank_group(4).run(read, width, 14, {"workers": workers, "drop_last": True})
    alone = {item["number"]: item["image"] for item in Stream(0, 1, 14)}
    replicas = 4 // width
    for rank, (found, said) in enumerate(ranks):
        mine = [*range(rank // width, 14, replicas)]
        steps = min(len(range(replica, 14, replicas)) // 2 for replica in range(replicas))
        assert [numbers for numbers, *_ in found] == [mine[2 * k : 2 * k + 2] for k in range(steps)]
        for numbers, image, columns, local in found:
            assert torch.equal(image, torch.stack([alone[number] for number in numbers]))
            assert columns == COLUMNS and local in ((5, 6) if width == 2 else (COLUMNS,))
        ended = width == 1 and rank == 0  # replicas 2 and 3 have 3 samples each, one batch; 0 and 1 have 4
        assert len(said) == ended
        assert not said or "stream of replicas [2, 3] has ended and others go on" in said[0]


def trained(width, weighted):
    mesh = ff.init_mesh(width=width)
    torch.manual_seed(0)
    model = ff.parallelize(nn.Conv2d(2, 1, 3, padding=1).double(), mesh)
    stream = stream_of(mesh, 7, weighted=weighted)  # of two replicas: 4 and 3 samples
    for batch in stream:
        loss = F.binary_cross_entropy_with_logits(model(batch["image"])[:, 0], batch["mask"].double())
        (loss * stream.weight).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_the_gradient_is_that_of_one_process_by_the_weights():
    torch.manual_seed(0)
    model = nn.Conv2d(2, 1, 3, padding=1).double()
    samples = list(Stream(0, 1, 7))
    for numbers in ((0, 2, 1, 3), (4, 6, 5)):  # what both replicas have in a step
        image = torch.stack([samples[number]["image"] for number in numbers])
        mask = torch.stack([samples[number]["mask"] for number in numbers])
        F.binary_cross_entropy_with_logits(model(image)[:, 0], mask.double()).backward()
    for width in (1, 2):
        for found in rank_group(2 * width).run(trained, width, True):
            for mine, whole in zip(found, (parameter.grad for parameter in model.parameters()), strict=True):
                torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)


def test_unequal_batches_are_refused():
    with pytest.raises(RankFailure, match=r"replicas have batches of \[2, 1\] samples: the mean .* weighted=True"):
        rank_group(2).run(trained, 1, False)


def _apart(lengths):
    mesh, rank = ff.init_mesh(width=2), dist.get_rank()
    batches = [torch.full((1, 1, 4, 8), number + lengths[0] * rank) for number in range(lengths[rank])]
    return [batch.full() for batch in ff.ShardedStream(batches, mesh)]


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ((2, 2), r"ranks \[0, 1\] of one replica read different"),
        ((0, 1), r"ends on \[0\] of the ranks \[0, 1\] of one"),
    ],
)
def test_ranks_of_a_replica_that_read_different_samples_are_refused(lengths, text):
    with pytest.raises(RankFailure, match=text):
        rank_group(2).run(_apart, lengths)


def _alike(batches):
    mesh = ff.init_mesh()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = len(list(ff.ShardedStream(batches, mesh)))
    return found, [str(one.message) for one in said if "replicas 0 and 1 read the same batch" in str(one.message)]


def test_replicas_that_read_the_same_are_told_once():
    found = rank_group(2).run(_alike, [{"image": torch.ones(2, 1, 3, 3) * k} for k in range(3)])
    assert [(steps, len(said)) for steps, said in found] == [(3, 1), (3, 0)]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(3, 2), 3),
        ([torch.ones(4, 1), torch.ones(4)], 4),
        ({"image": torch.ones(2, 5), "nested": {"mask": torch.ones(2)}, "scale": torch.tensor(1.0)}, 2),
        (([torch.ones(3, 5, 5)] * 2, [{"boxes": torch.ones(1, 4)}] * 2), 2),
        ((torch.ones(2), torch.ones(3)), 0),
        ("words", 0),
    ],
)
def test_samples_are_counted_where_a_batch_tells(batch, samples):
    from fullframe.training.loading.stream import _samples

    assert _samples(batch) == samples


def test_what_is_no_stream_is_refused():
    mesh = ff.init_mesh()
    with pytest.raises(RecipeError, match=r"Frames has numbers by which .*; use ff.ShardedLoader"):
        ff.ShardedStream(DataLoader(Frames(4), 2), mesh)
    with pytest.raises(RecipeError, match="prefetch must be a number of batches >= 0, got -1"):
        ff.ShardedStream([], mesh, prefetch=-1)
    with pytest.raises(MeshError):
        ff.ShardedStream([], dist.device_mesh.init_device_mesh("cpu", (1,)))


def test_each_pass_asks_the_stream_anew():
    mesh = ff.init_mesh()
    stream = ff.ShardedStream(DataLoader(Stream(0, 1, 4), 2), mesh, prefetch=1)
    assert [[batch["number"].tolist() for batch in stream] for _ in range(2)] == [[[0, 1], [2, 3]]] * 2
    assert stream.weight == 1.0
    assert next(iter(stream))["image"].shape == (2, 2, 6, COLUMNS)
