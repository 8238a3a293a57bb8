"""Ranks that no longer run one program: both sides say so at once, and name both lines."""

import random
import time

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fullframe as ff
from fullframe.errors import DivergenceError, ShapeError
from fullframe.ranks import channel, same_meshes
from fullframe.ranks import mesh as meshes
from fullframe.ranks.channel import Channel, HeadsByGloo, Record, difference
from fullframe.ranks.mesh import forget_meshes
from fullframe.ranks.shared_memory import SLOT_BYTES
from fullframe.ranks.tags import HEAD_BYTES, padded
from tests.rank_group import rank_group

AT_ONCE = 100.0  # seconds, on a busy machine; who waits for an answer that never comes waits for 200


def image(*shape):
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape) % 7


def mapped(*shape):
    return ff.shard(image(*(shape or (2, 3, 6, 8))), ff.init_mesh(width=dist.get_world_size()))


def outcome(program, transport, *args):
    """What became of `program` on this rank: its result, or the error's type, its text and after how many seconds."""
    forget_meshes()
    changed = {"mailbox": None, "gloo": no_mailboxes, "record": only_record}[transport]
    original = channel._channel
    if changed is not None:
        channel._channel = changed
    start = time.monotonic()
    try:
        return program(*args)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        dist.barrier()
        channel._channel = original
        forget_meshes()


def no_mailboxes(group):
    return Channel(tuple(dist.get_process_group_ranks(group)), heads=HeadsByGloo(group))


def only_record(group):
    return Channel(tuple(dist.get_process_group_ranks(group)), record=Record())


def both_raise(program, *args, ranks=2, transport="mailbox"):
    """The texts, once every rank has raised DivergenceError."""
    found = rank_group(ranks).run(outcome, program, transport, *args, timeout_seconds=200)
    assert all(isinstance(one, tuple) and one[0] == "DivergenceError" for one in found), found
    assert all(seconds < AT_ONCE for _, _, seconds in found)
    return [text for _, text, _ in found]


def logs_a_mean():
    x = mapped()
    if dist.get_rank() == 0:
        x.mean()
    return F.conv2d(x, torch.ones(3, 3, 3, 3, dtype=x.dtype), padding=1).sum()


@pytest.mark.parametrize("transport", ["mailbox", "gloo"])
def test_an_op_on_one_rank_alone_names_both_lines(transport):
    line = logs_a_mean.__code__.co_firstlineno
    for text in both_raise(logs_a_mean, transport=transport):
        assert f"rank 0 is at: sum, float64 (), at ranks/test_channel.py:{line + 3}, mean of (2, 3, 6, 8)" in text
        assert f"ranks/test_channel.py:{line + 4}" in text and "rank 1 is at: " in text
        assert "if rank == 0" in text


