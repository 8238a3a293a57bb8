"""Notes go through files and come back."""

import math
from pathlib import Path

from fullframe.doctor.probes.notes import (
    BatchRead,
    End,
    Failure,
    Job,
    Notebook,
    Oddity,
    Sketch,
    Update,
    file_of_rank,
    read_notes,
)

JOB = Job(ranks=2, started=2, replica=5, host="a", torch="2", backend="gloo", device="cpu", frameworks=("x",))
UPDATE = Update(
    number=1, optimizer=0, gradients={"w": Sketch(3, math.inf, (1.0, 2.0))}, parameters={}, rates=(0.1,), missing=("b",)
)
BATCH = BatchRead(loader=0, epoch=1, number=1, indices=(3, 4), waited=0.1, contents=7, samples=2)


def test_notes_are_read_as_they_were_written(tmp_path: Path) -> None:
    notebook = Notebook(file_of_rank(tmp_path, 1))
    failure, oddity = Failure(kind="ValueError", text="no", trace=""), Oddity(kind="few", text="3")
    for event in (JOB, BATCH, UPDATE, failure, oddity, End(reason="enough")):
        notebook.note(event)
    nobody, somebody = read_notes(tmp_path, 2)
    assert nobody.events == () and nobody.replica == 0
    assert somebody.events == (JOB, BATCH, UPDATE, failure, oddity, End(reason="enough")) and somebody.replica == 5
    assert somebody.one(Update) == UPDATE and somebody.of(BatchRead) == [BATCH]


def test_what_a_dying_rank_left_is_read_up_to_the_line_that_was_cut_off(tmp_path: Path) -> None:
    Notebook(file_of_rank(tmp_path, 0)).note(BATCH)
    with open(file_of_rank(tmp_path, 0), "a") as file:
        file.write('{"event": "Upd')
    assert read_notes(tmp_path, 1)[0].events == (BATCH,)
