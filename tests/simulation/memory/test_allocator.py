"""The model of PyTorch's caching allocator: pictures of single rules, and what must hold for any trace."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullframe.simulation.memory.allocator import CachingAllocator, replay, replay_within
from fullframe.simulation.memory.trace import Block

KIB, MIB = 2**10, 2**20
few = settings(max_examples=40)


def test_requests_are_rounded_to_512_bytes():
    allocator = CachingAllocator()
    allocator.malloc(1)
    assert allocator.allocated_bytes == 512
    allocator.malloc(513)
    assert allocator.allocated_bytes == 512 + 1024


def test_small_requests_share_segments_of_2_mib():
    #  1 MiB and less: |aaaaaaaa|bbbbbbbb| then a second segment
    allocator = CachingAllocator()
    for _ in range(2):
        allocator.malloc(MIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_requests_below_10_mib_share_segments_of_20_mib():
    allocator = CachingAllocator()
    for _ in range(2):
        allocator.malloc(9 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.allocated_bytes == 9 * MIB + 9 * MIB  # 2 MiB are left over, and were cut off
    allocator.malloc(3 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_requests_from_10_mib_on_have_segments_of_their_own_in_steps_of_2_mib():
    allocator = CachingAllocator()
    allocator.malloc(10 * MIB + 1)
    assert allocator.reserved_bytes == 12 * MIB
    assert allocator.allocated_bytes == 10 * MIB + 512  # more than 1 MiB was left, so it was cut off
    allocator.malloc(11 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (22 * MIB + 512, 24 * MIB)  # 1 MiB stays with it


def test_each_stream_has_segments_of_its_own():
    allocator = CachingAllocator()
    mine = allocator.malloc(9 * MIB)
    assert allocator.malloc(2 * MIB, "copy").pool != mine.pool
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(mine)
    allocator.malloc(9 * MIB, "copy")  # not where the other stream's was
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (11 * MIB, 40 * MIB)


def test_the_smallest_free_piece_that_is_large_enough_is_taken():
    # |- 30 -|- 14 -| both free: 12 goes into the 14
    allocator = CachingAllocator()
    large, middle = allocator.malloc(30 * MIB), allocator.malloc(14 * MIB)
    allocator.free(large)
    allocator.free(middle)
    assert allocator.malloc(12 * MIB).address == middle.address


def test_freed_neighbours_join():
    # |aaaa|bbbb|cccc|..| of one 20 MiB segment: free a, c, then b, and 18 MiB fit again
    allocator = CachingAllocator()
    pieces = [allocator.malloc(6 * MIB) for _ in range(3)]
    for number in (0, 2, 1):
        allocator.free(pieces[number])
    assert allocator.allocated_bytes == 0
    allocator.malloc(18 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_small_and_large_requests_never_share_a_segment():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(KIB)
    assert allocator.reserved_bytes == 22 * MIB


Requests = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB), st.sampled_from([512, MIB, MIB + 1, 10 * MIB])),
        st.integers(0, 20),
    ),
    max_size=40,
)


def trace_of(requests: list[tuple[int, int]]) -> list[Block]:
    """Request i is freed after `wait` further requests; its block occurs twice in the events."""
    events: list[Block] = []
    waiting: list[tuple[int, Block]] = []
    for number, (bytes, wait) in enumerate(requests):
        block = Block(bytes, (), "uint8", "", "forward", len(events))
        events.append(block)
        waiting.append((number + wait, block))
        for _, due in [(n, b) for n, b in waiting if n <= number]:
            due.died = len(events)
            events.append(due)
        waiting = [(n, b) for n, b in waiting if n > number]
    return events


@few
@given(Requests)
def test_what_is_live_fits_into_what_is_allocated_and_that_into_what_is_reserved(requests):
    allocator, live, events = CachingAllocator(), {}, trace_of(requests)
    for number, block in enumerate(events):
        if number == block.born:
            live[block] = allocator.malloc(block.bytes)
        else:
            allocator.free(live.pop(block))
        assert sum(b.bytes for b in live) <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.allocated_bytes == sum(piece.bytes for piece in live.values())
        spans = sorted((piece.address, piece.address + piece.bytes) for piece in live.values())
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


@few
@given(Requests)
def test_when_all_is_free_every_segment_is_one_piece(requests):
    allocator = CachingAllocator()
    for piece in [allocator.malloc(bytes) for bytes, _ in requests]:
        allocator.free(piece)
    assert allocator.allocated_bytes == 0
    pieces = [piece for pool in allocator._free.values() for _, _, piece in pool]
    assert all(piece.before is None and piece.after is None for piece in pieces)
    assert sum(piece.bytes for piece in pieces) == allocator.reserved_bytes


@few
@given(st.lists(st.integers(5, 30).map(lambda number: number * 2 * MIB), max_size=40))
def test_requests_with_segments_of_their_own_need_no_more_when_they_come_again(sizes):
    allocator, reserved = CachingAllocator(), []
    for _ in range(2):
        for piece in [allocator.malloc(bytes) for bytes in sizes]:
            allocator.free(piece)
        reserved.append(allocator.reserved_bytes)
    assert reserved == [sum(sizes)] * 2


def test_shared_segments_can_need_more_when_the_same_requests_come_again():
    # first |999999999|BBBBBBBBBBB| and |15..........|; then 9 takes of the 16, 15 of the 20, and 11 fits nowhere
    allocator, reserved = CachingAllocator(), []
    for _ in range(2):
        for piece in [allocator.malloc(mib * MIB) for mib in (9, 15, 11)]:
            allocator.free(piece)
        reserved.append(allocator.reserved_bytes // MIB)
    assert reserved == [36, 48]


@few
@given(Requests)
def test_replay_counts_what_the_events_say(requests):
    allocator, events = replay(trace_of(requests)).allocator, trace_of(requests)
    left = [block.bytes for block in dict.fromkeys(events) if block.died is None]
    assert sum(left) <= allocator.allocated_bytes <= allocator.most_allocated_bytes <= allocator.most_reserved_bytes
    assert allocator.most_allocated_bytes >= max((block.bytes for block in events), default=0)


def test_what_is_unused_as_a_whole_goes_back_where_the_driver_has_no_more():
    # |-- 14 --| in use, |---- 30 ----| free: 32 more fit into 46 only without the second
    allocator = CachingAllocator(limit_bytes=46 * MIB)
    allocator.malloc(14 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    assert (allocator.reserved_bytes, allocator.returns) == (44 * MIB, 0)
    allocator.malloc(32 * MIB)
    assert (allocator.reserved_bytes, allocator.returns, allocator.segments) == (46 * MIB, 1, 3)
    with pytest.raises(MemoryError):
        allocator.malloc(10 * MIB)


def test_a_segment_in_use_in_part_stays():
    allocator = CachingAllocator(limit_bytes=40 * MIB)
    allocator.malloc(5 * MIB)
    allocator.free(allocator.malloc(9 * MIB))  # 15 MiB of its 20 are free
    with pytest.raises(MemoryError):
        allocator.malloc(22 * MIB)
    assert (allocator.reserved_bytes, allocator.returns) == (20 * MIB, 1)


def blocks(*sizes_mib: int) -> list[Block]:
    """One after the other."""
    return trace_of([(mib * MIB, 0) for mib in sizes_mib])


def test_a_trace_is_replayed_within_what_may_be_used_only_where_it_would_take_more():
    step = blocks(20, 30, 40)  # 90 MiB if nothing goes back
    free = replay_within(step, 90 * MIB)
    assert (free.allocator.most_reserved_bytes, free.wanted_bytes, free.returns) == (90 * MIB, 90 * MIB, 0)
    twice = [*blocks(20, 30, 40), *shifted(blocks(20, 30, 40), 6)]
    within = replay_within(twice, 60 * MIB, before=[6])
    assert within.wanted_bytes == 90 * MIB and within.allocator.most_reserved_bytes <= 60 * MIB
    assert (within.returns, within.segments) == (0, 0)  # the segment of 40 does for all of the second step
    once = replay_within(twice, 60 * MIB)
    assert (
        (once.returns, once.segments) == (1, 3)
        and "90 MiB if it could" in once.said
        and "1 time in a step" in once.said
    )
    assert replay_within(twice, 39 * MIB, before=[6]).allocator.most_reserved_bytes == 90 * MIB  # does not fit


def shifted(events: list[Block], by: int) -> list[Block]:
    """As they are after `by` other events."""
    for block in dict.fromkeys(events):
        block.born += by
        block.died = None if block.died is None else block.died + by
    return events
