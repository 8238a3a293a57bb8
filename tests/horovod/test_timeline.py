"""A Chrome trace: valid JSON, rows by name, bars that lie in one another."""

import json
from pathlib import Path

import pytest
import torch

import fullframe.horovod as hvd
from fullframe.errors import ArgumentError
from fullframe.horovod.timeline import Timeline
from tests.rank_group import rank_group


def record(folder: str) -> None:
    hvd.init()
    path = f"{folder}/timeline-of-{hvd.rank()}.json"
    hvd.start_timeline(path, mark_cycles=True)
    for step in range(3):
        hvd.allreduce_async(torch.ones(step + 1), name=f"gradient{step}")
        hvd.barrier()
        hvd.allgather(torch.ones(2), name="rows")
    hvd.stop_timeline()
    hvd.shutdown()


def test_rank_0_writes_what_the_ranks_did(tmp_path: Path) -> None:
    rank_group(2).run(record, str(tmp_path))
    assert not (tmp_path / "timeline-of-1.json").exists()
    events = json.loads((tmp_path / "timeline-of-0.json").read_text())
    rows = {event["pid"]: event["args"]["name"] for event in events if event.get("ph") == "M"}
    bars = [(rows[e["pid"]], e["name"], e["ts"], e["dur"]) for e in events if e.get("ph") == "X"]
    did = {(name, activity) for name, activity, _, _ in bars}
    expected = {(f"gradient{step}", activity) for step in range(3) for activity in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")}
    assert expected | {("rows", "ALLGATHER"), ("rounds", "CYCLE")} <= did
    assert all(start > 0 and length >= 0 for _, _, start, length in bars)


def test_one_file_at_a_time(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.start(tmp_path / "one.json")
    with pytest.raises(ValueError, match="stop_timeline"):
        timeline.start(tmp_path / "two.json")
    timeline.stop()
    timeline.stop()
    assert json.loads((tmp_path / "one.json").read_text()) == [{}]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="HOROVOD_TIMELINE"):
        Timeline().start(tmp_path / "missing" / "one.json")