def the_same_op_once_more():
    x = mapped()
    if dist.get_rank() == 1:
        x.mean()
    return [float(x.mean()) for _ in range(3)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_op_at_another_line_is_another_one(ranks):
    both_raise(the_same_op_once_more, ranks=ranks)


def what_a_third_rank_hears():
    """Ranks 0 and 1 meet each other at other lines; rank 2 waits for one of them."""
    rank = dist.get_rank()
    heads, mine = HeadsByGloo(dist.group.WORLD), padded(f"line {rank}", HEAD_BYTES)
    if rank < 2:
        heads.send(1 - rank, mine)
    with pytest.raises(DivergenceError) as said:
        heads.receive(heads.expect(1 - rank if rank < 2 else 0), mine)
    for other in (1 - rank, 2) if rank < 2 else (1,):  # what else was told
        heads.expect(other)[1].wait()
    return str(said.value)


def test_a_rank_that_waits_for_one_that_met_another_is_told():
    *_, third = rank_group(3).run(what_a_third_rank_hears, timeout_seconds=100)
    assert "rank 0 is at: the end, as it met rank 1 elsewhere; before: line 0; rank 2 is at: line 2" in third


def another_size(reduces):
    size = (12, 9)[dist.get_rank()]
    x = ff.shard(image(2, 3, 6, size), ff.init_mesh(width=2), check=False)
    if not reduces:
        x = x[..., 1:] + x[..., :-1]  # one sends, one receives
    return float(x.mean())


@pytest.mark.parametrize("reduces", [False, True])
def test_a_size_drawn_differently_names_both_shapes(reduces):
    """Though what is sent has one shape."""
    for text in both_raise(another_size, reduces):
        assert ("(2, 3, 6, 12)" in text and "(2, 3, 6, 9)" in text) == reduces
        assert ("rows 5:6 of 11" in text and "rows 4:5 of 8" in text) != reduces


def test_heads_that_were_noted_differ_from_the_first_other_one_on():
    here, there = [b"rows", b"sum"], [b"rows", b"mean"]
    assert difference({rank: ((0, 1), 2, here) for rank in range(2)}) == ""
    alone = {2: ((2,), 2, there)}  # of another channel
    assert difference({rank: ((0, 1), 2, here) for rank in range(2)} | alone) == ""
    said = difference({0: ((0, 1), 2, here), 1: ((0, 1), 2, there)})
    assert said == "the ranks do not run the same program: rank 0 is at: sum; rank 1 is at: mean"


def large_ones():
    """More than a slot holds goes by gloo, which would end the process where sizes differ."""
    x = mapped(1, 1, 2, SLOT_BYTES)
    if dist.get_rank() == 0:
        x.roll(3, 2)
        return x.full()
    return x.flip(-1)


@pytest.mark.parametrize("transport", ["mailbox", "gloo"])
def test_large_messages_are_compared_before_they_come(transport):
    both_raise(large_ones, transport=transport)


def large_sums():
    x = mapped(1, SLOT_BYTES // 8 + 8, 2, 4)
    x.sum((2, 3)) if dist.get_rank() else x.sum((0, 2, 3))
    return x.sum()


def test_sums_that_go_by_gloo_are_compared_too():
    both_raise(large_sums)


class Pointwise(nn.Module):
    """Sends nothing, forward or backward, so that one rank waits in DDP where the other waits for it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return (x * self.weight).relu()


def logs_before_backward():
    mesh = ff.init_mesh(width=2)
    model = ff.parallelize(Pointwise(), mesh)
    out = model(ff.shard(image(2, 3, 6, 8), mesh))
    loss = out.local.sum()
    if dist.get_rank() == 0:
        out.mean()
    loss.backward()
    return model.module.weight.grad


@pytest.mark.parametrize("transport", ["mailbox", "gloo"])
def test_ranks_meet_before_gradients_are_averaged(transport):
    for text in both_raise(logs_before_backward, transport=transport):
        assert "backward, " in text


def waits_in_a_circle():
    """Each rank waits for rows of the next, and has sent none: no message is wrong, none ever comes."""
    x = mapped()
    parts = dist.get_world_size()
    from fullframe.geometry.extents import Extents
    from fullframe.ranks.exchange import fetch
    from fullframe.ranks.mesh import spatial_of

    extents = Extents.even(8, parts)
    wanted = list(extents.ranges)
    mine, whose = dist.get_rank(), (dist.get_rank() + 1) % parts
    wanted[mine] = extents.ranges[whose]
    return fetch(x.local, 3, extents, tuple(wanted), spatial_of(x.device_mesh).axis("width"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_wait_in_a_circle_notice(ranks):
    texts = both_raise(waits_in_a_circle, ranks=ranks)  # each names two of the ranks, and what these wait for
    assert all(text.count(" of 8, float64") == 2 for text in texts), texts


def caught_on_one_rank():
    x, done = mapped(), []
    for number in range(4):
        try:
            y = x.roll(1, -1)
            if dist.get_rank() == 1 and number == 1:
                raise KeyError("of this rank's own")
            done.append(float(y.std()))
        except KeyError:
            continue
    return done


def test_what_one_rank_catches_and_skips_is_noticed():
    both_raise(caught_on_one_rank)


def recorded(one_more):
    """As on NCCL: what a rank alone does is sent nowhere, so nothing hangs before backward has ended."""
    mesh = ff.init_mesh(width=2)
    model = ff.parallelize(nn.Conv2d(3, 2, 3, padding=1).double(), mesh)
    x = ff.shard(image(2, 3, 6, 8), mesh)
    for step in range(3):
        loss = model(x).mean()
        if one_more and dist.get_rank() == 1 and step == 2:
            meshes.spatial_of(mesh).channel.agree("sum", loss)
        loss.backward()
    return model.module.bias.grad.tolist()


def test_what_was_written_down_is_compared_after_backward():
    assert rank_group(2).run(outcome, recorded, "record", False)[0][0] > 0
    line = recorded.__code__.co_firstlineno + 8
    for text in both_raise(recorded, True, transport="record"):
        assert f"rank 1 is at: sum, float64 (), at ranks/test_channel.py:{line}" in text


def recorded_by_parts():
    """Along one of two axes, where parts have sizes of their own, one has picked nothing, and one has equal values."""
    mesh = ff.init_mesh(height=2, width=2)
    torch.manual_seed(0)
    model = ff.parallelize(nn.Conv2d(3, 2, 3, padding=1).double(), mesh)
    x = ff.shard(image(2, 3, 6, 9), mesh)
    columns = torch.arange(9.0).expand(2, 2, 6, 9)
    seen = ff.shard(columns < 4, mesh)
    best = ff.shard(torch.where(columns < 5, 0, image(2, 2, 6, 9).cumsum(2)), mesh).topk(2, 2)
    y = model(x) + best.values.sum()
    (y.sum(2).square().sum() + y.softmax(3).sum(2).amax() + y[seen].sum() + x.full().sum()).backward()
    return model.module.bias.grad.tolist()


def test_what_is_written_down_is_alike_where_parts_have_other_sizes():
    by_box = rank_group(4).run(outcome, recorded_by_parts, "mailbox")
    assert len(by_box[0]) == 2 and by_box[1:] == by_box[:-1]
    assert rank_group(4).run(outcome, recorded_by_parts, "record") == by_box


def same_numbers():
    """Every kind of exchange on one transport."""
    mesh = ff.init_mesh(width=2)
    x = ff.shard(image(2, 3, 6, 9), mesh)
    wide = ff.shard(image(1, 1, 2, 2 * SLOT_BYTES // 8 + 5), mesh)
    far = wide.roll(SLOT_BYTES // 8 + 1, -1).full()
    y = F.batch_norm(F.conv2d(x, torch.ones(3, 3, 3, 3).double(), padding=1), None, None, training=True)
    return [float(far[0, 0, 0, 1]), float(y.square().mean()), float(x.amax()), x.full().sum().item()]


def test_every_transport_gives_the_same_numbers():
    by_box = rank_group(2).run(outcome, same_numbers, "mailbox")
    assert by_box[0] == by_box[1] and len(by_box[0]) == 4
    assert rank_group(2).run(outcome, same_numbers, "gloo") == by_box
    assert rank_group(2).run(outcome, same_numbers, "record") == by_box


# One rank's own errors.


def bad_label(catch):
    mesh = ff.init_mesh(width=2)
    logits = ff.shard(image(2, 3, 4, 8), mesh)
    losses = []
    for step in range(3):
        labels = torch.zeros(2, 4, 8, dtype=torch.int64)
        if step == 1:
            labels[0, 0, 7] = 9  # on rank 1's part
        try:
            losses.append(float(F.cross_entropy(logits, ff.shard(labels, mesh))))
        except IndexError:
            if not catch:
                raise
    return losses


def test_an_error_of_one_rank_is_named_by_the_others():
    (kind, text, seconds), (other, own, _) = rank_group(2).run(outcome, bad_label, "mailbox", False)
    assert kind == "DivergenceError" and seconds < AT_ONCE
    line = bad_label.__code__.co_firstlineno + 9
    assert f"rank 1 raised IndexError: {own} (at ranks/test_channel.py:{line}, cross_entropy of" in text
    assert other == "IndexError" and "out of bounds" in own


@pytest.mark.parametrize("transport", ["mailbox", "gloo"])
def test_an_error_that_one_rank_catches_does_not_mix_up_batches(transport):
    both_raise(bad_label, True, transport=transport)


def all_err_alike():
    mesh = ff.init_mesh(width=2)
    logits = ff.shard(image(2, 3, 4, 8), mesh)
    found = []
    for step in range(6):
        labels = torch.zeros(2, 4, 8, dtype=torch.int64)
        if step % 2:
            labels[:, 0, ::7] = 9  # on both parts
        try:
            found.append(float(F.cross_entropy(logits, ff.shard(labels, mesh))))
        except IndexError:
            found.append(None)
    return found


def test_errors_that_all_ranks_meet_do_no_harm():
    expected = float(F.cross_entropy(image(2, 3, 4, 8), torch.zeros(2, 4, 8, dtype=torch.int64)))
    for found in rank_group(2).run(outcome, all_err_alike, "mailbox"):
        assert found[1::2] == [None] * 3 and found[::2] == pytest.approx([expected] * 3)


# Random states.


class Dropping(nn.Module):
    def __init__(self, drops):
        super().__init__()
        self.scale, self.drops = nn.Parameter(torch.ones(())), drops

    def forward(self, x):
        return F.dropout2d(x * self.scale, 0.5) if self.drops else x * self.scale


def seeded_by_rank(drops):
    mesh = ff.init_mesh(width=2)
    model = ff.parallelize(Dropping(drops), mesh)
    torch.manual_seed(7 + dist.get_rank())
    return float(model(ff.shard(image(4, 8, 6, 8), mesh)).mean())


@pytest.mark.parametrize("transport", ["mailbox", "gloo"])
def test_a_seed_of_each_rank_is_refused_where_it_matters(transport):
    for text in both_raise(seeded_by_rank, True, transport=transport):
        assert "random numbers from torch, whose state differs" in text and "torch.manual_seed" in text
    first, second = rank_group(2).run(outcome, seeded_by_rank, "mailbox", False)
    assert first == second == pytest.approx(float(image(4, 8, 6, 8).mean()))


def drawn_after():
    random.seed(dist.get_rank())
    numpy.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    ff.parallelize(Pointwise(), ff.init_mesh(width=2))
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_parallelize_shares_all_random_states():
    first, second = rank_group(2).run(outcome, drawn_after, "mailbox")
    assert first == second
    assert first[0] == random.Random(0).random()


# Values and names.


def other_samples(kind):
    whole = image(2, 3, 6, 8).to(kind)
    if dist.get_rank() == 1:
        whole = whole.flip(0)
    return ff.shard(whole, ff.init_mesh(width=2)).shape


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.uint8, torch.complex64, torch.int64])
def test_other_samples_on_each_rank_are_refused(kind):
    for name, text, _ in rank_group(2).run(outcome, other_samples, "mailbox", kind):
        assert name == "ShapeError" and "values differ on ranks [0, 1]" in text and "DistributedSampler" in text


def odd_samples():
    holes = torch.full((1, 2, 5, 7), float("nan"))
    masks = torch.zeros(3, 5, 7, dtype=torch.bool)
    mesh = ff.init_mesh(width=2)
    return [tuple(ff.shard(t, mesh).full().shape) for t in (holes, masks, torch.zeros(0, 3, 4), image(5, 6).t())]


def test_equal_samples_are_taken_whatever_they_hold():
    expected = [(1, 2, 5, 7), (3, 5, 7), (0, 3, 4), (6, 5)]
    assert rank_group(2).run(outcome, odd_samples, "mailbox") == [expected, expected]


def warned(values):
    import warnings

    same_meshes.hash = lambda text: values[dist.get_rank()]
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ff.init_mesh(width=2)
            ff.init_mesh(width=2)
    finally:
        del same_meshes.hash
    return [str(warning.message) for warning in said]


def test_ranks_that_hash_differently_are_told_once():
    first, second = rank_group(2).run(outcome, warned, "mailbox", (1, 2))
    assert len(first) == 1 and "PYTHONHASHSEED=0" in first[0] and second == []
    assert rank_group(2).run(outcome, warned, "mailbox", (1, 1)) == [[], []]


def channels_asked_for_in_turns():
    """Whether each group's channel is its own however they are asked for, and whether it is new once forgotten."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    first = [channel.channel_of(group) for group in groups]
    again = [channel.channel_of(group) for group in (*groups, groups[1], groups[0])]
    channel.forget_channels()
    later = channel.channel_of(groups[0])
    return first[0] is not first[1], [first.index(found) for found in again], later is not first[0]


def test_each_group_has_its_own_channel_until_they_are_forgotten():
    assert rank_group(2).run(channels_asked_for_in_turns) == [(True, [0, 1, 1, 0], True)] * 2


def test_the_errors_are_of_one_family():
    assert issubclass(DivergenceError, ff.FullframeError) and issubclass(ShapeError, ff.FullframeError)
