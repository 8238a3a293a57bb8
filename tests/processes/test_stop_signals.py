"""Asked to stop, all ranks stop after the same step, with a checkpoint, and the run goes on as if nothing had been."""

import json
import os
import signal

import pytest
import torch.distributed as dist

import fullframe as ff
from fullframe.errors import RunError
from fullframe.processes.stop_signals import Stopped, StopSignals
from tests.rank_group import rank_group
from tests.training.tiny import Frames, evaluate, loss, recipe


def losses(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def stopped_run(strategy, run_dir, number, rank, steps, step=3):
    """A run in which one rank gets a signal in a step; what was said, and how it ended."""
    messages, calls = [], []

    def disturbed(model, batch):
        calls.append(1)
        if len(calls) == step and dist.get_rank() == rank:
            os.kill(os.getpid(), number)
        return loss(model, batch)

    try:
        ff.fit(recipe(loss=disturbed), strategy, run_dir, steps=steps, on_message=messages.append)
    except Stopped as stopped:
        return messages, stopped.code, stopped.signal
    return messages, None, None


def resumed_run(strategy, run_dir, steps):
    ff.fit(recipe(), strategy, run_dir, steps=steps, resume="auto")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_process_alone(tmp_path, number, code):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    messages, found, by = stopped_run(ff.Strategy(), tmp_path / "run", number, 0, 6)
    assert (found, by) == (code, number)
    assert messages[-2:] == [
        f"wrote {tmp_path}/run/checkpoints/step-00000004",
        f"stopped after step 4 by {number.name}; go on with --resume",
    ], "a signal that comes in a step is agreed on in the next"
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == handlers
    resumed_run(ff.Strategy(), tmp_path / "run", 6)
    resumed_run(ff.Strategy(), tmp_path / "calm", 6)  # "auto" begins a run as well
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")


def test_ranks_agree(tmp_path):
    strategy = ff.Strategy(width=2)
    results = rank_group(2).run(stopped_run, strategy, tmp_path / "run", signal.SIGUSR1, 1, 6)
    assert [result[1:] for result in results] == [(0, signal.SIGUSR1)] * 2
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4]
    rank_group(2).run(resumed_run, strategy, tmp_path / "run", 6)
    rank_group(2).run(resumed_run, strategy, tmp_path / "calm", 6)
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")


def test_a_run_that_is_done_is_not_stopped(tmp_path):
    messages, code, _ = stopped_run(ff.Strategy(), tmp_path, signal.SIGTERM, 0, 3)
    assert code is None and messages == [f"wrote {tmp_path}/checkpoints/step-00000003"]


def test_a_second_ctrl_c_interrupts():
    with pytest.raises(KeyboardInterrupt), StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.number == signal.SIGTERM


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_second_ctrl_c_counts_after_any_request(first):
    with StopSignals(interrupts=False) as stop:
        for number in (first, signal.SIGINT, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert (stop.number, stop.at_once) == (first, True)
    with pytest.raises(KeyboardInterrupt), StopSignals():
        for number in (first, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)


def interrupted_evaluation(run_dir):
    """A signal on one rank in the second of eight samples; how many were evaluated, and what was said."""
    evaluated, messages = [], []

    def disturbed(model, batch):
        evaluated.append(batch["name"])
        if len(evaluated) == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(model, batch)

    job = recipe(evaluate=disturbed, evaluation_data=lambda: Frames(8, augment=False), evaluate_every=2)
    with pytest.raises(Stopped):
        ff.fit(job, ff.Strategy(width=2), run_dir, steps=6, on_message=messages.append)
    return len(evaluated), messages


def test_an_evaluation_is_left_out(tmp_path):
    for evaluated, messages in rank_group(2).run(interrupted_evaluation, tmp_path):
        assert evaluated == 2
        assert messages[0] == "the evaluation after step 2 is left out, as the run is asked to stop"
        assert messages[-1] == "stopped after step 2 by SIGTERM; go on with --resume"


def full_disk(run_dir):
    """From the third step on, metrics go to a device that is always full."""
    calls, messages = [], []

    def filled(model, batch):
        calls.append(1)
        if len(calls) == 3 and dist.get_rank() == 0:
            (run_dir / "metrics.jsonl").unlink()
            (run_dir / "metrics.jsonl").symlink_to("/dev/full")
        return loss(model, batch)

    try:
        ff.fit(recipe(loss=filled), ff.Strategy(width=2), run_dir, steps=6, on_message=messages.append)
    except RunError as error:
        return str(error), len(calls)


def test_metrics_that_cannot_be_written_end_all_ranks(tmp_path):
    for error, calls in rank_group(2).run(full_disk, tmp_path):
        assert error == (
            f"cannot write {tmp_path}/metrics.jsonl: No space left on device; make room, then go on with --resume"
        )
        assert calls == 4, "all ranks learn of it in the next step"
