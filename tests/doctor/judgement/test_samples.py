"""Who reads what."""

from dataclasses import replace

import pytest

from fullframe.doctor.judgement.samples import judged_samples, judged_waiting, trained_on
from fullframe.doctor.probes.notes import Event, Notes
from tests.doctor.judgement.made import backward, batch, codes, job, loader, ranks, update


def reads(rank: int, planned: object = None, indices: object = (0, 1), replica: int | None = None) -> list[Event]:
    replica = rank if replica is None else replica
    return [loader(planned=planned), batch(indices=indices), backward(), job(rank, replica=replica), update()]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((0, 2, 4, 6), (1, 3, 5, 7), []),
        ((0, 2, 4, 6), (1, 3, 5, 0), []),  # a sampler's padding
        ((0, 1, 2, 3), (2, 3, 4, 5), ["FF305", "FF306"]),
        ((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7), ["FF305"]),
        ((0, 4), (1, 5), ["FF306"]),
    ],
)
def test_planned_epochs(first: object, second: object, expected: list[str]) -> None:
    assert codes(judged_samples(ranks(reads(0, first), reads(1, second)))) == expected


def test_numbers_are_of_one_listing() -> None:
    """As where each rank's data set has its own part of the files."""
    for planned in ((0, 1, 2, 3), None):
        parts = [[loader(planned=planned, listing=rank), *reads(rank, planned)[1:]] for rank in range(2)]
        assert codes(judged_samples(ranks(*parts))) == []


def test_the_ranks_of_one_replica_read_the_same_samples() -> None:
    whole = tuple(range(8))
    assert codes(judged_samples(ranks(reads(0, whole, replica=0), reads(1, whole, replica=0)))) == []
    apart = ranks(reads(0, whole, (0, 1), replica=0), reads(1, whole, (2, 3), replica=0))
    (found,) = judged_samples(apart)
    assert found.code == "FF308" and "rank 0: (0, 1); rank 1: (2, 3)" in found.message


def test_of_an_unknown_sampler_the_batches_count() -> None:
    assert codes(judged_samples(ranks(reads(0, None, (3, 1)), reads(1, None, (3, 1))))) == ["FF305"]
    assert codes(judged_samples(ranks(reads(0, None, (3, 1)), reads(1, None, (0, 2))))) == []
    by_chance = [reads(rank, None, (rank, rank + 1, 2 * rank + 3, 2 * rank + 9)) for rank in range(6)]
    assert codes(judged_samples(ranks(*by_chance))) == []  # each draws with replacement, by a seed of its own
    assert codes(judged_samples(ranks(*by_chance, reads(6, None, (9, 0, 1, 3))))) == ["FF305"]  # as rank 0


def test_without_numbers_the_contents_count_unless_all_batches_are_alike() -> None:
    def stream(contents: tuple[int, ...]) -> list[Event]:
        read = [batch(n, None, contents=c) for n, c in enumerate(contents, start=1)]
        return [loader(), *read, backward()]

    assert codes(judged_samples(ranks(stream((1, 2)), [*stream((1, 2)), job(1)]))) == ["FF305"]
    assert codes(judged_samples(ranks(stream((1, 1)), [*stream((1, 1)), job(1)]))) == []
    assert codes(judged_samples(ranks(stream((1, 2)), [*stream((3, 4)), job(1)]))) == []


def test_the_same_order_in_two_epochs() -> None:
    def epochs(second: tuple[int, ...], first: tuple[int, ...] = (2, 0, 1)) -> list[Notes]:
        return ranks([loader(planned=first), batch(), backward(), loader(epoch=2, planned=second), job()])

    assert codes(judged_samples(epochs((2, 0, 1)))) == ["FF307"]
    assert codes(judged_samples(epochs((1, 0, 2)))) == []
    assert codes(judged_samples(epochs((0, 1, 2), (0, 1, 2)))) == []  # not shuffled, as it was asked


def test_an_iteration_that_is_not_trained_on_is_no_epoch() -> None:
    order = {"planned": (2, 0, 1)}
    looked_at = [loader(**order), batch(), loader(epoch=2, **order), replace(batch(), epoch=2), backward(), job()]
    assert codes(judged_samples(ranks(looked_at))) == []
    assert codes(judged_samples(ranks([*looked_at, loader(epoch=3, **order)]))) == ["FF307"]
    measured = replace(loader(epoch=2, **order), trains=False)
    assert codes(judged_samples(ranks([loader(**order), batch(), backward(), measured, job()]))) == []


def test_replicas_with_batches_of_different_sizes() -> None:
    small = [loader(planned=(1, 3, 5, 7)), batch(indices=(1,), samples=1), backward(), job(1)]
    (found,) = judged_samples(ranks(reads(0, (0, 2, 4, 6)), small))
    assert found.code == "FF309" and "2, 1 samples" in found.message


def test_a_loader_that_no_backward_follows_is_for_evaluation() -> None:
    notes = Notes(0, [loader(), batch(), backward(), loader(1), batch(loader=1), batch(2), backward()])
    assert trained_on(notes) == {0}


@pytest.mark.parametrize(
    ("waited", "batches", "expected"), [(0.5, 1, ["FF324"]), (0.1, 1, []), (0.1, 4, ["FF324"]), (0.004, 1, [])]
)
def test_waiting(waited: float, batches: int, expected: list[str]) -> None:
    """For all batches of a step, of which the second optimizer's is a part."""
    seconds = 0.01 if waited < 0.01 else 1.0
    events: list[Event] = [loader()]
    for number in range(1, 6):
        events += [batch(batches * number + n, waited=waited) for n in range(batches)]
        events += [backward(), update(number, seconds=0.9 * seconds)]
        events += [replace(update(number, seconds=0.1 * seconds), optimizer=1)]
    assert codes(judged_waiting(ranks(events))) == expected
    slow = [batch(2, waited=0.9), backward(), update(seconds=1.0)]  # a first step's tells nothing
    assert codes(judged_waiting(ranks([loader(), *slow, *events[1:]]))) == expected
    assert codes(judged_waiting(ranks([loader(), *slow, *slow]))) == []
