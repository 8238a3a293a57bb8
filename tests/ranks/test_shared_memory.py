"""Messages through shared memory: in any order of reading, abandoned, too large, and from a rank that died."""

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fullframe.errors import DivergenceError, RankError
from fullframe.geometry.extents import Extents
from fullframe.ranks import exchange
from fullframe.ranks import shared_memory as mailbox
from fullframe.ranks.channel import announce, channel_of
from fullframe.ranks.collectives import all_gather_no_grad, all_sum_no_grad
from fullframe.ranks.exchange import InFlight, Message, fetch
from fullframe.ranks.mesh import init_mesh, spatial_of
from fullframe.ranks.shared_memory import SLOT_BYTES, SLOTS
from fullframe.ranks.tags import HEAD_BYTES, padded
from tests.rank_group import RankGroup, _forget_meshes, rank_group

HEAD = padded("a message", HEAD_BYTES)


def boxes_and_other():
    boxes = channel_of(dist.group.WORLD).boxes
    assert boxes is not None, "gloo ranks of one machine with /dev/shm have mailboxes"
    return boxes, 1 - dist.get_rank()


def read_backwards():
    boxes, other = boxes_and_other()
    for number in range(SLOTS):
        boxes.send(other, HEAD, torch.arange(6.0).view(2, 3).t() + 10 * dist.get_rank() + number)  # not contiguous
    places = [boxes.expect(other) for _ in range(SLOTS)]
    found = {}
    for number in reversed(range(SLOTS)):
        found[number] = torch.empty(3, 2)
        boxes.receive(places[number], HEAD, found[number])
    expected = torch.arange(6.0).view(2, 3).t() + 10 * other
    return all(torch.equal(found[number], expected + number) for number in range(SLOTS))


def test_messages_are_read_in_any_order():
    assert all(rank_group(2).run(read_backwards))


