"""A data set without numbers through `ShardedLoader`: what one process reads, whatever the mesh, also resumed."""

import random
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import fullframe as ff
from fullframe.errors import CheckpointError, RecipeError
from fullframe.training.loading.order import Share
from fullframe.training.loading.stream_order import StreamOrder
from fullframe.training.session import assemble
from tests.rank_group import RankFailure, rank_group
from tests.training.tiny import Frames, Plain, recipe

COLUMNS = 11


class Files(IterableDataset):
    """Files in an order of each epoch's own, each worker every so manieth, drawn on by all sources of randomness."""

    def __init__(self, samples=14, first=0, step=1):
        self.numbers, self.generator, self.epoch = range(first, samples, step), np.random.default_rng(), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = self.generator.permutation(self.numbers).tolist()
        info = get_worker_info()
        for number in order[info.id :: info.num_workers] if info else order:
            image = torch.full((2, 6, COLUMNS), float(number), dtype=torch.float64, device="cpu")
            noise = [random.random(), float(np.random.rand()), float(torch.rand((), device="cpu"))]
            yield {"image": image, "number": number, "epoch": self.epoch, "noise": noise}


def loader_of(mesh=None, data=None, size=4, workers=0, drop_last=False, persistent=False, **options):
    data = Files() if data is None else data
    loader = DataLoader(data, size, num_workers=workers, drop_last=drop_last, persistent_workers=persistent)
    return ff.ShardedLoader(loader, ff.init_mesh() if mesh is None else mesh, **options)


def told(batch):
    image = batch["image"]
    whole = image.full() if isinstance(image, ff.SpatialTensor) else image
    numbers = zip(batch["number"].tolist(), torch.stack(batch["noise"]).T.tolist(), strict=True)
    return [(*each, first.mean().item()) for each, first in zip(numbers, whole, strict=True)]


def read(width, epochs, options, state=None, stop=None):
    """Each batch's samples on this replica, its weight, the columns of it here, and the loader's state at the end."""
    loader = loader_of(ff.init_mesh(width=width), **options)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for _ in range(epochs):
        for batch in loader:
            local = batch["image"].local if isinstance(batch["image"], ff.SpatialTensor) else batch["image"]
            found.append((batch["epoch"][0].item(), told(batch), loader.weight, local.shape[-1]))
            if len(found) == stop:
                return found, loader.state_dict()
    return found, loader.state_dict()


@pytest.mark.parametrize(
    ("width", "options"),
    [
        (1, {"size": 8, "drop_last": True}),
        (2, {"workers": 2, "drop_last": True, "persistent": True}),
        (2, {"weighted": True}),
        (4, {"workers": 3}),
    ],
)
def test_replicas_share_what_one_process_reads(width, options):
    whole, state = read(1, 2, options)
    ranks = rank_group(4).run(read, width, 2, options)
    replicas = 4 // width
    assert state == {
        "epoch": 2,
        "position": 0,
        "batch_size": options.get("size", 4),
        "seed": 0,
        "workers": state["workers"],
    }
    assert {epoch for epoch, *_ in whole} == {0, 1}
    for number, (epoch, samples, _, _) in enumerate(whole):
        parts = [ranks[replica * width][0][number] for replica in range(replicas)]
        for replica, (its, mine, weight, columns) in enumerate(parts):
            assert its == epoch and mine == samples[replica::replicas]
            assert weight == pytest.approx(len(mine) * replicas / len(samples))
            assert columns < COLUMNS or width == 1
    drawn = [tuple(noise) for _, samples, *_ in whole for _, noise, _ in samples]
    assert len(set(drawn)) == len(drawn)  # at each place another
    for epoch in (0, 1):
        numbers = sorted(number for its, samples, *_ in whole if its == epoch for number, *_ in samples)
        assert options.get("drop_last") or numbers == [*range(14)]
    assert [n for e, samples, *_ in whole if not e for n, *_ in samples] != [
        n for e, s, *_ in whole if e for n, *_ in s
    ]


