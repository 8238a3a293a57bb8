"""Strategy and facts; where runs differ is marked."""

from pathlib import Path

from fullframe.observation.report.details import details, messages
from tests.observation.report.test_sections import shown
from tests.observation.run_writer import facts, good_run, records, troubled_run, write_run


def test_the_exact_strategy_and_versions_are_there(tmp_path: Path) -> None:
    drawn = details([shown(good_run(tmp_path / "run"))])
    assert "<td>width</td><td><b>2</b></td>" in drawn, "not the default: it stands out"
    assert "<td>height</td><td>1</td>" in drawn and "<td>offload</td><td>no</td>" in drawn
    assert "<td>torch</td><td>2.13.0</td>" in drawn and "<td>SLURM_JOB_ID</td><td>4711</td>" in drawn
    assert "fullframe train examples/stereo_depth/recipe.py --width 2" in drawn
    assert "class=apart" not in drawn


def test_values_are_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path, run=facts(arguments=["train", "--set", "scenes=a*"]), strategy={"compile": ["encoder.*"]})
    drawn = details([shown(run)])
    assert "<td>fullframe train --set scenes=a*</td>" in drawn and "<td>encoder.*</td>" in drawn


def test_where_runs_differ_is_marked(tmp_path: Path) -> None:
    drawn = details([shown(good_run(tmp_path / "a"), "a"), shown(troubled_run(tmp_path / "b"), "b")])
    assert "<tr class=apart><td>height</td><td>1</td><td><b>2</b></td></tr>" in drawn
    assert "<tr><td>precision</td>" in drawn


def test_absent_files_are_said_and_messages_are_text(tmp_path: Path) -> None:
    bare = shown(write_run(tmp_path / "bare", metrics=records(2)))
    assert "Its file is not there" in details([bare]) and messages([bare]) == ""
    said = messages([shown(write_run(tmp_path / "run", metrics=records(2), log="10:00 <b>warning</b>\n"))])
    assert "log.txt: 1 line<" in said and "&lt;b&gt;warning" in said
