"""Observers are told of a run in order, to its end, and however it ends."""

import pytest
import torch

import fullframe as ff
from fullframe.errors import ArgumentError
from fullframe.training.observers import Observer, Observers
from tests.training.tiny import loss, recipe


class Told(Observer):
    def __init__(self, log, name):
        self.log, self.name = log, name

    def begin(self, run):
        self.log.append((self.name, "begin", run.rank, type(run.session.state.optimizer).__name__))

    def before_step(self, number):
        self.log.append((self.name, "before", number))

    def batch_read(self, number, batch):
        self.log.append((self.name, "batch", number, sorted(batch)))

    def step_taken(self, number):
        self.log.append((self.name, "taken", number))

    def after_step(self, number, record):
        self.log.append((self.name, "after", record["step"]))

    def out_of_memory(self, number, error):
        self.log.append((self.name, "memory", number, str(error)))

    def end(self):
        self.log.append((self.name, "end"))


class Short:
    """The loss of `tiny`; memory runs out in its second call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(model, batch)


def test_what_observers_are_told_of_a_run(tmp_path):
    log = []
    ff.fit(recipe(loss=Short()), ff.Strategy(), tmp_path, steps=2, observers=[Told(log, "a"), Told(log, "b")])
    of_a = [said[1:] for said in log if said[0] == "a"]
    names = ["image", "index", "name", "target"]
    assert of_a == [
        ("begin", 0, "AdamW"),
        ("before", 1),
        ("batch", 1, names),
        ("taken", 1),
        ("after", 1),
        ("before", 2),
        ("batch", 2, names),
        ("memory", 2, "CUDA out of memory"),
        ("taken", 2),
        ("after", 2),
        ("end",),
    ]
    assert [said[1:] for said in log if said[0] == "b"] == of_a


def test_one_that_breaks_at_the_start_ends_those_before_it():
    log = []

    class Broken(Told):
        def begin(self, run):
            raise ValueError("no")

    class Run:
        rank = 0

        class session:
            class state:
                optimizer = None

    with pytest.raises(ValueError, match="no"), Observers([Told(log, "a"), Broken(log, "b")]).looking_on(Run()):
        raise AssertionError("never entered")
    assert log == [("a", "begin", 0, "NoneType"), ("a", "end")]


def test_what_is_no_observer_is_refused():
    with pytest.raises(ArgumentError, match=r"derives from fullframe\.training\.observers\.Observer, got .*on_record"):
        Observers([print])
