"""A screen fits its terminal, whatever the run and the terminal are."""

from pathlib import Path

import pytest

from fullframe.observation.run_files import RunFiles, read_run
from fullframe.observation.summary import summarize
from fullframe.observation.watch.drawing import ASCII, Glyphs
from fullframe.observation.watch.screen import screen
from tests.observation.run_writer import good_run, observations, records, troubled_run, write_run


def drawn(run: RunFiles, width: int, height: int, glyphs: Glyphs = Glyphs()) -> list[str]:  # noqa: B008
    return [line.plain.rstrip() for line in screen(run, summarize(run), width, height, glyphs, "q quits")]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 10), (79, 23), (300, 100)])
@pytest.mark.parametrize("make", [good_run, troubled_run, lambda path: good_run(path, ranks=64, steps=60)])
def test_it_fits(tmp_path: Path, make, width: int, height: int) -> None:
    lines = drawn(read_run(make(tmp_path / "run")), width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert lines[-1] == "q quits"


def test_all_is_there(tmp_path: Path) -> None:
    lines = drawn(read_run(good_run(tmp_path / "run")), 140, 24)
    assert lines[0].startswith("● finished  ") and lines[0].endswith(
        "2 ranks, NVIDIA H100, examples/stereo_depth/recipe.py"
    )
    assert lines[1].startswith("step 300/300") and "100%" in lines[1]
    assert lines[2] == "loss 1.267   best 1.195   grad norm 1.245   end point error 1.312"
    assert lines[3] == "437 ms a step   9.149 images/s   took 2 min 03 s"
    text = "\n".join(lines)
    for words in ("─ loss ", "─ step time ", "rank 1    ", "410 ms", "■ forward 27%", "predicted 2.78 GiB, GPU use",
                  "2.87 GiB of 4 GiB 93%", "■ activ 1.7 GiB"):  # fmt: skip
        assert words in text, words


def test_warnings_and_the_slowest_rank_are_there(tmp_path: Path) -> None:
    lines = drawn(read_run(troubled_run(tmp_path / "run")), 100, 24)
    assert [line.split()[:2] for line in lines if line.endswith("ms  slowest")] == [["rank", "2"]]
    assert any(line.startswith("● leak: `total_loss` grows") for line in lines)
    assert any(line.startswith("─ warnings (and ") for line in lines)


@pytest.mark.parametrize(("width", "said"), [(80, "No space left on device"), (40, " ...")])
def test_why_a_run_failed_is_read_to_its_end(tmp_path: Path, width: int, said: str) -> None:
    reason = f"cannot write checkpoint /{'data/' * 12}step-00000040 (rank 0): No space left on device\nand more"
    lines = drawn(read_run(good_run(tmp_path / "run", state="failed", reason=reason)), width, 24)
    (first,) = [number for number, line in enumerate(lines) if line.startswith("● the run failed")]
    assert said in " ".join(line.strip() for line in lines[first : first + 3])
    assert len(lines) <= 24 and max(map(len, lines)) <= width


def test_of_many_ranks_the_slowest_and_the_fullest_are_shown(tmp_path: Path) -> None:
    run = read_run(good_run(tmp_path / "run", ranks=64, steps=60))
    lines = drawn(run, 80, 24)
    assert any("─ memory, predicted 2.78 GiB, GPU use, " in line and "of 64 ranks" in line for line in lines)
    assert any(line.startswith("rank 63 ") and "GiB" in line for line in lines), "the fullest"


def test_a_live_run_says_what_is_left(tmp_path: Path) -> None:
    path = good_run(tmp_path / "run", state="running", ended=None)
    (path / "run.json").write_text((path / "run.json").read_text().replace('"steps": 300', '"steps": 900'))
    lines = drawn(read_run(path), 80, 24)
    assert lines[0].startswith("● running") and lines[1].endswith("33%, 4 min 06 s left")


def test_on_a_roomy_device_bars_are_against_what_is_held(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metrics=records(2), observed={0: observations(0, [1, 2], limit_mib=80_000)})
    lines = drawn(read_run(run), 100, 24)
    assert any(line.startswith("─ memory, GPU use; bars up to 2.8") for line in lines)
    (line,) = [line for line in lines if line.endswith("of 78.1 GiB 93%")]
    assert line.count("█") > 50, "else it would be two characters"


def test_what_is_not_measured_is_said(tmp_path: Path) -> None:
    lines = drawn(read_run(write_run(tmp_path / "run", metrics=records(2))), 80, 24)
    assert lines.count("not measured") == 2 and lines[1] == "step 2"
    empty = drawn(read_run(write_run(tmp_path / "empty", metrics=[])), 80, 24)
    assert empty[2] == "no step is done yet"


def test_a_terminal_without_unicode_gets_none(tmp_path: Path) -> None:
    lines = drawn(read_run(troubled_run(tmp_path / "run")), 80, 24, ASCII._replace(has_colours=False))
    assert all(line.isascii() for line in lines)
    assert any("ffffff" in line and "bbbbbb" in line for line in lines)