def test_what_one_process_reads_is_what_torch_reads():
    class Plain(Files):
        def __init__(self):
            super().__init__()
            self.generator = np.random.RandomState(0)  # that a worker would have from its parent

        def __iter__(self):
            order = list(self.numbers)
            info = get_worker_info()
            yield from order[info.id :: info.num_workers] if info else order

    for workers in (0, 3):
        for drop_last in (False, True):
            plain = DataLoader(Plain(), 4, num_workers=workers, drop_last=drop_last)
            ours = loader_of(data=Plain(), workers=workers, drop_last=drop_last)
            assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in plain]


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 3}, {"workers": 2, "persistent": True}])
def test_a_run_goes_on_where_it_stood_on_another_mesh(options):
    whole, _ = read(1, 2, options)
    for stop in (1, 3, 4, 5):
        first, state = read(1, 2, options, stop=stop)
        again, _ = read(1, 3, options, state)
        assert first + again[: len(whole) - stop] == whole
    ranks = rank_group(2).run(read, 2, 2, options, state)
    for found, _ in ranks:
        assert [each[:3] for each in found[: len(whole) - stop]] == [each[:3] for each in whole[stop:]]


def test_what_changed_meanwhile_is_refused():
    _, state = read(1, 1, {}, stop=2)
    for data, message in (
        (Files(13), "2 batches of epoch 0 had been read, and the Files now gives others"),
        (Files(3), "2 batches of epoch 0 had been read"),
        (Files(0), "2 batches of epoch 0 had been read"),
    ):
        loader = loader_of(data=data)
        loader.load_state_dict(state)
        with pytest.raises(CheckpointError, match=message):
            next(iter(loader))
    for options in ({"size": 2}, {"workers": 1}, {"seed": 1}):
        with pytest.raises(CheckpointError, match="resume with the same data, batch_size, workers, seed"):
            loader_of(**options).load_state_dict(state)
    with pytest.raises(CheckpointError, match="it lacks samples, shuffle"):
        ff.ShardedLoader(DataLoader(Frames(4), 4), ff.init_mesh()).load_state_dict(state)


