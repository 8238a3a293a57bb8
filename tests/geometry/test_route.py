"""Messages: every wanted row is sent once, by its owner, and both sides count alike."""

from hypothesis import given
from hypothesis import strategies as st

from fullframe.geometry.extents import Extents
from fullframe.geometry.route import borrows, route


@st.composite
def situations(draw: st.DrawFn) -> tuple[Extents, tuple[range, ...]]:
    inner = sorted(draw(st.lists(st.integers(0, 20), min_size=0, max_size=4)))
    extents = Extents((0, *inner, draw(st.integers(20, 24))))
    wanted = []
    for _ in range(extents.parts):
        start = draw(st.integers(0, extents.size))
        wanted.append(range(start, draw(st.integers(start, extents.size))))
    return extents, tuple(wanted)


def test_a_halo_of_one_row() -> None:
    extents = Extents((0, 4, 8))
    wanted = (range(0, 5), range(3, 8))
    assert route(extents, wanted, 0) == (((1, range(3, 4)),), ((1, range(4, 5)),))


def test_a_halo_wider_than_a_shard_reaches_the_second_neighbour() -> None:
    extents = Extents.even(6, 3)
    plan = route(extents, (range(0, 6), range(2, 4), range(4, 6)), 0)
    assert plan.receives == ((1, range(2, 4)), (2, range(4, 6)))


@given(situations())
def test_every_rank_gets_exactly_what_it_wants(situation: tuple[Extents, tuple[range, ...]]) -> None:
    extents, wanted = situation
    plans = [route(extents, wanted, rank) for rank in range(extents.parts)]
    for rank, plan in enumerate(plans):
        own = set(extents.ranges[rank]) & set(wanted[rank])
        received = [row for transfer in plan.receives for row in transfer.rows]
        assert len(received) == len(set(received))
        assert own | set(received) == set(wanted[rank])
        for transfer in plan.receives:
            assert (rank, transfer.rows) in plans[transfer.peer].sends
    assert sum(len(p.sends) for p in plans) == sum(len(p.receives) for p in plans)
    assert borrows(extents, wanted) == any(plan.receives for plan in plans)
