"""Replicas read different samples, the ranks of a replica their slice of the same one, whatever the augmentation."""

import multiprocessing
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import fullframe as ff
from fullframe.errors import CheckpointError, FullframeError, RecipeError
from fullframe.processes.forking import worker_context
from fullframe.training.loading.loader import evaluation_batches
from fullframe.training.session import assemble
from tests.rank_group import RankFailure, rank_group
from tests.training.tiny import Frames, recipe

SAMPLES, BATCH = 11, 4  # two whole batches an epoch; three samples are left out of each


def loader_of(height=1, width=1, workers=0, shuffle=True, split="auto", dataset=None, **options):
    mesh = ff.init_mesh(height=height, width=width)
    read = options.get("kind", DataLoader)(
        dataset or Frames(SAMPLES),
        options.get("batch_size", BATCH),
        shuffle,
        collate_fn=options.get("collate"),
        num_workers=workers,
        drop_last=options.get("drop_last", True),
    )
    return ff.ShardedLoader(
        read,
        mesh,
        split=split,
        seed=options.get("seed", 5),
        prefetch=options.get("prefetch"),
        weighted=options.get("weighted", False),
    )


def full(value):
    return value.full() if isinstance(value, ff.SpatialTensor) else value


def epochs(count, **options):
    """[(names, whole images), ...] of every batch of the first epochs."""
    loader = loader_of(**options)
    return [(batch["name"], full(batch["image"])) for _ in range(count) for batch in loader]


class Watching(Frames):
    """Notes how many of the batches that were handed out are there when a sample is read."""

    def __init__(self):
        super().__init__(16)
        self.handed, self.there = [], []

    def __getitem__(self, index):
        self.there.append(sum(ref() is not None for ref in self.handed))
        return super().__getitem__(index)


def batches_there(prefetch):
    loader = loader_of(dataset=Watching(), prefetch=prefetch, shuffle=False)
    watching = loader.dataset
    batches = iter(loader)
    for _ in range(len(loader)):
        batch = next(batches)
        watching.handed.append(weakref.ref(batch["image"]))
        del batch
    return watching.there


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_batch_goes_when_it_was_used(prefetch):
    assert batches_there(prefetch) == [0] * 16


def test_an_epoch_of_one_process():
    batches = epochs(3)
    assert len(batches) == 6
    names = [name for batch in batches[:2] for name in batch[0]]
    assert len(set(names)) == 8
    assert [batch[0] for batch in batches[:2]] != [batch[0] for batch in batches[2:4]], "epochs differ in order"
    assert [names for names, _ in epochs(1, shuffle=False)] == [
        [f"frame {i}" for i in r] for r in (range(4), range(4, 8))
    ]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_that_counts_the_batches_gets_every_epoch(prefetch):
    """As Lightning's Trainer does, it takes as many as there are, and does not ask for the end."""
    loader, counted = loader_of(prefetch=prefetch), []
    for _ in range(3):
        batches = iter(loader)
        counted += [next(batches)["name"] for _ in range(len(loader))]
    assert counted == [names for names, _ in epochs(3)]


@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_replica_reads_what_one_process_reads(height, width, workers):
    alone = epochs(2)
    for found in rank_group(2).run(epochs_of, 2, height, width, workers):
        assert [names for names, _ in found] == [names for names, _ in alone]
        for (_, image), (_, expected) in zip(found, alone, strict=True):
            torch.testing.assert_close(image, expected, rtol=0, atol=0)


def test_workers_are_forked_as_processes_forking_says():
    """A plain fork may leave a worker stuck before it runs a line."""
    before = set(multiprocessing.active_children())
    kinds = [{type(child) for child in set(multiprocessing.active_children()) - before} for _ in loader_of(workers=1)]
    assert kinds[0] == {worker_context(None).Process}


def epochs_of(count, height, width, workers):
    return epochs(count, height=height, width=width, workers=workers)


def test_replicas_share_out_the_batch():
    alone = epochs(2)
    ranks = rank_group(4).run(epochs_of, 2, 1, 2, 0)  # data 2 x width 2: ranks 0, 1 are the first replica
    for step, (names, images) in enumerate(alone):
        for rank, batches in enumerate(ranks):
            mine = slice(0, 2) if rank < 2 else slice(2, 4)
            assert batches[step][0] == names[mine]
            torch.testing.assert_close(batches[step][1], images[mine], rtol=0, atol=0)


