"""Notes of the ranks, read again: the first rank of the newest step counts, and what is wrong is as if not there."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fullframe.observation.out_of_memory.account import OutOfMemory, of_record, read_out_of_memory
from tests.observation.run_writer import out_of_memory

GIB = 2**30


def note(run_dir: Path, rank: int, **changes: Any) -> None:
    (run_dir / "oom").mkdir(exist_ok=True)
    (run_dir / "oom" / f"rank{rank}.json").write_text(json.dumps(out_of_memory(rank=rank, **changes)))


def test_no_note_is_none(tmp_path: Path) -> None:
    assert read_out_of_memory(tmp_path) is None
    (tmp_path / "oom.json").write_text("[]")
    assert read_out_of_memory(tmp_path) is None


def test_the_first_rank_of_the_newest_step(tmp_path: Path) -> None:
    note(tmp_path, 0, step=9, attempt=0, time=50.0)
    note(tmp_path, 1, step=6, attempt=1, time=70.0)
    note(tmp_path, 3, step=6, attempt=1, time=69.0)
    note(tmp_path, 2, step=6, attempt=1, time=71.0)
    found = read_out_of_memory(tmp_path)
    assert found is not None and (found.step, found.rank, found.others) == (6, 3, (1, 2))


def test_what_was_told_is_read_until_a_later_step_runs_out(tmp_path: Path) -> None:
    note(tmp_path, 1, step=6, attempt=0)
    told = out_of_memory(rank=1, step=6, attempt=0, ways=[{"words": "width 2", "command": "fullframe train"}])
    (tmp_path / "oom.json").write_text(json.dumps(told))
    found = read_out_of_memory(tmp_path)
    assert found is not None and [way.words for way in found.ways] == ["width 2"]
    note(tmp_path, 0, step=6, attempt=1)
    found = read_out_of_memory(tmp_path)
    assert found is not None and found.ways == () and found.rank == 0


def test_a_record_comes_back_as_it_was() -> None:
    found = of_record(out_of_memory())
    assert found is not None and of_record(json.loads(json.dumps(asdict(found)))) == found


def test_fragmentation_is_what_is_reserved_in_no_tensor() -> None:
    found = OutOfMemory(step=1, allocated_bytes=11 * GIB, reserved_bytes=14 * GIB, asked_bytes=2 * GIB)
    assert found.unused_bytes == 3 * GIB and found.is_fragmented
    assert not OutOfMemory(step=1, allocated_bytes=13 * GIB, reserved_bytes=14 * GIB, asked_bytes=2 * GIB).is_fragmented
    on_cpu = OutOfMemory(step=1, asked_bytes=2 * GIB, host_bytes=GIB)
    assert on_cpu.unused_bytes is None and not on_cpu.is_fragmented
