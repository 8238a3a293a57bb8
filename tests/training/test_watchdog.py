"""Who hangs: whoever does not wait for the others. That all ranks end is tested in test_faults.py."""

import json
import time
from pathlib import Path

import fullframe as ff
from fullframe.training.watchdog import Whereabouts, verdict
from tests.training.tiny import loss, recipe


def test_the_verdict_names_who_does_not_wait():
    waits = Whereabouts("step 7", "exchange.py, line 3, in wait", True)
    sleeps = Whereabouts("reading the batch of step 7", "job.py, line 9, in read", False)
    text = verdict([waits, sleeps, None, waits], 60.0, Path("run"))
    assert text == (
        "the job hangs, no rank got on for 60 s; rank 1 does not reach the others: reading the batch of step 7, "
        "job.py, line 9, in read; rank 2 does not answer: it is stopped, or stuck outside Python; "
        "rank 0, 3 waits for that: step 7, exchange.py, line 3, in wait. Stacks of all threads are in "
        "run/stacks-rank-*.txt; if a step may take so long, give --hang-timeout"
    )
    assert "rank 0, 1 waits for each other: they do not run the same program" in verdict([waits, waits], 60.0, Path())


def test_a_process_alone_says_so_and_goes_on(tmp_path):
    calls, messages = [], []

    def slow(model, batch):
        calls.append(1)
        time.sleep(1.5 * (len(calls) == 2))
        return loss(model, batch)

    ff.fit(recipe(loss=slow), ff.Strategy(), tmp_path, steps=3, hang_timeout=0.5, on_message=messages.append)
    said = [message for message in messages if "has taken" in message]
    assert len(said) == 1, messages
    line = slow.__code__.co_firstlineno + 2
    assert said[0] == (
        f"step 2 has taken 0.5 s so far: {__file__}, line {line}, in slow; stacks are in {tmp_path}/stacks-rank-0.txt"
    )
    first, *rest = (tmp_path / "stacks-rank-0.txt").read_text().splitlines()
    assert json.loads(first)["waits"] is False
    assert any(f'File "{__file__}", line {line} in slow' in text for text in rest)
