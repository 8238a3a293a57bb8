"""observed/rank<k>.jsonl stays short, and forgets what a resumed run does again."""

import json

from fullframe.observation.memory.timeline_file import TimelineFile


def rows(folder):
    return [json.loads(line) for line in (folder / "observed" / "rank3.jsonl").read_text().splitlines()]


def test_a_long_run_keeps_its_shape_in_few_lines_and_the_steps_that_were_followed(tmp_path):
    file, followed = TimelineFile(tmp_path, 3, 0), [3, *range(1000, 20_001, 1000)]
    for step in range(1, 20_001):
        file = TimelineFile(tmp_path, 3, step - 1) if step % 6000 == 0 else file  # it is resumed
        if file.wants(step) or step in followed:
            file.add({"step": step} | ({"bytes": {"activation": 1}} if step in followed else {}))
    found = rows(tmp_path)
    assert 300 < len(found) <= 1200 and [row["step"] for row in found if "bytes" in row] == followed
    others = [row["step"] for row in found if "bytes" not in row]
    every = others[0]
    assert every <= 64 and others == [n for n in range(every, 20_001, every) if n not in followed], "evenly"


def test_a_run_of_which_every_step_is_followed_stays_short_too(tmp_path):
    file = TimelineFile(tmp_path, 3, 0)
    for step in range(1, 1201):
        file.add({"step": step, "bytes": {"activation": 1}})
    assert [row["step"] for row in rows(tmp_path)] == list(range(2, 1201, 2)), "the last one stays"


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
