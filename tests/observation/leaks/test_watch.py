"""A loop of one's own: what its variables keep, in training and in validation."""

import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fullframe as ff
from fullframe.observation.leaks import watch as watch_module
from fullframe.observation.leaks.watch import LeakWatch


@pytest.fixture(autouse=True)
def time_for_looks(monkeypatch):
    """Also on a busy machine; what they may take is a test of its own."""
    monkeypatch.setattr(watch_module, "_SECONDS", 20.0)


def line_with(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.endswith(f"# {text}"))


def network():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def test_a_total_in_a_loop_is_named():
    model, optimizer = network()
    told = []
    watch = ff.watch_leaks(model=model, optimizer=optimizer, say=told.append)
    total = 0.0
    for _ in range(40):
        loss = model(torch.ones(1, 3, 16, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss  # own total
        watch.step()
    (found,) = watch.leaks
    assert told == [found.text]
    assert (found.kind, found.line) == ("graph", line_with("own total"))
    assert "total" in found.kept_at and found.path.endswith("test_watch.py") and found.nodes_per_step > 0


def validate(model, watch, outputs):
    for _ in range(40):
        outputs.append(model(torch.ones(1, 3, 48, 48)))  # builds graphs
        watch.step()


def test_validation_that_builds_graphs():
    model, _ = network()
    watch = ff.watch_leaks(model=model)
    with pytest.warns(UserWarning, match=r"leak: `<validate>.outputs` grows with every step by"):
        validate(model, watch, [])
    (found,) = watch.leaks
    assert (found.kind, found.line) == ("graphs", line_with("builds graphs"))
    assert found.bytes_per_step > 4 * 4 * 46 * 46, "with the activations that the graph keeps"


class Seen:
    tensor = torch.zeros(0)


@pytest.mark.parametrize("every", [5, 30])
def test_a_tensor_that_grows_at_evaluations_is_told_by_what_each_adds(every):
    told, seen = [], Seen()
    watch = LeakWatch({"metric": seen}, told.append)
    for number in range(1, 12 * every):  # what other tests have left may be looked at first
        watch.before(number)
        evaluated = number % every == 0
        if evaluated:
            seen.tensor = torch.cat([seen.tensor, torch.zeros(2000)])
        watch.after(number, evaluated)
    assert [(found.kind, found.bytes_per_step) for found in told] == [("evaluation", 8000)]


def test_an_honest_loop_is_left_in_peace():
    model, optimizer = network()
    watch = ff.watch_leaks(model=model, optimizer=optimizer)
    history, mean = [], 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            output = model(torch.ones(1, 3, 16, 16))
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())
            mean = 0.9 * mean + 0.1 * loss.detach()
            watch.step()
    assert watch.leaks == []


def test_it_takes_no_more_than_its_share(monkeypatch):
    """Of a long run of tiny steps under half a percent, beyond what it is given at the start."""
    monkeypatch.setattr(watch_module, "_SECONDS", 2.0)
    rows = {str(number): [number] for number in range(2000)}
    watch = LeakWatch({"rows": rows, "kept": [[n] for n in range(40)]}, lambda found: None)
    looks = 0

    def counted(*arguments, look=watch._look):
        nonlocal looks
        looks += 1
        watch._spent += 1.0  # as if a look took a second
        look(*arguments)

    watch._look = counted
    started = time.monotonic()
    for number in range(3000):
        watch.after(number)
    assert looks <= 3 + 0.004 * (time.monotonic() - started)


def test_a_debugger_is_left_alone():
    def trace(*_):
        return None

    before = sys.gettrace()
    kept, watch = [], ff.watch_leaks(say=lambda text: None)
    try:
        sys.settrace(trace)
        for _ in range(40):
            kept.append(torch.zeros(5000))  # own list
            watch.step()
            assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    (found,) = watch.leaks
    assert (found.kind, found.line) == ("outputs", line_with("own list"))


class Odd:
    @property
    def __dict__(self):
        raise OSError("no")


def test_an_object_that_answers_badly_ends_the_watch_and_not_the_loop():
    odd, watch = Odd(), ff.watch_leaks()
    with pytest.warns(UserWarning, match="the watch on leaks has ended: OSError: no") as warned:
        for _ in range(10):
            watch.step()
    assert len(warned) == 1 and odd is not None
