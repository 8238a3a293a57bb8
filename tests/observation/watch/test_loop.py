"""Watching until the end: in a real terminal, and where there is none."""

import io
import json
import os
import pty
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fullframe.observation.run_files import RunFiles, RunReader, read_run
from fullframe.observation.watch import loop
from fullframe.observation.watch.loop import glyphs_for, is_over, show_once, watch_lines
from tests.observation.run_writer import (
    LEAK,
    facts,
    good_run,
    observations,
    records,
    troubled_run,
    write_lines,
    write_run,
)
from tests.observation.terminal import TMUX, terminal

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
in_terminal = pytest.mark.skipif(TMUX is None, reason="there is no tmux; .ci/run installs it as root")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "fullframe.cli", *map(str, words)]


def live_run(path: Path, steps: int = 900, **changes) -> Path:
    """A run of this process that has come to step 300."""
    run = facts(state="running", ended=None, steps=steps, step=300, pid=os.getpid(), **changes)
    return write_run(good_run(path), run=run)


@in_terminal
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_a_live_run_is_drawn_again_until_it_ends(tmp_path: Path, width: int, height: int) -> None:
    path = live_run(tmp_path / "run")
    watch = command("watch", path, "--every", "0.2")
    with terminal(tmp_path, width, height, watch, ENVIRONMENT) as window:
        shown = ("● running", "step 300/900", "left", "images/s", "─ step time", "rank 1")
        shown += ("─ memory, predicted 2.78 GiB", "q quits")
        lines = window.wait_for(lambda lines: all(words in "\n".join(lines) for words in shown))
        assert lines[0].startswith("● running") and max(map(len, lines)) <= width and len(lines) == height
        write_lines(path / "metrics.jsonl", [*records(5, start=301), LEAK], mode="a")
        write_lines(path / "observed" / "rank1.jsonl", observations(1, [301, 303, 305], slower=1.4), mode="a")
        window.wait_for(lambda lines: any("step 305/900" in line for line in lines))
        window.wait_for(lambda lines: any("● leak: `total_loss` grows" in line for line in lines))
        write_run(path, run=facts(steps=900, step=305))
        lines = window.wait_for(lambda lines: any(line == "ended 0" for line in lines))
        assert any(line.startswith("● finished") for line in lines), "the last screen stays"
        assert not any("q quits" in line for line in lines)


@in_terminal
def test_q_ends_the_view_and_the_terminal_is_as_before(tmp_path: Path) -> None:
    with terminal(tmp_path, 80, 24, command("watch", live_run(tmp_path / "run")), ENVIRONMENT) as window:
        window.wait_for(lambda lines: lines[0].startswith("● running"))
        window.press("x")
        window.wait_for(lambda lines: lines[0].startswith("● running"))
        window.press("q")
        lines = window.wait_for(lambda lines: "ended 0" in lines)
        assert any("step 300/900" in line for line in lines)


def test_of_keys_pressed_together_none_is_lost() -> None:
    ours, theirs = pty.openpty()
    with open(ours, "wb", buffering=0) as keyboard, open(theirs) as stream, loop._keys(stream) as pressed:
        keyboard.write(b"xq")
        assert not pressed(5.0)
        assert pressed(5.0)


@in_terminal
def test_a_finished_run_is_printed_once(tmp_path: Path) -> None:
    with terminal(tmp_path, 80, 24, command("watch", troubled_run(tmp_path / "run")), ENVIRONMENT) as window:
        lines = window.wait_for(lambda lines: "ended 0" in lines)
        assert any(line.startswith("● failed") for line in lines) and any(line.endswith("slowest") for line in lines)


@pytest.mark.slow
@in_terminal
def test_a_training_of_two_ranks_is_watched_while_it_goes(tmp_path: Path) -> None:
    recipe = tmp_path / "job.py"
    recipe.write_text(
        "import time\nimport tests.training.tiny as tiny\n"
        "def loss(model, batch):\n    time.sleep(0.1)\n    return tiny.loss(model, batch)\n"
        "def recipe():\n    return tiny.recipe(loss=loss)\n"
    )
    run = tmp_path / "run"
    train = command("train", recipe, "--width", 2, "--steps", 60, "--run-dir", run)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with terminal(tmp_path / "a", 80, 24, train, ENVIRONMENT) as training:
        training.wait_for(lambda _: (run / "metrics.jsonl").exists(), 60)
        with terminal(tmp_path / "b", 80, 24, command("watch", run), ENVIRONMENT) as watching:
            lines = watching.wait_for(lambda lines: lines[0].startswith("● running") and "/60" in lines[1])
            assert "2 ranks" in lines[0] and max(map(len, lines)) <= 80
            watching.wait_for(lambda lines: "ended 0" in lines and any("step 60/60" in line for line in lines), 60)
        lines = training.wait_for(lambda lines: "ended 0" in lines)
        assert any(line.startswith("report: ") for line in lines)


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_LINE_SECONDS", 1000.0)
    path = live_run(tmp_path / "run", steps=302)

    class Ends(RunReader):
        """Of a run that leaks before the second look at it, and ends before the fourth."""

        looks = 0

        def read(self) -> RunFiles:
            self.looks += 1
            if self.looks == 2:
                write_lines(path / "metrics.jsonl", [*records(2, start=301), LEAK], mode="a")
            if self.looks == 4:
                write_run(path, run=facts(steps=302, step=302))
            return super().read()

    out = io.StringIO()
    watch_lines(Ends(path), out, every=0.01)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 300/302  loss 1.267") and lines[0].endswith("1 s left")
    assert lines[1:-1] == [f"warning: {LEAK['text']}"], "once"
    assert lines[-1].startswith("step 302/302") and lines[-1].endswith("finished")


def test_a_run_that_died_may_be_started_again_for_a_while(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", run=facts(state="running", pid=2**22 + 1), metrics=records(3)))
    assert run.state == "died" and run.written is not None
    assert not is_over(run, run.written + 1) and is_over(run, run.written + 60)
    assert not is_over(read_run(live_run(tmp_path / "live"))) and is_over(read_run(good_run(tmp_path / "good")))


def test_what_a_terminal_can_show_decides_the_characters(tmp_path: Path) -> None:
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=plain, width=80)
    glyphs = glyphs_for(console)
    assert (glyphs.full, glyphs.has_colours) == ("#", False)
    show_once(read_run(good_run(tmp_path / "run")), console, [])
    plain.seek(0)
    assert "rank 1" in plain.read()
    assert glyphs_for(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), force_terminal=True)).full == "█"


def test_the_json_of_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fullframe.cli.application import run

    assert run(["watch", str(live_run(tmp_path / "run")), "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["steps"]) == ("running", 300, 900)
