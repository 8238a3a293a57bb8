"""How long the parts of a step take: in a step of two ranks, and on a device whose events come late."""

import torch

import fullframe as ff
from fullframe.observation.kinds import KINDS
from fullframe.ranks import waiting
from fullframe.ranks.waiting import waiting_for_ranks
from fullframe.training import phases
from fullframe.training.phases import Phases
from tests.rank_group import rank_group
from tests.training.tiny import Network, loss

CPU = torch.device("cpu")


def test_the_parts_of_a_step_and_the_waiting_in_them(monkeypatch):
    now = 100.0

    def passes(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(phases.time, "perf_counter", lambda: now)
    monkeypatch.setattr(waiting, "perf_counter", lambda: now)
    clock = Phases(CPU)
    clock.enter("forward")
    assert clock.take(1) == {1: {}}, "nobody has asked"
    clock.active = True
    clock.enter("forward")
    passes(2.0)
    with waiting_for_ranks():
        passes(5.0)
    clock.enter("optimizer")
    with waiting_for_ranks():
        passes(3.0)
    clock.enter("")
    passes(2.0)
    (found,) = clock.take(7).values()
    assert found == {"forward": 2.0, "exchange": 5.0, "optimizer": 3.0}
    assert clock.take(8) == {8: {}}


class Event:
    """A device's, which it meets 3 queries later, 5 ms after the one before."""

    number = 0

    def __init__(self, enable_timing):
        self.queries = 0

    def record(self):
        Event.number += 1
        self.at = Event.number * 5.0

    def query(self):
        self.queries += 1
        return self.queries > 3

    def elapsed_time(self, after):
        return after.at - self.at


def test_nobody_waits_for_a_device(monkeypatch):
    monkeypatch.setattr(phases.torch, "Event", Event)
    clock = Phases(torch.device("cuda"))
    clock.active = True
    done = {}
    for step in range(1, 9):
        for name in ("forward", "backward", "forward", "optimizer", ""):
            clock.enter(name)
        found = clock.take(step)
        assert not found or max(found) < step
        done |= found
    assert list(done)[:2] == [1, 2] and done[1] == {"forward": 0.01, "backward": 0.005, "optimizer": 0.005}


def seconds_of_steps():
    """Of a split step that is watched, and whether its numbers are those of one that is not."""
    mesh = ff.init_mesh(width=2)
    results = []
    for active in (False, True):
        torch.manual_seed(0)
        model = ff.parallelize(Network(), mesh)
        step = ff.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), ff.Strategy(width=2))
        step.phases.active = active
        batch = {"image": ff.shard(torch.ones(2, 3, 9, 14, dtype=torch.float64), mesh),
                 "target": ff.shard(torch.ones(2, 9, 14, dtype=torch.int64), mesh)}  # fmt: skip
        for number in (1, 2):
            step(batch)
            taken = step.phases.take(number)[number]
        results.append((taken, [p.detach().clone() for p in model.parameters()]))
    (idle, plain), (taken, watched) = results
    return idle, taken, all(map(torch.equal, plain, watched))


def test_a_split_step_has_all_its_parts():
    ranks = rank_group(2).run(seconds_of_steps)
    for idle, taken, same in ranks:
        assert idle == {} and same
        assert set(taken) | {"exchange"} == set(KINDS) - {"data"}
        assert all(seconds >= 0 for seconds in taken.values())
    assert any("exchange" in taken for _, taken, _ in ranks), "who comes last to every meeting waits for nobody"