def placements(split):
    """How a batch of differently shaped tensors arrives."""

    class Mixed(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {
                "image": torch.zeros(3, 8, 10),
                "mask": torch.zeros(8, 10, dtype=torch.bool),
                "small": torch.zeros(3, 4, 5),
                "matrix": torch.zeros(10),
                "views": [torch.ones(2, 3, 8, 10), {"index": index}],
            }

    (batch,) = loader_of(width=2, split=split, dataset=Mixed())
    names = {name for name, value in batch.items() if isinstance(value, ff.SpatialTensor)}
    return names, isinstance(batch["views"][0], ff.SpatialTensor), batch["views"][1]["index"].tolist()


def test_what_is_split():
    for names, views, indices in rank_group(2).run(placements, "auto"):
        assert names == {"image", "mask"} and views and sorted(indices) == [0, 1, 2, 3]
    for names, views, _ in rank_group(2).run(placements, ["image", "small"]):
        assert names == {"image", "small"} and not views
    with pytest.raises(RankFailure, match="split names \\['picture'\\], which the batch does not have"):
        rank_group(2).run(placements, ["picture"])


def test_one_rank_gets_plain_tensors():
    batch = next(iter(loader_of()))
    assert type(batch["image"]) is torch.Tensor


def test_the_default_device_is_not_asked():
    """With a generator of the host torch draws neither an order nor a loader's seed elsewhere."""
    samples = DataLoader([torch.full((3, 4, 6), float(number)) for number in range(4)], 2, shuffle=True)
    expected = list(ff.ShardedLoader(samples, ff.init_mesh()))
    with torch.device("meta"):
        found = list(ff.ShardedLoader(samples, ff.init_mesh()))
    assert all(map(torch.equal, found, expected)) and len(found) == 2


def drawn():
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_reading_leaves_the_random_states_alone():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert len(epochs(1)) == 2
    assert drawn() == expected


def test_a_sample_depends_on_seed_and_epoch():
    def first_frame(epoch, seed=5):
        loader = loader_of(seed=seed)
        loader.set_epoch(epoch)
        return next(b["image"][b["name"].index("frame 1")] for b in loader if "frame 1" in b["name"])

    assert torch.equal(first_frame(1), first_frame(1))
    assert not torch.equal(first_frame(1), first_frame(2))
    assert not torch.equal(first_frame(1), first_frame(1, seed=6))


@pytest.mark.parametrize(("workers", "prefetch"), [(0, None), (0, 2), (2, 1)])
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_resume_in_the_middle(taken, workers, prefetch):
    expected = epochs(3)
    loader = loader_of(workers=workers, prefetch=prefetch)
    stream = (batch for _ in range(3) for batch in loader)
    for _ in range(taken):
        next(stream)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == {1: (0, 1), 2: (0, 2), 3: (1, 1)}[taken]
    resumed = loader_of(workers=2 - workers, prefetch=prefetch)
    resumed.load_state_dict(state)
    rest = [(b["name"], b["image"]) for _ in range(4) for b in resumed][: 6 - taken]
    assert [names for names, _ in rest] == [names for names, _ in expected[taken:]]
    for (_, image), (_, wanted) in zip(rest, expected[taken:], strict=True):
        assert torch.equal(image, wanted)


def taken(state, count, width):
    """The names in the next batches of a job of two ranks that goes on from `state`, and its state then."""
    loader = loader_of(width=width)
    loader.load_state_dict(state)
    stream = (batch for _ in range(count) for batch in loader)
    return [next(stream)["name"] for _ in range(count)], loader.state_dict()


def test_resume_on_other_meshes():
    expected = [names for names, _ in epochs(3)]
    state = loader_of().state_dict()
    ranks = rank_group(2).run(taken, state, 1, 1)  # two replicas
    assert [[*a, *b] for a, b in zip(ranks[0][0], ranks[1][0], strict=True)] == expected[:1]
    ranks = rank_group(2).run(taken, ranks[1][1], 2, 2)  # one replica of two ranks
    assert ranks[0][0] == ranks[1][0] == expected[1:3]
    assert taken(ranks[0][1], 2, 1)[0] == expected[3:5]


def test_prefetch_hands_out_the_same_batches():
    alone = epochs(2)
    for prefetch in (1, 3):
        found = epochs(2, prefetch=prefetch)
        assert [names for names, _ in found] == [names for names, _ in alone]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, alone, strict=True))
    with pytest.raises(RecipeError, match="prefetch must be a number of batches >= 0, got -1"):
        loader_of(prefetch=-1)


