"""Which samples a DataLoader hands out."""

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset

from fullframe.doctor.probes.loading import Loading
from fullframe.doctor.probes.notes import BatchRead, Event, Loader


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(4.0).view(4, 1))


def read(loader: "DataLoader[Any]", epochs: int = 1) -> list[Event]:
    events: list[Event] = []
    with Loading(events.append).attached():
        for _ in range(epochs):
            for batch in loader:
                assert batch.shape[1] == 1
    return events


def indices(events: list[Event], epoch: int = 1) -> list[tuple[int, ...] | None]:
    return [event.indices for event in events if isinstance(event, BatchRead) and event.epoch == epoch]


def test_batches_come_with_the_numbers_of_their_samples() -> None:
    events = read(DataLoader(Numbers(), 4))
    assert indices(events) == [(0, 1, 2, 3), (4, 5)]
    assert [event.samples for event in events if isinstance(event, BatchRead)] == [4, 2]
    (loader,) = [event for event in events if isinstance(event, Loader)]
    assert (loader.samples, loader.sampler, loader.planned, loader.trains) == (
        6,
        "SequentialSampler",
        (*range(6),),
        True,
    )


def test_which_part_a_dataset_lists() -> None:
    def listing(dataset: Dataset[Any]) -> int:
        return next(event.listing for event in read(DataLoader(dataset, 2)) if isinstance(event, Loader))

    first, other, shuffled = (listing(Subset(Numbers(), part)) for part in ([0, 2, 4], [1, 3, 5], [4, 0, 2]))
    assert first == shuffled != other
    assert listing(Numbers()) == listing(Stream()) == 0


def test_with_workers_that_read_ahead_and_live_on() -> None:
    loader = DataLoader(Numbers(), 2, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    events = read(loader, epochs=2)
    assert indices(events) == indices(events, 2) == [(0, 1), (2, 3), (4, 5)]


def test_a_dataset_without_numbers_says_none_and_what_it_gave() -> None:
    events = read(DataLoader(Stream(), 2))
    (begun,) = (event for event in events if isinstance(event, Loader))
    assert (begun.samples, begun.sampler) == (None, "Stream")
    assert indices(events) == [None, None]
    assert len({event.contents for event in events if isinstance(event, BatchRead)}) == 2


def test_a_random_sampler_is_not_asked_and_the_random_state_stays() -> None:
    torch.manual_seed(3)
    plain = [batch.flatten().tolist() for batch in DataLoader(Numbers(), 2, shuffle=True)]
    torch.manual_seed(3)
    events = read(DataLoader(Numbers(), 2, shuffle=True))
    assert [list(map(float, found or ())) for found in indices(events)] == plain
    assert sorted(next(event.planned or () for event in events if isinstance(event, Loader))) == list(range(6))


def test_a_batch_sampler_of_ones_own() -> None:
    loader = DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 3, drop_last=False))
    events = read(loader)
    assert sorted(n for found in indices(events) for n in found or ()) == list(range(6))
    assert next(event.planned for event in events if isinstance(event, Loader)) is None


def test_afterwards_torch_is_as_before() -> None:
    before = DataLoader.__iter__
    read(DataLoader(Numbers(), 3))
    assert DataLoader.__iter__ is before
