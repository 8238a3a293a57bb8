"""observed/rank<k>.jsonl stays short, and forgets what a resumed run does again."""

import json
from itertools import pairwise

from fullframe.observation.memory.timeline_file import TimelineFile


def rows(folder):
    return [json.loads(line) for line in (folder / "observed" / "rank3.jsonl").read_text().splitlines()]


def test_a_long_run_keeps_its_shape_in_few_lines(tmp_path):
    file = TimelineFile(tmp_path, 3, 0)
    for step in range(1, 20_001):
        if file.wants(step):
            file.add({"step": step})
        elif step % 1000 == 0:
            file.add({"step": step, "bytes": {"activation": 1}})
    steps = [row["step"] for row in rows(tmp_path)]
    assert 300 < len(steps) <= 1200 and steps == sorted(steps)
    assert steps[0] <= 64 and steps[-1] > 19_930
    assert max(after - before for before, after in pairwise(steps)) <= 64, "evenly, over the whole run"


def test_a_resumed_run_forgets_later_steps(tmp_path):
    file = TimelineFile(tmp_path, 3, 0)
    for step in range(1, 9):
        file.add({"step": step})
    with open(tmp_path / "observed" / "rank3.jsonl", "a") as out:
        out.write('{"step": 9, "ti')
    TimelineFile(tmp_path, 3, 5).add({"step": 6, "again": True})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6] and rows(tmp_path)[-1]["again"]
    TimelineFile(tmp_path, 3, 0)
    assert rows(tmp_path) == []


def test_a_disk_that_is_full_ends_nothing(tmp_path):
    (tmp_path / "observed").write_text("in the way")
    TimelineFile(tmp_path, 3, 0).add({"step": 1})
