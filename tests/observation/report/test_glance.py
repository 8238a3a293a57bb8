"""A person at the first glance knows whether the run is well."""

from pathlib import Path

from fullframe.observation.report.glance import first_glance
from tests.observation.report.test_sections import shown
from tests.observation.run_writer import good_run, records, troubled_run, write_run


def test_a_good_run_is_green(tmp_path: Path) -> None:
    drawn = first_glance([shown(good_run(tmp_path / "run"))])
    assert '<header class="verdict good"><span class="badge">Finished, all well</span>' in drawn
    assert "300 steps in 2 min 03 s. The loss fell from 19.14 to 1.267. Nothing needs a look." in drawn
    assert "2.93 GiB</b><span>73% of 4 GiB</span>" in drawn
    assert "+5.2 %</b><span>2.78 GiB predicted</span>" in drawn
    assert "<li" not in drawn


def test_a_troubled_run_is_red_and_says_why(tmp_path: Path) -> None:
    drawn = first_glance([shown(troubled_run(tmp_path / "run"))])
    assert '<header class="verdict bad"><span class="badge">Failed, something is wrong</span>' in drawn
    assert drawn.index("the run failed") < drawn.index("recipe.py:41") < drawn.index("rank 2 works")
    assert "<b>6</b><span>1 leak, 3 skipped steps, 2 restarts</span>" in drawn


def test_a_run_that_tells_little_is_shown_all_the_same(tmp_path: Path) -> None:
    drawn = first_glance([shown(write_run(tmp_path / "run", metrics=records(1)))])
    assert '<header class="verdict info"><span class="badge">State not known</span>' in drawn and ">1 step. " in drawn
    assert "there is no run.json" in drawn
    assert first_glance([shown(write_run(tmp_path / "none", metrics=[]))])


def test_a_live_run_says_how_long_it_will_take(tmp_path: Path) -> None:
    path = good_run(tmp_path / "run", state="running", ended=None)
    (path / "run.json").write_text((path / "run.json").read_text().replace('"steps": 300', '"steps": 900'))
    drawn = first_glance([shown(path)])
    assert "Running" in drawn and "300 of 900 steps" in drawn and "About 4 min 06 s left." in drawn


def test_several_runs_are_columns_and_the_best_stands_out(tmp_path: Path) -> None:
    drawn = first_glance([shown(good_run(tmp_path / "a"), "a"), shown(troubled_run(tmp_path / "b"), "b")])
    assert "2 runs side by side" in drawn
    assert '<td>last loss</td><td><span class="best">1.267</span></td><td>1.792<small>+41 %</small></td>' in drawn
    assert '<td>leaks</td><td><span class="best">0</span></td><td>1</td>' in drawn
    assert "<b>b</b>: the run failed" in drawn
