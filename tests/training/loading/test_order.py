"""A sampler of the user's own decides which samples a batch of the job has; the replicas share it out."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import fullframe as ff
from fullframe.errors import CheckpointError, RecipeError
from fullframe.training.loading.order import Order, Share
from tests.rank_group import RankFailure, rank_group

SAMPLES = 11
WEIGHTS = [1.0, 5.0] * 5 + [0.0]


class Numbers(Dataset):
    """(number, one that is drawn for it)."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return torch.tensor(number), torch.rand(())


class Backwards(SequentialSampler):
    def __iter__(self):
        return iter(range(len(self.data_source))[::-1])


class Told(Sampler):
    """Begins at the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(torch.arange(self.epoch, self.epoch + 8) % SAMPLES)


class Grouped(Sampler):
    """Batches of an even number or an odd one, in an order that Python's own generator and one that it holds draw."""

    def __init__(self):
        self._generator = np.random.default_rng()

    def __len__(self):
        return 4

    def __iter__(self):
        batches = [[0, 2], [4, 6, 8, 10], [1, 3], [5, 7]]
        random.shuffle(batches)
        batch = []  # one list for all
        for each in batches:
            batch[:] = self._generator.permutation(each)
            yield batch


def weighted():
    return WeightedRandomSampler(WEIGHTS, 10, generator=torch.Generator())


SAMPLERS = {
    "weights": lambda: {"batch_size": 4, "sampler": weighted()},
    "with replacement": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(SAMPLES), replacement=True),
        "drop_last": True,
    },
    "a few": lambda: {"batch_size": 2, "sampler": RandomSampler(range(SAMPLES), num_samples=6)},
    "a subset": lambda: {"batch_size": 2, "sampler": SubsetRandomSampler([3, 5, 7, 9], torch.Generator())},
    "the first": lambda: {"batch_size": 2, "sampler": SequentialSampler(range(6))},
    "backwards": lambda: {"batch_size": 4, "sampler": Backwards(range(SAMPLES)), "drop_last": True},
    "a list": lambda: {"batch_size": 2, "sampler": [4, 4, 4, 1]},
    "told": lambda: {"batch_size": 4, "sampler": Told()},
    "batches": lambda: {"batch_sampler": Grouped()},
    "batches of weights": lambda: {"batch_sampler": BatchSampler(weighted(), 2, False)},
    "stateful": lambda: {"batch_size": 2, "sampler": weighted(), "kind": StatefulDataLoader},
}


def loader_of(name, seed=5, weights=False, width=1):
    options = SAMPLERS[name]()
    kind = options.pop("kind", DataLoader)
    return ff.ShardedLoader(kind(Numbers(), **options), ff.init_mesh(width=width), seed=seed, weighted=weights)


def epochs(name, count=2, width=1, resumed=0):
    """The batches, as lists of (number, drawn); with `resumed` from a state after so many batches."""
    torch.seed(), random.seed(), np.random.seed()  # the process's states are others on each rank
    loader, found = loader_of(name, width=width), []
    if resumed:
        batches = iter(loader)
        found += [next(batches) for _ in range(resumed)]
        state, loader = loader.state_dict(), loader_of(name, width=width)
        loader.load_state_dict(state)
    while loader.epoch < count:
        found += loader
    return [list(zip(numbers.tolist(), drawn.tolist(), strict=True)) for numbers, drawn in found]


@pytest.mark.parametrize("name", SAMPLERS)
def test_replicas_share_what_one_process_reads(name):
    """Which is what the sampler gives, other in each epoch where it draws, and with other draws where it repeats."""
    alone = epochs(name)
    split, shared = rank_group(2).run(epochs, name, 2, 2), rank_group(2).run(epochs, name)
    assert split == [alone, alone]
    assert [first + second for first, second in zip(*shared, strict=True)] == alone
    assert all(len(first) == len(second) for first, second in zip(*shared, strict=True))
    assert epochs(name, resumed=1) == alone
    half = len(alone) // 2
    first, second = ([sample for batch in batches for sample in batch] for batches in (alone[:half], alone[half:]))
    assert len(set(first + second)) == len(first + second), "no sample has the draws of another"
    if name not in ("the first", "backwards", "a list"):
        assert [number for number, _ in first] != [number for number, _ in second]
    assert len(loader_of(name)) == half


def test_the_sampler_decides():
    numbers = {name: [[number for number, _ in batch] for batch in epochs(name, 1)] for name in SAMPLERS}
    assert numbers["backwards"] == [[10, 9, 8, 7], [6, 5, 4, 3]]
    assert numbers["a list"] == [[4, 4], [4, 1]] and numbers["the first"] == [[0, 1], [2, 3], [4, 5]]
    assert sorted(map(sorted, numbers["batches"])) == [[0, 2], [1, 3], [4, 6, 8, 10], [5, 7]]
    assert sorted(numbers["a subset"][0] + numbers["a subset"][1]) == [3, 5, 7, 9]
    drawn = Counter(number for batch in epochs("weights", 100) for number, _ in batch)
    assert 10 not in drawn and 4 < sum(drawn[n] for n in (1, 3, 5, 7, 9)) / sum(drawn[n] for n in (0, 2, 4, 6, 8)) < 6


class Counting(Sampler):
    """Turns further each time that it is asked."""

    def __init__(self):
        self.times = 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.times += 1
        return iter([(number + self.times) % 4 for number in range(4)])


class Longer(Counting):
    def __iter__(self):
        while True:
            yield 0


class Shorter(Counting):
    def __iter__(self):
        return iter(range(3))


class Fewer(Told):
    """Of as many samples as the data set in epoch 0, of fewer than a batch in the next; from no source."""

    data_source = None

    def __len__(self):
        return 1 if self.epoch else SAMPLES

    def __iter__(self):
        return iter(range(len(self)))


