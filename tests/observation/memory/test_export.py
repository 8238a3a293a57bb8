"""A trace as other programs read it: PyTorch's own reader of snapshots, Perfetto's counters, lines of JSON."""

import json
import pickle

from torch.cuda import _memory_viz

import fullframe as ff
from fullframe.cli.application import run
from fullframe.observation.memory.export import SUFFIXES, chrome_events, events, memory_snapshot, write_trace
from fullframe.simulation.memory.account import account
from tests.training.tiny import recipe

SCRIPT = """
import torch, fullframe as ff
from tests.training import tiny

def recipe():
    return tiny.recipe()
"""


def traces():
    found = []
    predicted = ff.simulate(recipe(), ff.Strategy(), "1xcpu", on_trace=found.append)
    return found[0], predicted


def test_all_three_have_the_peak_of_the_account():
    trace, predicted = traces()
    peak = account(trace).peak_bytes
    assert peak == predicted.peak_bytes
    held = most = 0
    for event in events(trace):
        held += event["bytes"] if event["event"] == "alloc" else -event["bytes"]
        most = max(most, held)
    assert most == peak
    counters = [event["args"] for event in chrome_events(trace) if event["ph"] == "C"]
    assert max(sum(args.values()) for args in counters) == peak
    slices = [event for event in chrome_events(trace) if event["ph"] == "X"]
    assert {event["name"] for event in slices} >= {"forward", "backward"}
    assert sum(event["dur"] for event in slices) <= len(trace.events)


def test_pytorchs_own_reader_takes_the_snapshot():
    trace, _ = traces()
    snapshot = memory_snapshot(trace)
    page = _memory_viz.trace_plot(snapshot)
    assert "<html" in page.lower() or "<script" in page.lower()
    held, most = {}, 0
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in held
            held[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert held.pop(event["addr"]) == event["size"]
        most = max(most, sum(held.values()))
    assert most == account(trace).peak_bytes


def test_the_command_line_writes_a_real_step_and_a_simulated_one(tmp_path, capsys):
    path = tmp_path / "recipe.py"
    path.write_text(SCRIPT)
    folder = tmp_path / "run"
    assert run(["train", str(path), "--on-cpu", "--steps", "3", "--trace-step", "3", "--run-dir", str(folder)]) == 0
    assert run(["simulate", str(path), "--gpus", "cpu", "--trace", str(tmp_path / "simulated"), "--json"]) == 0
    assert f"wrote {tmp_path / 'simulated'}.jsonl" in capsys.readouterr().err
    for stem in (folder / "trace" / "rank0", tmp_path / "simulated"):
        lines, chrome, snapshot = (stem.with_name(stem.name + suffix) for suffix in SUFFIXES)
        assert {"alloc", "free"} == {json.loads(line)["event"] for line in lines.read_text().splitlines()}
        assert json.loads(chrome.read_text())["traceEvents"]
        with open(snapshot, "rb") as file:
            assert pickle.load(file)["device_traces"][0]


def test_files_of_a_trace(tmp_path):
    trace, _ = traces()
    files = write_trace(trace, tmp_path / "deep" / "step")
    assert [file.name for file in files] == [f"step{suffix}" for suffix in SUFFIXES]
