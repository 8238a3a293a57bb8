"""A run's timeline: a line a step with its seconds, one step followed, and the same numbers as without."""

import json
from types import SimpleNamespace

import torch

import fullframe as ff
from fullframe.observation.memory import timeline as timeline_module
from fullframe.observation.memory.timeline import Timeline
from tests.rank_group import rank_group
from tests.training.tiny import Frames, Network, recipe


def observed(run_dir, rank=0):
    return [json.loads(line) for line in (run_dir / "observed" / f"rank{rank}.jsonl").read_text().splitlines()]


def trained(strategy, run_dir, watched, **changes):
    seen = []
    timeline = Timeline(trace_step=4, on_trace=lambda run, trace: seen.append(len(trace.events)))
    model = ff.fit(recipe(**changes), strategy, run_dir, steps=5, observers=[timeline] if watched else [])
    return [value.clone() for value in model.state_dict().values()], timeline.peak_bytes, seen


def check(strategy, run_dir, ranks):
    results = rank_group(ranks).run(trained, strategy, run_dir / "watched", True)
    plain = rank_group(ranks).run(trained, strategy, run_dir / "plain", False)
    for (values, peak, seen), (expected, *_) in zip(results, plain, strict=True):
        assert all(map(torch.equal, values, expected)), "to the last bit"
        assert peak > 0 and len(seen) == 1 and seen[0] > 100
    return [observed(run_dir / "watched", rank) for rank in range(ranks)]


def test_two_ranks(tmp_path):
    for rows in check(ff.Strategy(width=2), tmp_path, 2):
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
        for row in rows:
            parts = set(row["seconds"]) - {"exchange"}  # which a rank that never waited has not
            assert parts == {"data", "forward", "backward", "all_reduce", "optimizer"}
            assert row["host_bytes"] > 2**20 and row["limit_bytes"] > row["host_bytes"] and row["time"] > 1.7e9
            assert 0 <= row["without_core_seconds"] <= sum(row["seconds"].values()) + 1e-3
        assert any("exchange" in row["seconds"] for row in rows)
        assert [row["step"] for row in rows if "bytes" in row] == [2, 4]
        second = rows[1]
        assert sum(second["bytes"].values()) == second["peak_bytes"]
        assert second["modules"] and second["bytes"]["activation"] > 0 and second["bytes"]["parameter"] > 0
        assert second["bytes"]["optimizer"] > 0, "made by the step before"


def test_sharded_parameters_and_replicas(tmp_path):
    check(ff.Strategy(data=2, shard_parameters=True), tmp_path, 2)


def test_a_gpus_counters_are_those_of_the_step_and_not_of_the_evaluation_after_it(tmp_path, monkeypatch):
    held = {"now": 0}

    def evaluate(model, batch):
        held["now"] = 2**40
        return {"one": (1.0, 1)}

    def peak():
        return held["now"] + 5, held["now"] + 7

    counters = SimpleNamespace(is_in_use=lambda: True, peak_bytes=peak, properties=lambda: ("", 2**40))
    monkeypatch.setattr(timeline_module, "device", counters)
    monkeypatch.setattr(timeline_module, "_cached_bytes", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: held.update(now=0))
    timeline = Timeline(meter=lambda: None)
    job = recipe(evaluation_data=Frames, evaluate=evaluate, evaluate_every=1)
    ff.fit(job, ff.Strategy(), tmp_path, steps=3, observers=[timeline])
    assert timeline.counted == (5, 7)


class Noted(Network):
    """Knows whether it ran under somebody's mode."""

    def forward(self, x):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise ValueError("an error of the model's own")
        return super().forward(x)


def test_an_error_of_the_program_in_the_followed_step_is_its_own(tmp_path):
    timeline = Timeline()
    try:
        ff.fit(recipe(model=Noted), ff.Strategy(), tmp_path, steps=3, observers=[timeline])
    except ValueError as error:
        assert str(error) == "an error of the model's own"
    else:
        raise AssertionError("it was swallowed")
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert [row["step"] for row in observed(tmp_path)] == [1]


def test_a_trace_that_fails_does_not_end_the_step(tmp_path, monkeypatch):
    from fullframe.observation.memory import traced_step

    def broken(func, args, out):
        raise ZeroDivisionError("in the tracker")

    monkeypatch.setattr(traced_step, "cpu_scratch", broken)
    model = ff.fit(recipe(), ff.Strategy(), tmp_path / "run", steps=3, observers=[Timeline()])
    plain = ff.fit(recipe(), ff.Strategy(), tmp_path / "plain", steps=3)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert [("bytes" in row, row["step"]) for row in observed(tmp_path / "run")] == [(False, n) for n in (1, 2, 3)]
