"""A run as data and as a line."""

import json
from pathlib import Path

from fullframe.observation.run_files import read_run
from fullframe.observation.summary import summarize
from fullframe.observation.watch.snapshot import as_data, as_line
from tests.observation.run_writer import LEAK, good_run, records, troubled_run, write_run


def test_data_is_json_with_every_figure(tmp_path: Path) -> None:
    run = read_run(troubled_run(tmp_path / "run"))
    data = json.loads(json.dumps(as_data(run, summarize(run))))
    assert (data["state"], data["level"], data["step"], data["steps"]) == ("failed", "bad", 300, 300)
    assert (data["skipped"], data["restarts"], data["slowest_rank"]) == (3, 2, 2)
    assert data["leaks"] == [LEAK] and len(data["ranks"]) == 4
    assert set(data["ranks"][0]["seconds"]) == {"data", "forward", "exchange", "backward", "all_reduce", "optimizer"}
    assert data["measures"]["end_point_error"] == run.table.last("end_point_error")
    assert data["prediction"]["peak_bytes"] and data["findings"][0]["level"] == "bad"


def test_what_is_not_known_is_null(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", metrics=[]))
    data = as_data(run, summarize(run))
    assert [data[name] for name in ("loss", "steps", "prediction", "peak_bytes", "seconds_left")] == [None] * 5


def test_a_line(tmp_path: Path) -> None:
    run = read_run(good_run(tmp_path / "run"))
    assert as_line(run, summarize(run)) == (
        "step 300/300  loss 1.267  437 ms a step  9.149 images/s  peak 2.93 GiB  finished"
    )
    bare = read_run(write_run(tmp_path / "bare", metrics=records(1)))
    assert as_line(bare, summarize(bare)).startswith("step 1  loss 19.14  4")