def test_a_stateful_loader_will_do():
    assert [names for names, _ in epochs(2, kind=StatefulDataLoader)] == [names for names, _ in epochs(2)]
    unshuffled = epochs(1, kind=StatefulDataLoader, shuffle=False)
    assert [names for names, _ in unshuffled] == [names for names, _ in epochs(1, shuffle=False)]
    read = StatefulDataLoader(Frames(8), 4)
    next(iter(read))
    other = StatefulDataLoader(Frames(8), 4)
    other.load_state_dict(read.state_dict())
    with pytest.raises(RecipeError, match="was given a state, which holds for one process only"):
        ff.ShardedLoader(other, ff.init_mesh())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies on a stream of its own need a GPU")
def test_batches_arrive_before_they_are_used():
    data = [{"image": torch.full((3, 2000, 2000), float(i))} for i in range(6)]
    loader = loader_of(dataset=data, batch_size=1, shuffle=False)
    for number, batch in enumerate(loader):
        torch.cuda._sleep(50_000_000)  # the copy of the next batch runs beside this
        assert batch["image"].device.type == "cuda" and bool((batch["image"] == number).all())


def test_set_epoch():
    loader = loader_of()
    next(iter(loader))
    loader.set_epoch(0)
    assert loader.state_dict()["position"] == 1, "naming the epoch it is in changes nothing"
    loader.set_epoch(4)
    assert (loader.epoch, loader.state_dict()["position"]) == (4, 0)
    assert len(list(loader)) == len(loader) == 2 and loader.epoch == 5


def left(before):
    """What is said of a second loop after `before`, with the line it is said of."""
    loader = loader_of()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        before(loader)
        for _ in range(2):
            next(iter(loader))
    return [(warning.filename, str(warning.message)) for warning in said if "was left" in str(warning.message)]


def test_a_loop_that_goes_on_where_one_was_left_says_so_once():
    """A DataLoader's would begin anew; one after a resume, or of another epoch, is meant to begin where it does."""
    message = "was left after batch 1 of 2, and the next one goes on from there"
    assert [(name, message in text) for name, text in left(lambda loader: None)] == [(__file__, True)]
    assert len(left(lambda loader: [next(iter(loader)) for _ in range(3)])) == 1

    def begins_another(loader):
        next(iter(loader))
        loader.set_epoch(3)
        assert [len(list(loader)) for _ in range(2)] == [2, 2]
        loader.load_state_dict(loader.state_dict() | {"position": 1})
        assert len(list(loader)) == 1
        loader.load_state_dict(loader.state_dict() | {"position": 1})  # its last batch, and the next epoch's first

    assert left(begins_another) == []


