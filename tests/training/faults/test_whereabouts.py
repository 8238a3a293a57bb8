"""Which thread and which line tell where a rank is; that those who wait say so is tested in test_watchdog.py."""

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
from fullframe.training.faults.whereabouts import frame_of, is_compiling, reads_a_tensor, waits_for_ranks, where


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
        Backward.seen = where(frame_of(threading.get_ident()))
        return gradient


def test_a_line_in_backward_is_told():
    Backward.apply(torch.ones(1, requires_grad=True)).backward()
    assert Backward.seen.endswith("in backward")


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


@pytest.mark.parametrize("look", [is_compiling, lambda: frame_of(threading.main_thread().ident or 0)])
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