def test_an_epoch_without_a_batch_is_refused():
    """A loop that asks for epoch after epoch would not end."""
    loader = ff.ShardedLoader(DataLoader(Numbers(), 4, sampler=Fewer(), drop_last=True), ff.init_mesh())
    assert len(list(loader)) == 2
    with pytest.raises(RecipeError, match="Fewer gives 1 sample for epoch 1, not one batch"):
        next(iter(loader))


class Endless(Sampler):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sampler": BatchSampler(range(3), 4, drop_last=True)}, "gives 0 samples for epoch 0, not one batch"),
        ({"batch_sampler": BatchSampler(Endless(), 4, False)}, r"Endless' has no len\(\).*BatchSampler"),
        ({"sampler": Counting()}, "Counting gives another order when it is asked for epoch 0 again.*set_epoch"),
        ({"sampler": Longer()}, "Longer says that an epoch has 4 .*and gives more"),
        ({"sampler": Shorter()}, "Shorter says that an epoch has 4 .*and gives only 3"),
        ({"sampler": [(0, 320), (1, 320)]}, "gives a tuple where numbers of samples are wanted"),
        ({"sampler": [0, 1.5]}, "gives 1.5 where numbers of samples are wanted"),
        ({"batch_sampler": [0, 1]}, "gives 0 where lists of numbers of samples are wanted"),
        ({"batch_sampler": [[0, 1], []]}, "gives a batch without samples"),
    ],
)
def test_what_no_run_could_go_on_with_is_refused(options, message):
    read = DataLoader(Numbers(), **({"batch_size": 2} if "sampler" in options else {}), **options)
    with pytest.raises(RecipeError, match=message):
        Order(read, 0, Share(0, 1, False)).begin()


def uneven(sizes, weights):
    batches = [list(range(size)) for size in sizes]
    loader = ff.ShardedLoader(DataLoader(Numbers(), batch_sampler=batches), ff.init_mesh(), weighted=weights)
    return [(numbers.tolist(), loader.weight) for numbers, _ in loader]


def test_batches_that_replicas_cannot_share_evenly_have_weights():
    with pytest.raises(RankFailure, match="epoch 0 has a batch of 3, which 2 replicas cannot share evenly"):
        rank_group(2).run(uneven, (2, 3, 1), False)
    first, second = rank_group(2).run(uneven, (2, 3, 1), True)
    assert first == [([0], 1.0), ([0, 1], 4 / 3), ([0], 2.0)]
    assert second == [([1], 1.0), ([2], 2 / 3), ([0], 0.0)]


class ByRank(Counting):
    def __iter__(self):
        return iter([dist.get_rank(), 0, 1, 2])


def by_rank(width):
    read = DataLoader(Numbers(), 2, sampler=ByRank())
    return list(ff.ShardedLoader(read, ff.init_mesh(width=width)))


# By width one rank alone raises, and the group waits its 15 seconds for the other.
@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.further)])
def test_a_sampler_that_gives_each_rank_its_own_is_refused(width):
    with pytest.raises(RankFailure, match=r"reads 4 samples as a ByRank gives them.*read twice or never"):
        rank_group(2).run(by_rank, width)


def test_a_run_goes_on_in_the_order_that_it_began():
    loader = loader_of("weights")
    next(iter(loader))
    state = loader.state_dict()
    again = loader_of("weights")
    again.load_state_dict(state)
    WEIGHTS[0] = 100.0
    try:
        other = loader_of("weights")
        other.load_state_dict(state)
        with pytest.raises(CheckpointError, match="in the middle of epoch 0, whose samples the sampler now gives in"):
            next(iter(other))
        unread = loader_of("weights")
        unread.load_state_dict(state)
        assert unread.state_dict() == state, "the order that was begun"
        other.load_state_dict(state)
        other.set_epoch(1)
        next(iter(other))
        loader.set_epoch(1)
        before = loader_of("weights")
        before.load_state_dict(loader.state_dict())
        next(iter(before))
    finally:
        WEIGHTS[0] = 1.0
    unread = ff.ShardedLoader(DataLoader(Numbers(), 2, sampler=(weighed := Weighed())), ff.init_mesh())
    next(iter(unread))
    state, weights = unread.state_dict(), weighed.weights
    unread.load_state_dict(state)
    weighed.weights = torch.arange(float(SAMPLES))
    assert unread.weight == 1.0  # asks for the order before the weights are there
    weighed.weights = weights
    next(iter(unread))
    plain = ff.ShardedLoader(DataLoader(Numbers(), 4), ff.init_mesh(), seed=5)
    for mine, others in ((loader, plain), (plain, loader)):
        with pytest.raises(CheckpointError, match=r"had sampler [01], this one has [01]: the order"):
            mine.load_state_dict(others.state_dict())
    older = {name: value for name, value in plain.state_dict().items() if name != "sampler"}
    plain.load_state_dict(older)


class Weighed(Sampler):
    """Whose weights the loop changes from epoch to epoch."""

    def __init__(self):
        self.weights = torch.ones(SAMPLES)

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(torch.multinomial(self.weights, 4, replacement=True).tolist())


def test_what_the_loop_tells_the_sampler_holds_from_the_next_epoch_on():
    sampler = Weighed()
    loader = ff.ShardedLoader(DataLoader(Numbers(), 2, sampler=sampler), ff.init_mesh())
    for hard in (3, 8):
        sampler.weights = torch.nn.functional.one_hot(torch.tensor(hard), SAMPLES).float()
        loader.set_epoch(0)
        assert {int(number) for numbers, _ in loader for number in numbers} == {hard}