def test_another_order_is_refused():
    state = loader_of().state_dict()
    for change, message in (
        ({"batch_size": 2}, "batch_size 4, this one has 2"),
        ({"seed": 1}, "seed 5, this one has 1"),
        ({"shuffle": False}, "shuffle 1, this one has 0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            loader_of(**change).load_state_dict(state)
    with pytest.raises(CheckpointError, match="samples 11, this one has 12"):
        loader_of(dataset=Frames(12)).load_state_dict(state)


def settle(worker):
    get_worker_info().dataset.scale = 7.0


class Scaled(Frames):
    scale = 1.0

    def __getitem__(self, index):
        return {"image": torch.full((1, 2, 2), self.scale)}


@pytest.mark.parametrize("workers", [1])
def test_a_worker_is_told_the_users_data_set(workers):
    read = DataLoader(Scaled(4), 4, num_workers=workers, worker_init_fn=settle)
    (batch,) = ff.ShardedLoader(read, ff.init_mesh())
    assert batch["image"].unique().tolist() == [7.0]


def drawing(samples):
    return {"image": torch.stack([sample["image"] for sample in samples]), "noise": torch.rand(3)}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_collate_draws_follows_from_the_position(workers):
    whole = [batch["noise"] for batch in loader_of(collate=drawing, workers=workers)]
    loader = loader_of(collate=drawing, workers=workers)
    next(iter(loader))
    again = loader_of(collate=drawing)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(next(iter(again))["noise"], whole[1]) and not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: DataLoader(Frames(4), None), "make the DataLoader with batch_size="),
        (lambda: DataLoader(Frames(4), 2, sampler=DistributedSampler(Frames(4), 2, 0)), "leave it out .shuffle=True"),
        (
            lambda: DataLoader(Frames(4), batch_sampler=BatchSampler(DistributedSampler(Frames(4), 2, 0), 2, True)),
            "a DistributedSampler gives every rank other samples",
        ),
        (lambda: DataLoader(Frames(4), 2, sampler=iter([0, 1])), r"has no len\(\)"),
        (
            lambda: DataLoader(Frames(4), 4, sampler=[0], drop_last=True),
            "the sampler has 1 sample, fewer than one batch of 4",
        ),
        (lambda: DataLoader([], 4), "has 0 samples, fewer than one batch of 4; does its folder"),
        (
            lambda: DataLoader(Frames(3), 4, drop_last=True),
            "has 3 samples, fewer than one batch of 4; use a batch_size of at most 3",
        ),
    ],
)
def test_loaders_that_cannot_be_spread(read, message):
    with pytest.raises(RecipeError, match=message):
        ff.ShardedLoader(read(), ff.init_mesh())