class Counting(TorchDispatchMode):
    """As a selective checkpoint, which finds a result again by how many calls of its op came before."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def calls_of_torch():
    boxes, other = boxes_and_other()
    value, counts = torch.rand(3, 7, 13), []
    for _ in range(2 * SLOTS):
        with Counting() as counting:
            boxes.send(other, HEAD, value)
            boxes.receive(boxes.expect(other), HEAD, value.clone())
        counts.append(counting.count)
    return counts


def test_a_slot_that_is_used_the_first_time_takes_no_further_calls():
    for counts in rank_group(2).run(calls_of_torch):
        assert counts == counts[:1] * 2 * SLOTS


def in_rank_order(turns):
    boxes, _ = boxes_and_other()
    ranks, me = (0, 1), dist.get_rank()
    kept = []
    for turn in range(turns):
        value = torch.arange(6.0).view(2, 3).t() + 10 * me + turn
        made = boxes.together(ranks, HEAD, value, lambda values: torch.stack(values) * 2)
        kept.append(torch.equal(made, 2 * torch.stack([value + 10 * (rank - me) for rank in ranks])))
    return all(kept) and len(kept) == turns


def test_values_of_all_ranks_together():
    assert all(rank_group(2).run(in_rank_order, 3 * SLOTS))


def many(count):
    """The sender runs ahead until all slots are full, and waits there."""
    boxes, other = boxes_and_other()
    if dist.get_rank() == 0:
        for number in range(count):
            boxes.send(other, HEAD, torch.tensor([number], dtype=torch.int16))
        return True
    time.sleep(0.05)
    target, found = torch.zeros(1, dtype=torch.int16), []
    for _ in range(count):
        boxes.receive(boxes.expect(other), HEAD, target)
        found.append(target.item())
    return found == list(range(count))


def test_a_sender_waits_for_a_free_slot():
    assert all(rank_group(2).run(many, 5 * SLOTS + 1))


def abandoned():
    """A flight that is never waited for: the messages after it are the right ones."""
    axis = spatial_of(init_mesh(width=2)).axis("width")
    peer, found = 1 - axis.coordinate, []
    for number in range(3 * SLOTS):
        flight = InFlight(axis, [Message(peer, torch.full((2,), 1.0 * number))], [Message(peer, torch.empty(2))])
        if number % 3:
            found.append((number, flight.wait()[0].tolist()))
        del flight
    return all(values == [number, number] for number, values in found)


def test_abandoned_messages_do_not_stand_in_for_later_ones():
    assert all(rank_group(2).run(abandoned))


def large_and_small():
    """A row that does not fit a slot goes by gloo, beside small ones that do."""
    axis = spatial_of(init_mesh(width=2)).axis("width")
    right = True
    for columns in (3, SLOT_BYTES // 8, SLOT_BYTES // 8 + 1, 5):
        whole = torch.arange(4.0 * columns, dtype=torch.float64).view(4, columns)
        extents = Extents((0, 2, 4))
        mine = whole[2 * axis.coordinate : 2 * axis.coordinate + 2].contiguous()
        right &= torch.equal(fetch(mine, 0, extents, (range(4), range(1, 4)), axis), whole[(0, 1)[axis.coordinate] :])
    return right


def test_what_does_not_fit_goes_by_gloo():
    assert all(rank_group(2).run(large_and_small))


def same_by_either(seed):
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    group = dist.group.WORLD
    right = True
    for dtype in (torch.float32, torch.float64, torch.int32, torch.bfloat16):
        value = (torch.randn(5, 3, generator=generator) * 9).to(dtype)
        by_box = all_gather_no_grad(value, group), all_sum_no_grad(value, group)
        exchange.fits = lambda tensor: False
        try:
            by_gloo = all_gather_no_grad(value, group), all_sum_no_grad(value, group)
        finally:
            exchange.fits = mailbox.fits
        right &= torch.equal(by_box[0], by_gloo[0]) and by_box[1].dtype == dtype
        torch.testing.assert_close(by_box[1], by_gloo[1])
    return right


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_are_those_of_gloo(ranks, seed):
    assert all(rank_group(ranks).run(same_by_either, seed))


def wait_for_the_dead():
    boxes, other = boxes_and_other()
    if dist.get_rank() == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        time.sleep(1000)
    try:
        boxes.receive(boxes.expect(other), HEAD, torch.empty(1))
    except dist.DistNetworkError as error:
        return str(error)


def answer_of_the_first(group):
    """What rank 0 says; rank 1 says nothing any more."""
    for pipe in group._pipes:
        pipe.send((wait_for_the_dead, ()))
    assert group._pipes[0].poll(100)
    return group._pipes[0].recv()


def test_a_rank_that_waits_for_a_dead_one_learns_it():
    group = RankGroup(2)
    try:
        failed, text = answer_of_the_first(group)
    finally:
        group.close()
    assert not failed and text.startswith("rank 1 died")
    assert "and rank 0 waits for it at: a message." in text and "take out of what one rank alone does" in text


def wait_in_vain():
    boxes, other = boxes_and_other()
    if dist.get_rank() == 1:
        return ""
    kept, boxes.patience = boxes.patience, 0.05
    place = boxes.expect(other)
    try:
        boxes.receive(place, HEAD, torch.empty(1))
    except RankError as error:
        return str(error)
    finally:
        boxes.patience = kept
        boxes.abandon(place)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_job_says():
    text, _ = rank_group(2).run(wait_in_vain)
    rank_group(2).run(_forget_meshes)
    assert text.startswith("rank 1 did not come for 0 s, and rank 0 waits for it at: a message.")


def wait_for_a_late_one():
    boxes, other = boxes_and_other()
    kept, mailbox._QUIET_SECONDS, boxes.has_warned = mailbox._QUIET_SECONDS, 0.05, False
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for value in (1.0, 2.0):
                if dist.get_rank() == 1:
                    time.sleep(0.5)
                    boxes.send(other, HEAD, torch.tensor([value]))
                else:
                    boxes.receive(boxes.expect(other), HEAD, got := torch.empty(1))
                    assert got.item() == value
        return [str(one.message) for one in said]
    finally:
        mailbox._QUIET_SECONDS, boxes.has_warned = kept, False


def test_a_rank_that_waits_for_long_says_so_once():
    (text,), none = rank_group(2).run(wait_for_a_late_one)
    assert text.startswith("rank 1 has not come for 0 s, and rank 0 waits for it at: a message, for up to ")
    assert "It may be busy." in text and "take out of what one rank alone does" in text and not none


def send_to_one_that_raised():
    """It keeps running, and takes nothing."""
    boxes, other = boxes_and_other()
    if dist.get_rank() == 1:
        announce(ValueError("met here alone"))
        time.sleep(2)
        return ""
    seconds, mailbox._LEFT_SECONDS = mailbox._LEFT_SECONDS, 0.5
    try:
        with pytest.raises(DivergenceError) as raised:
            for _ in range(SLOTS + 1):
                boxes.send(other, HEAD, torch.zeros(1))
    finally:
        mailbox._LEFT_SECONDS = seconds
    return str(raised.value)


def test_a_sender_learns_of_an_error_of_the_one_it_waits_for():
    group = rank_group(2)
    found, _ = group.run(send_to_one_that_raised, timeout_seconds=20)
    group.run(_forget_meshes)
    assert "rank 1 raised ValueError: met here alone" in found and "rank 0 did not, and is at: a message" in found


def patience():
    return boxes_and_other()[0].patience


def test_the_patience_is_that_of_the_process_group():
    assert len(set(rank_group(2).run(patience))) == 1


def test_nothing_is_left_in_shared_memory():
    before = set(Path("/dev/shm").glob("fullframe-*"))
    rank_group(2).run(read_backwards)
    new, until = set(Path("/dev/shm").glob("fullframe-*")) - before, time.monotonic() + 60
    while any(path.exists() for path in new):  # those of others, on a machine that is shared, go soon
        assert time.monotonic() < until
        time.sleep(0.1)
