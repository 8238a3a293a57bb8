"""The traces of a run are linked, with how to open them."""

from pathlib import Path

from fullframe.observation.report.page import page
from fullframe.observation.report.traces import traces
from fullframe.observation.run_files import read_run
from tests.observation.run_writer import good_run


def test_traces_are_linked_and_others_are_not(tmp_path: Path) -> None:
    run = good_run(tmp_path / "run")
    assert "One step in full" not in page([read_run(run)]) and traces([]) == ""
    (run / "trace").mkdir()
    for name in ("rank0.jsonl", "rank0.perfetto.json", "rank 1.pickle", "notes.txt"):
        (run / "trace" / name).write_bytes(b"x" * 2048)
    text = page([read_run(run)])
    for name, opened in (("rank0.perfetto.json", "ui.perfetto.dev"), ("rank%201.pickle", "memory_viz")):
        assert f'<a href="trace/{name}">' in text and opened in text
    assert "2 KiB" in text and "notes.txt" not in text
    assert "<a href" not in page([read_run(run), read_run(good_run(tmp_path / "other"))]), "they lie elsewhere then"
