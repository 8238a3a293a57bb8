"""Columns of numbers, one row a step."""

import math

from fullframe.observation.table import Table


def test_a_step_that_comes_again_replaces_what_followed() -> None:
    table = Table()
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0)):
        table.add({"step": step, "loss": loss} | ({"extra": 1.0} if step == 3 else {}))
    assert (list(table.steps), list(table.column("loss"))) == ([1, 2], [1.0, 5.0])
    assert table.known("extra") == ([], [])


def test_a_name_that_comes_late_or_goes_has_gaps() -> None:
    table = Table()
    table.add({"step": 1, "loss": 1.0, "text": "no number", "skipped": False})
    table.add({"step": 5, "loss": math.inf, "error": 3})  # others write what JSON does not know
    table.add({"step": 6, "error": 4.5})
    assert table.names == ["loss", "skipped", "error"]
    assert (table.known("loss"), table.known("error")) == (([1], [1.0]), ([5, 6], [3.0, 4.5]))
    assert (table.last("loss"), table.last("error"), table.last("nothing")) == (1.0, 4.5, None)
    assert all(map(math.isnan, table.column("nothing"))) and len(table.column("nothing")) == len(table) == 3


def test_what_is_no_number_any_more_is_not_what_it_was() -> None:
    table = Table()
    table.add({"step": 1, "iou": 0.5, "recall": None})
    table.add({"step": 2})
    assert table.newest("iou") == 0.5 and table.names == ["iou", "recall"]
    recall = table.newest("recall")
    assert recall is not None and math.isnan(recall) and table.newest("nothing") is None
    table.add({"step": 3, "iou": None})
    now = table.newest("iou")
    assert now is not None and math.isnan(now) and table.last("iou") == 0.5
    table.add({"step": 3, "iou": 0.75})
    assert table.newest("iou") == 0.75 and list(table.steps) == [1, 2, 3]
    table.add({"step": 4, "iou": None})
    table.add({"step": 2, "loss": 1.0})
    assert table.newest("iou") == 0.5
    table.add({"step": 3, "recall": 0.25})
    table.add({"step": 4})
    assert (table.newest("iou"), table.newest("recall")) == (0.5, 0.25), "step 4 evaluates nothing this time"
