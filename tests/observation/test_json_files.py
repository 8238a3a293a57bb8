"""What a file says when it is torn, gone, or of other types than it should."""

import math
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fullframe.observation.json_files import (
    JsonLines,
    moment,
    number,
    numbers,
    read_object,
    record,
    sizes,
    whole_number,
)


def test_lines_are_given_once_and_again_when_the_file_is_another(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = JsonLines(path)

    def fresh() -> tuple[list[dict[str, object]], bool]:
        found, again = lines.fresh()
        return list(found), again

    assert fresh() == ([], False), "not there yet"
    path.write_text('{"a": 1}\n\n[2]\n{"a": 3')
    assert fresh() == ([{"a": 1}], True) and lines.unreadable == 1
    assert fresh() == ([], False)
    path.write_text('{"b": 1}\n')  # shorter
    assert fresh() == ([{"b": 1}], True) and lines.unreadable == 0
    path.unlink()
    assert fresh() == ([], True), "what was read is no longer there"


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n' * 50_000)
    tracemalloc.start()
    count = sum(1 for _ in JsonLines(path).fresh()[0])
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 50_000 and most_bytes < path.stat().st_size


def test_values_of_other_types_are_none() -> None:
    wrong = ["3", None, True, math.nan, math.inf, [], {}]
    assert [number(value) for value in wrong] == [None] * len(wrong)
    assert (number(3), whole_number(3.9)) == (3.0, 3)
    assert numbers({"a": 1, "b": "2"}) == {"a": 1.0} and numbers([1]) == {}
    assert sizes({"a": 1.7, "b": math.inf}) == {"a": 1}
    assert moment("soon") is None and moment(None) is None
    found = moment("2026-03-14T09:26:00+00:00")
    assert found is not None and found.timestamp() == 1773480360


def test_an_object_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "object"
    assert read_object(path) is None
    for text, found in (("{", None), ("[1]", None), ('{"a": 1}', {"a": 1})):
        path.write_text(text)
        assert read_object(path) == found


@dataclass(frozen=True)
class Inner:
    name: str = "none"
    count: int | None = None


@dataclass(frozen=True)
class Outer:
    first: Inner | None = None
    others: tuple[Inner, ...] = ()
    ranks: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


def test_a_record_has_what_is_of_its_fields_types() -> None:
    found = {"others": [{"name": "a", "count": 2.0}, {"name": "", "count": "2"}], "ranks": [1, "2"], "unknown": 1}
    assert record(Outer, found) == Outer(None, (Inner("a", 2), Inner()), (1,))
    assert record(Outer, {"first": [], "others": 3, "ranks": {}, "seconds": {"a": 1, "b": None}}).seconds == {"a": 1.0}
    assert record(Outer, {"first": {"count": 0}}).first == Inner("none", 0)
