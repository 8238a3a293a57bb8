"""Who hangs: whoever does not wait for the others. That all ranks end is tested in test_faults.py."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.ranks.shared_memory import SLOT_BYTES
from fullframe.training.faults import watchdog
from fullframe.training.faults.watchdog import Watchdog, Whereabouts, verdict
from fullframe.training.faults.whereabouts import frame_of, waits_for_ranks
from tests.rank_group import rank_group
from tests.training.tiny import loss, recipe


def test_the_verdict_names_who_does_not_wait():
    waits = Whereabouts("step 7", 61.0, "exchange.py, line 3, in wait", True)
    sleeps = Whereabouts("reading the batch of step 7", 62.0, "job.py, line 9, in read", False)
    text = verdict([waits, sleeps, None, waits], 60.0, Path("run/stacks"))
    assert text == (
        "the job hangs, no rank got on for 60 s; rank 1 does not reach the others: reading the batch of step 7, "
        "job.py, line 9, in read; rank 2 does not answer: it is stopped, or stuck outside Python; "
        "rank 0, 3 waits for that: step 7, exchange.py, line 3, in wait. Stacks of all threads are in "
        "run/stacks; if a step may take so long, give --hang-timeout"
    )
    assert "rank 0, 1 waits for each other: they do not run the same program" in verdict([waits, waits], 60.0, Path())


IN_A_ROW = 10


def seen_from_beside(wait, enough=lambda seen: None):
    """What the watchdog's thread thinks of this one meanwhile: does it wait for other ranks?"""
    seen, main, ended = [], threading.get_ident(), threading.Event()

    def look():
        while not ended.wait(0.02):
            seen.append(waits_for_ranks(main, frame_of(main)))
            enough(seen)

    beside = threading.Thread(target=look)
    beside.start()
    try:
        wait()
    finally:
        ended.set()
        beside.join()
    return seen


def one_waits_for_the_other(large, folder):
    """Rank 0 waits for rank 1, which sleeps until it was seen to; then that both are there."""
    first, was_seen = dist.get_rank() == 0, folder / "seen"

    def enough(seen):
        if len(seen) >= IN_A_ROW and all(seen[-IN_A_ROW:]):
            was_seen.touch()

    def sleep():
        until = time.monotonic() + 60
        while not was_seen.exists() and time.monotonic() < until:
            time.sleep(0.05)

    def add():  # on one line for both ranks
        all_sum_no_grad(torch.zeros(SLOT_BYTES + 8 if large else 8), dist.group.WORLD)

    seen = seen_from_beside(add, enough) if first else seen_from_beside(sleep)
    if not first:
        add()
    return seen, was_seen.exists()


@pytest.mark.parametrize("large", [False, True])
def test_who_waits_says_so(large, tmp_path):
    (_, says_so), (sleeping, _) = rank_group(2).run(one_waits_for_the_other, large, tmp_path)
    assert says_so, f"{IN_A_ROW} times in a row"
    assert not any(sleeping)


def test_a_process_alone_says_so_and_goes_on(tmp_path):
    calls, said, written, was_said = [], [], [], threading.Event()
    stacks = tmp_path / "stacks" / "rank-0.txt"

    def say(message):
        if message.startswith("step 2 has taken"):
            said.append(message)
            was_said.set()

    def slow(model, batch):
        calls.append(1)
        len(calls) != 2 or was_said.wait(60)
        written.append(stacks.read_text() if stacks.exists() else "")
        return loss(model, batch)

    ff.fit(recipe(loss=slow), ff.Strategy(), tmp_path, steps=3, hang_timeout=0.5, on_message=say)
    assert len(set(said)) == 1
    line = slow.__code__.co_firstlineno + 2
    assert said[0] == (
        f"step 2 has taken 0.5 s so far: {__file__}, line {line}, in slow; stacks are in {tmp_path}/stacks/rank-0.txt"
    )
    assert len(calls) == 3, "it went on"
    first, *rest = written[1].splitlines()
    assert json.loads(first)["waits"] is False
    assert any(f'File "{__file__}", line {line} in slow' in text for text in rest)


class Said(list):
    """What a rank says; the other waits for it."""

    def __init__(self, folder):
        super().__init__()
        self.first = folder / "said"

    def say(self, text):
        self.append(text)
        self.first.touch()

    def wait(self, meanwhile=lambda: None):
        until = time.monotonic() + 60
        while not self.first.exists() and time.monotonic() < until:
            time.sleep(0.1)
            meanwhile()


def one_is_slow(folder):
    """Rank 1 is busy for longer than a rank may be silent, and says so; what rank 0 says meanwhile."""
    said = Said(folder)
    with Watchdog(folder, 3.0, said.say) as watching:
        if dist.get_rank():
            said.wait(lambda: watching.beat("writing a lot"))
        dist.barrier()
    return list(said)


def test_a_rank_that_is_slow_is_waited_for(tmp_path):
    waiting, busy = rank_group(2).run(one_is_slow, tmp_path)
    assert busy == []
    assert waiting and all(text.startswith("all wait for rank 1, which gets on: writing a lot, ") for text in waiting)


def one_compiles(folder):
    """Rank 1 compiles for longer than a rank may be silent, and then neither; what rank 0 says meanwhile."""
    said, first, compiling = Said(folder), dist.get_rank() == 0, [True]
    watchdog.is_compiling, before = lambda: not first and compiling[0], watchdog.is_compiling
    try:
        with Watchdog(folder, 3.0, said.say):
            if not first:
                said.wait()
                compiling[0] = False
            dist.barrier()
    finally:
        watchdog.is_compiling = before
    return list(said)


def test_a_rank_that_compiles_is_waited_for(tmp_path):
    waiting, compiling = rank_group(2).run(one_compiles, tmp_path)
    assert compiling == []
    assert waiting and all(text.startswith("all wait for rank 1, which gets on: starting, ") for text in waiting)
