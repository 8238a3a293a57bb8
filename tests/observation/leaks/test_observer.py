"""Leaks are named with file and line; honest programs that look like them give no warning."""

import json
import sys

import pytest

import fullframe as ff
from fullframe.observation.leaks import watch
from fullframe.observation.leaks.observer import LeakObserver
from fullframe.recipe import load_recipe
from tests.observation.leaks.scripts import HEAD, HONEST, LEAKS
from tests.rank_group import rank_group

STEPS = 80


def warnings_of(script, tmp_path, steps=STEPS):
    """The records and the messages of a run of the script."""
    path = tmp_path / f"{tmp_path.name}.py"
    path.write_text(HEAD + script)
    messages = []
    recipe = load_recipe(path)
    ff.fit(recipe, ff.Strategy(), tmp_path / "run", steps=steps, observers=[LeakObserver()], on_message=messages.append,
           checkpoint_every=1000)  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return path, [line for line in lines if "leak" in line], [m for m in messages if "leak:" in m]


def marked(path, mark):
    return [n for n, line in enumerate(path.read_text().splitlines(), 1) if mark in line.partition("# ")[2].split()]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A script does not see those before it, and has time for its looks on a busy machine."""
    monkeypatch.setattr(watch, "_SECONDS", 20.0)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("fullframe_recipe"):
            del sys.modules[name]


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_named(name, tmp_path):
    kind, script = LEAKS[name]
    steps = 2 * STEPS if kind == "workers" else STEPS  # a forked worker may first let go of what its parent left
    path, records, messages = warnings_of(script, tmp_path, steps)
    assert len(records) == len(messages) == 1, messages
    (found,) = records
    print(found["text"])
    assert found["leak"] == kind
    assert found["path"].endswith(path.name)
    elsewhere = [line for place in ("model", "data") if marked(path, f"by-{place}") for line in marked(path, place)]
    assert found["line"] in (elsewhere or marked(path, "made") or marked(path, "kept"))
    assert f"{path.name}:{marked(path, 'kept')[0]}" in found["kept_at"]
    assert found["after_step"] <= steps
    if kind in ("graph", "graphs"):
        assert found["nodes_per_step"] > 0
    elif kind != "hooks":
        assert found["bytes_per_step"] >= 4096 or found["nodes_per_step"]
    assert (tmp_path / "run" / "log.txt").read_text().count("warning: leak") == 1


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_gives_no_warning(name, tmp_path):
    assert warnings_of(HONEST[name], tmp_path, steps=110)[1:] == ([], [])


def of_two_ranks(path, run_dir):
    messages = []
    observers = [LeakObserver()]
    watch._SECONDS = 20.0
    ff.fit(load_recipe(path), ff.Strategy(width=2), run_dir, steps=40, observers=observers, on_message=messages.append)
    return [message for message in messages if "leak:" in message]


@pytest.mark.parametrize("name", ["total_in_a_module", "activations_with_graph_on_a_module"])
def test_the_ranks_of_a_split_run_stay_together_while_one_is_watched(name, tmp_path):
    script = LEAKS[name][1]
    path = tmp_path / f"two_{name}.py"
    path.write_text(HEAD + script)
    first, second = rank_group(2).run(of_two_ranks, path, tmp_path / "run")
    assert len(first) == 1 and f"{path.name}:{marked(path, 'kept')[0]}" in first[0] and second == []


def test_an_object_that_answers_badly_ends_the_watch_and_not_the_run(tmp_path):
    script = """
class Odd:
    @property
    def __dict__(self):
        raise OSError("no")
odd = Odd()
"""
    assert warnings_of(script, tmp_path, steps=6)[1:] == ([], [])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 6
    assert (tmp_path / "run" / "log.txt").read_text().count("the watch on leaks has ended: OSError: no") == 1