class Numbers(IterableDataset):
    def __init__(self, *numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(self.numbers)


def test_any_sample_that_changed_is_seen():
    first = loader_of(data=Numbers(*range(8)), size=2)
    for _, _ in zip(range(3), first, strict=False):
        pass
    again = loader_of(data=Numbers(9, *range(1, 8)), size=2)
    again.load_state_dict(first.state_dict())
    with pytest.raises(CheckpointError, match="3 batches of epoch 0 had been read, and the Numbers now gives others"):
        next(iter(again))


def test_samples_are_told_apart_whatever_they_are():
    image = np.zeros((4, 5, 3), np.uint8)
    other = image.copy()
    other[3, 4, 2] = 1
    found = []
    for value in (image, other):
        for sample in (value, torch.from_numpy(value), Image.fromarray(value), {"a": [Image.fromarray(value), "name"]}):
            order = StreamOrder(DataLoader(Numbers(sample), 1), 0, Share(0, 1, False), torch.device("cpu"))
            found += [kept.checksum for kept in order.reading]
    assert [one != two for one, two in zip(found[:4], found[4:], strict=True)] == [True] * 4


class Spent(Files):
    """Gives every sample once, not once an epoch."""

    def __init__(self):
        super().__init__()
        self.left = super().__iter__()

    def __iter__(self):
        return self.left


def test_a_stream_that_changes_as_it_is_read_is_not_taken_for_another_epoch():
    loader = loader_of(data=Spent())
    assert len(list(loader)) == 4
    with pytest.raises(RecipeError, match="the Spent gives no batch of 4 samples in epoch 1"):
        list(loader)


def test_a_loop_that_was_left_goes_on():
    whole = [told(batch) for batch in loader_of()]
    loader = loader_of()
    with pytest.warns(UserWarning, match="was left after batch 2, and the next one goes on from there"):
        left = [told(batch) for _, batch in zip(range(2), loader, strict=False)]
        assert left + [told(batch) for batch in loader] == whole and loader.epoch == 1
    counted = loader_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epochs = [[batch["epoch"][0].item() for _, batch in zip(range(4), counted, strict=False)] for _ in range(3)]
    assert epochs == [[epoch] * 4 for epoch in range(3)]


def differing(options, first, step):
    data = Files(14, first[ff.init_mesh().get_rank()], step)
    return read(options.pop("width"), 1, {"data": data, **options})


@pytest.mark.parametrize(
    ("width", "first", "step", "message"),
    [
        (1, (0, 1), 2, "ranks 0 and 1 do not read the same samples of the Files: what they read differs"),
        (2, (0, 1), 2, "what they read differs"),
        (1, (0, 12), 1, "what they read ends on one of them"),
        (1, (14, 0), 1, "what they read ends on one of them"),
    ],
)
def test_a_part_of_the_stream_is_refused(width, first, step, message):
    with pytest.raises(RankFailure, match=f"(?s){message}.* a seed .* goes through ff.ShardedStream"):
        rank_group(2).run(differing, {"width": width, "drop_last": True}, first, step)


def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(RankFailure, match=r"batch_size 3 .* use 2"):
        rank_group(2).run(read, 1, 1, {"size": 3})
    with pytest.raises(RankFailure, match="where a Files ends is not known, and 2 replicas may not be able to share"):
        rank_group(2).run(read, 1, 1, {})
    with pytest.raises(RecipeError, match="this DataLoader's data set makes them itself"):
        loader_of(size=None)
    with pytest.raises(RecipeError, match="the Files gives no batch of 4 samples in epoch 0; does its folder"):
        list(loader_of(data=Files(3), drop_last=True))
    with pytest.raises(TypeError, match="how many batches a Files gives is known once"):
        len(loader_of())
    with pytest.raises(RecipeError, match=r"recipe.sampler gives numbers of samples, and recipe.data\(\) a Files"):
        assemble(recipe(data=Files, sampler=lambda data: [0]), ff.Strategy(), ff.init_mesh())


def test_a_replica_without_a_sample_steps_with_another_that_does_not_count():
    order = StreamOrder(DataLoader(Files(5), 4), 0, Share(3, 4, True), torch.device("cpu"))
    assert [len(kept.mine) for kept in order.reading] == [1, 1]
    assert order.words == "samples as a Files gives them by seed 0, 4 a batch, with 0 workers"


class Crops(IterableDataset):
    """The tiny job's frames, drawn on as they come, in an order of each epoch's own."""

    def __iter__(self):
        info = get_worker_info()
        numbers = random.Random(self.epoch).sample(range(12), 12)
        return map(Frames().__getitem__, numbers[info.id :: info.num_workers] if info else numbers)

    def set_epoch(self, epoch):
        self.epoch = epoch


def trained(strategy, folder, workers, steps, resume=False):
    of_stream = recipe(data=Crops, workers=workers, model=Plain, optimizer=lambda each: torch.optim.SGD(each, lr=0.1))
    losses, said = [], []
    run = {"steps": steps, "resume": resume, "on_record": lambda line: losses.append(line["loss"])}
    ff.fit(of_stream, strategy, folder, on_message=said.append, **run)
    behind = "1 batch" if workers else "2 batches"  # where each worker leaves two samples out
    assert (f"reading {behind} of the stream again, to go on after them" in said) == resume
    return losses


@pytest.mark.parametrize("workers", [2, 0])
def test_training_on_a_stream_is_that_of_one_process_also_when_it_goes_on(workers, tmp_path):
    wanted = trained(ff.Strategy(), tmp_path / "plain", workers, 7)
    strategy = ff.Strategy(data=2, width=2)
    first = rank_group(4).run(trained, strategy, tmp_path / "split", workers, 5)
    rest = rank_group(4).run(trained, strategy, tmp_path / "split", workers, 7, True)
    for before, after in zip(first, rest, strict=True):
        assert before + after == pytest.approx(wanted, rel=1e-12)


def test_a_stream_is_simulated_by_its_first_sample():
    told = [ff.simulate(recipe(data=data), ff.Strategy(), "cpu").device_bytes for data in (EpochZero, Frames)]
    assert told[0] == told[1] > 0
    with pytest.raises(RecipeError, match=r"the EpochZero gives no sample; does its folder"):
        ff.simulate(recipe(data=lambda: EpochZero(0)), ff.Strategy(), "cpu")


class EpochZero(IterableDataset):
    def __init__(self, samples=12):
        self.samples = samples

    def __iter__(self):
        return map(Frames().__getitem__, range(self.samples))
