"""Which thread and which line tell where a rank is; that those who wait say so is tested in test_watchdog.py."""

import _thread
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fullframe.ranks import device
from fullframe.training.faults.whereabouts import busiest, is_compiling, reads_a_tensor, waits_for_ranks, where


class Slow:
    """In the place of a tensor that waits for its device."""

    def __init__(self):
        self.seen = []
        self.is_asked = threading.Lock()

    def _look(self):
        self.seen.append(reads_a_tensor(sys._getframe(2)))
        return 1.0

    def item(self):
        return self._look()

    tolist = cpu = sum = __float__ = item

    def to(self, place, **options):
        return self._look()


def test_a_line_that_reads_the_device_is_known_by_its_call():
    x, y = Slow(), Slow()
    x.item()
    [x.tolist() for _ in range(1)]
    {"loss": 2.0 * x.to("cpu", copy=True)}
    (
        x
        .cpu()
    )  # fmt: skip
    assert x.seen == [True] * 4
    y.sum()
    max(y.sum(), 2)
    y.__float__()
    assert y.seen == [False] * 3
    assert not reads_a_tensor(None)


class Reads(torch.Tensor):
    seen = None

    def __float__(self):
        Reads.seen = reads_a_tensor(sys._getframe(1)), waits_for_ranks(threading.get_ident(), sys._getframe(1))
        return 0.0


def test_who_reads_a_device_waits_only_where_there_is_one(monkeypatch):
    tensor = torch.ones(()).as_subclass(Reads)
    float(tensor)
    assert Reads.seen == (True, False)
    monkeypatch.setattr(device, "is_in_use", lambda: True)
    float(tensor)
    assert Reads.seen == (True, True)


class Backward(torch.autograd.Function):
    seen = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Backward.seen = busiest(threading.get_ident())
        return gradient


def test_in_backward_autograds_own_thread_is_looked_at(monkeypatch):
    Backward.apply(torch.ones(1, requires_grad=True)).backward()
    thread, frame = Backward.seen
    assert thread == threading.get_ident() and where(frame).endswith("in backward"), "on the CPU this thread runs it"

    own, is_there, ended = [], threading.Event(), threading.Event()

    def stuck_in_a_hook():
        own.append(threading.get_ident())
        is_there.set() or ended.wait(60)  # on one line, as it may be seen before it gets on

    _thread.start_new_thread(stuck_in_a_hook, ())  # which the module `threading` does not know of
    is_there.wait(60)
    main = threading.get_ident()
    try:
        assert busiest(main)[0] == main, "this thread is not in backward"
        waiting = sys._current_frames()
        monkeypatch.setattr(sys, "_current_frames", lambda: waiting | {main: FRAME_OF_AUTOGRAD})
        thread, frame = busiest(main)
        assert thread == own[0]
        assert f"{__file__}, line {stuck_in_a_hook.__code__.co_firstlineno + 2}, in stuck_in_a_hook" == where(frame)
        assert not waits_for_ranks(thread, frame)
        del waiting[own[0]]
        assert waits_for_ranks(*busiest(main)), "it waits for a kernel"
    finally:
        ended.set()


def _frame(module):
    found = {"__name__": module, "sys": sys}
    exec("frame = sys._getframe()", found)
    return found["frame"]


FRAME_OF_AUTOGRAD = _frame("torch.autograd.graph")


def test_a_thread_that_compiles_is_seen():
    assert not is_compiling()
    seen, model = [], nn.Linear(2, 2)

    def compiler(graph, inputs):
        seen.append(is_compiling())
        return graph.forward

    compiled = torch.compile(model, backend=compiler)
    compiled(torch.ones(1, 2))
    assert seen == [True] and not is_compiling()


def test_a_compiled_graph_that_runs_does_not_compile():
    seen, ended = [], threading.Event()

    def compiler(graph, inputs):
        return lambda *args: (time.sleep(0.3), graph.forward(*args))[1]

    compiled = torch.compile(nn.Linear(2, 2), backend=compiler)
    compiled(torch.ones(1, 2))

    def look():
        while not ended.wait(0.05):
            seen.append(is_compiling())

    beside = threading.Thread(target=look)
    beside.start()
    compiled(torch.ones(1, 2))
    ended.set()
    beside.join()
    assert seen and not any(seen)


@pytest.mark.parametrize("look", [is_compiling, lambda: busiest(threading.main_thread().ident or 0)])
def test_a_look_at_other_threads_keeps_nothing_of_theirs(look: Callable[[], object]) -> None:
    def work() -> "weakref.ref[torch.Tensor]":
        held = torch.zeros(3)
        looking = threading.Thread(target=look)
        looking.start()
        looking.join()
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert work()() is None
    finally:
        gc.enable()
