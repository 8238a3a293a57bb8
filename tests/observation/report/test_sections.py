"""Training, memory, time, predictions: the numbers of the run's files, and what is missing is said."""

from pathlib import Path

import pytest

from fullframe.observation.report.sections import Shown, memory, plain, predictions, table, times, training
from fullframe.observation.run_files import read_run
from fullframe.observation.summary import summarize
from tests.observation.run_writer import good_run, records, troubled_run, write_run


def shown(path: Path, name: str = "first") -> Shown:
    run = read_run(path)
    return Shown(name=name, run=run, summary=summarize(run), colour="var(--c0)")


@pytest.fixture
def good(tmp_path: Path) -> Shown:
    return shown(good_run(tmp_path / "good"))


@pytest.fixture
def troubled(tmp_path: Path) -> Shown:
    return shown(troubled_run(tmp_path / "troubled"), "second")


def test_every_measure_of_the_run_has_a_chart(good: Shown) -> None:
    drawn = training([good])
    assert [name in drawn for name in (">loss<", ">end point error<", ">grad norm<", ">skipped<")] == [True] * 3 + [
        False
    ]
    assert drawn.count("<figure") == 3 and drawn.count('class="chart wide"') == 1


def test_two_runs_share_the_charts(good: Shown, troubled: Shown) -> None:
    drawn = training([good, troubled])
    assert drawn.count("<figure") == 3 and "first</span>" in drawn and "second</span>" in drawn


def test_memory_names_the_peak_the_largest_module_and_the_limit(good: Shown) -> None:
    drawn = memory([good])
    assert "The peak: 2.93 GiB on rank 1 in step" in drawn
    assert "59% of it is activations; the allocator held 3.07 GiB, 5% more; the device has 4 GiB" in drawn
    assert "encoder.stages.0.blocks.0" in drawn and "predicted 2.78 GiB" in drawn and "limit 4 GiB" in drawn


def test_a_run_without_observations_says_so(tmp_path: Path) -> None:
    bare = shown(write_run(tmp_path / "bare", metrics=records(5)))
    assert "This run wrote nothing of its memory" in memory([bare])
    assert "was not measured" in times([bare]) and "seconds of each step" in times([bare])
    assert predictions([bare]) == ""
    assert "No step was recorded yet" in training([shown(write_run(tmp_path / "empty", metrics=[]))])


def test_observations_without_categories_still_give_the_peak(tmp_path: Path) -> None:
    rows = [{"step": n, "peak_bytes": n * 2**28, "host_bytes": 2**30} for n in (1, 2)]
    drawn = memory([shown(write_run(tmp_path / "run", metrics=records(2), observed={0: rows}))])
    assert "The peak: 0.5 GiB on rank 0 in step 2" in drawn and "Not measured by module" in drawn
    assert "What it was made of was not measured" in drawn
    only_host = {0: [{"step": 1, "host_bytes": 2**30}]}
    assert "No peak was measured" in memory([shown(write_run(tmp_path / "host", metrics=[], observed=only_host))])


def test_the_peak_of_a_step_that_was_not_traced_is_explained_by_one_that_was(tmp_path: Path) -> None:
    rows = [{"step": n, "peak_bytes": (4 + (n == 3)) * 2**28} for n in (1, 2, 3)]
    rows[1] |= {"bytes": {"activation": 3 * 2**28, "parameter": 2**28}, "modules": {"stem": 2**20}}
    drawn = memory([shown(write_run(tmp_path / "run", metrics=records(3), observed={0: rows}))])
    assert "The peak: 1.25 GiB on rank 0 in step 3" in drawn
    assert "75% of it is activations in step 2, which was measured by category" in drawn and ">stem<" in drawn
    assert "as measured in step 2" in drawn


def test_host_memory_has_a_line_for_each_rank(good: Shown) -> None:
    drawn = memory([good])
    assert ">host memory<" in drawn and drawn.count("rank 0</span>") >= 1


def test_times_name_the_slowest_rank(good: Shown, troubled: Shown) -> None:
    assert "no rank is slow" in times([good]) and "slowest" not in times([good]).replace("no rank is slow", "")
    drawn = times([troubled])
    assert "rank 2 is the slowest: it works 30% longer" in drawn and drawn.count("ms slowest") == 1
    assert drawn.count('class="bar"') == 1 + 4, "the prediction and four ranks"
    assert "second, rank 2" in times([good, troubled])


def test_many_ranks_are_cut_to_the_fullest_and_busiest(tmp_path: Path) -> None:
    one = shown(good_run(tmp_path / "run", ranks=40, steps=60))
    assert "The 32 fullest of 40 ranks." in memory([one])
    assert 'label">rank 39<' in memory([one]) and 'label">rank 3<' not in memory([one])


def test_predicted_against_measured_lists_each_category(good: Shown, troubled: Shown) -> None:
    drawn = predictions([good])
    assert "<td>peak memory</td><td>2.78 GiB</td><td>2.93 GiB</td><td>+5.2 %</td>" in drawn
    assert "peak: activations" in drawn
    both = predictions([good, troubled])
    assert "<h3>first</h3>" in both and "<h3>second</h3>" in both and both.count("<td>peak memory</td>") == 2


def test_a_table_marks_rows() -> None:
    assert table(["", "a"], [["x", "1"], ["y", "2"]], ["", "apart"]).count("class=apart") == 1
    assert "<th>" not in table([], [["x", "1"]])
    assert plain("all_reduce") == "all-reduce" and plain("other_processes") == "other processes"