def test_a_recipe_whose_data_cannot_be_shared_out():
    for data, message in (
        (lambda: DataLoader(Frames(4), 2), "a DataLoader was given where its"),
        (
            lambda: iter(Frames(4)),
            r"a dataset with __len__ and __getitem__.number., or a torch IterableDataset, is needed",
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            assemble(recipe(data=data), ff.Strategy(), ff.init_mesh())


def refused(**options):
    try:
        next(iter(loader_of(**options)))
    except FullframeError as error:
        return type(error), str(error)
    return None, ""


class Drifting(Frames):
    """Adds its rank's number."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"image": sample["image"] + torch.distributed.get_rank()}


def drifting(width):
    return refused(width=width, dataset=Drifting())


def uneven():
    return refused(batch_size=5)


def test_all_ranks_refuse_alike():
    for kind, message in rank_group(2).run(drifting, 2):
        assert kind is RecipeError and "ranks [0, 1] of one replica read different samples" in message
    assert rank_group(2).run(drifting, 1) == [(None, "")] * 2, "replicas may read what they like"
    for kind, message in rank_group(2).run(uneven):
        assert (
            kind is RecipeError and "batch_size 5 (of the whole job) is no multiple of the 2 data replicas" in message
        )


def test_a_last_incomplete_batch_is_kept_unless_it_is_to_be_dropped():
    for shuffle in (True, False):
        batches = [names for names, _ in epochs(1, drop_last=False, shuffle=shuffle)]
        assert [len(names) for names in batches] == [4, 4, 3]
        assert len({name for names in batches for name in names}) == SAMPLES
    assert [len(names) for names, _ in epochs(2, drop_last=False, dataset=Frames(3))] == [3, 3]
    loader = loader_of(drop_last=False)
    assert len(loader) == 3 and [loader.weight for _ in loader] == [1.0] * 3
    loader.load_state_dict({**loader.state_dict(), "position": 2})
    assert [len(batch["name"]) for batch in loader] == [3]


def last_batches(samples, width):
    loader = loader_of(width=width, drop_last=False, dataset=Frames(samples), shuffle=False)
    return [(batch["name"], loader.weight) for batch in loader]


def test_replicas_share_a_last_batch_that_they_can_share_evenly():
    for rank, found in enumerate(rank_group(2).run(last_batches, 6, 1)):
        mine = [[0, 1], [4]] if rank == 0 else [[2, 3], [5]]
        assert found == [([f"frame {i}" for i in batch], 1.0) for batch in mine]
    for found in rank_group(2).run(last_batches, 5, 2):
        assert [len(names) for names, _ in found] == [4, 1]


def uneven_last():
    return refused(dataset=Frames(5), drop_last=False)


def test_a_last_batch_that_replicas_cannot_share_evenly_is_refused():
    for kind, message in rank_group(2).run(uneven_last):
        assert kind is RecipeError
        assert "5 samples in batches of 4 leave a last batch of 1, which 2 replicas cannot share evenly" in message


def gradients(samples, batch_size, prefetch=0):
    """The gradient of each batch's mean loss, in a loop that multiplies by the weight; and the weights."""
    torch.manual_seed(0)
    mesh = ff.init_mesh()
    model = ff.parallelize(torch.nn.Conv2d(3, 2, 3).double(), mesh)
    loader = loader_of(
        dataset=Frames(samples), batch_size=batch_size, drop_last=False, weighted=True, prefetch=prefetch
    )
    found, weights = [], []
    for _ in range(2):
        for batch in loader:
            model.zero_grad()
            (model(batch["image"].double()).square().mean() * loader.weight).backward()
            found.append(model.module.weight.grad.clone())
            weights.append(loader.weight)
    return found, weights


@pytest.mark.parametrize(
    ("ranks", "samples", "batch_size", "last"),
    [(2, 5, 4, [2.0, 0.0]), (2, 7, 4, [4 / 3, 2 / 3]), (3, 11, 6, [1.2, 1.2, 0.6]), (3, 1, 3, [3.0, 0.0, 0.0])],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_with_its_weight_a_last_batch_has_the_gradient_of_one_process(ranks, samples, batch_size, last, prefetch):
    alone, _ = gradients(samples, batch_size)
    for rank, (found, weights) in enumerate(rank_group(ranks).run(gradients, samples, batch_size, prefetch)):
        for mine, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)
        each = len(weights) // 2
        assert weights == pytest.approx([*[1.0] * (each - 1), last[rank]] * 2)


def evaluated(width):
    mesh = ff.init_mesh(width=width)
    batches = evaluation_batches(Frames(3), mesh, 5)
    return [(batch["name"], full(batch["image"]), counts) for batch, counts in batches]


def test_evaluation_reads_every_sample_once():
    alone = evaluated(1)
    assert [(names, counts) for names, _, counts in alone] == [([f"frame {i}"], True) for i in range(3)]
    first, second = rank_group(2).run(evaluated, 1)
    assert [(names, counts) for names, _, counts in first] == [(["frame 0"], True), (["frame 2"], True)]
    assert [(names, counts) for names, _, counts in second] == [(["frame 1"], True), (["frame 2"], False)]
    for found in rank_group(2).run(evaluated, 2):
        for (_, image, counts), (_, expected, _) in zip(found, alone, strict=True):
            assert torch.equal(image, expected) and counts


def orders(case):
    """On two replicas; whoever comes to a pass as the second finds that the other reads in another order."""
    mesh = ff.init_mesh()
    rank = dist.get_rank()
    samples = 8 - 2 * (rank * (case == "length"))
    options = {"batch_size": 2 + 2 * (rank * (case == "batch")), "shuffle": True}
    loader = ff.ShardedLoader(DataLoader(list(range(samples)), **options), mesh, seed=rank * (case == "seed"))
    if case == "epoch" and rank:
        loader.set_epoch(1)
    try:
        for _ in range(2):
            for number, _ in enumerate(loader):
                if number == 1 and rank and case == "break":
                    break
    except RecipeError as error:
        return str(error)
    return ""


def test_replicas_that_read_in_different_orders_are_refused():
    for case, said in {
        "length": "6 samples in an order shuffled by seed 0, 2 a batch, from batch 0 of epoch 0 on",
        "batch": "8 samples in an order shuffled by seed 0, 4 a batch, from batch 0 of epoch 0 on",
        "seed": "8 samples in an order shuffled by seed 1, 2 a batch, from batch 0 of epoch 0 on",
        "epoch": "from batch 0 of epoch 1 on",
        "break": "from batch 2 of epoch 0 on",
    }.items():
        messages = rank_group(2).run(orders, case)
        assert sorted(map(bool, messages)) == [False, True], (case, messages)
        assert said in "".join(messages) and "read twice or never" in "".join(messages)
    assert rank_group(2).run(orders, "") == ["", ""]
