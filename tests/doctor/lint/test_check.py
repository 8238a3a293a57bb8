"""From a source text to its findings; comments that waive them."""

import pytest

from fullframe.doctor.finding import Severity
from fullframe.doctor.lint.catalog import RULES
from fullframe.doctor.lint.check import check_source
from tests.doctor.lint.samples import training

SOURCE = "import torch.nn.functional as F\n" + training("total += loss{}", "total = 0\n")


ON = [rule for rule in RULES.values() if rule.kind.default]


def codes(source: str) -> list[str]:
    return [finding.code for finding in check_source(source, "a.py", ON)]


def test_a_finding_says_where_it_is_and_shows_the_line() -> None:
    (found,) = check_source(SOURCE.format(""), "a.py", ON)
    assert (found.code, found.severity, found.path) == ("FF101", Severity.WARNING, "a.py")
    assert (found.line, found.column, found.evidence) == (10, 5, "total += loss")
    assert "total" in found.message and "detach" in found.fix


def test_lines_and_columns_are_those_that_an_editor_counts() -> None:
    source = "\f\n" + SOURCE.replace("total +=", "'größe'; total +=")
    (found,) = check_source(source.format(""), "a.py", ON)
    assert (found.line, found.column, found.evidence) == (11, 14, "'größe'; total += loss")
    assert codes(source.format("  # noqa")) == []


def test_a_text_that_python_cannot_read_is_a_finding() -> None:
    (found,) = check_source("import torch\nloss.backward()\0", "a.py", ON)
    assert (found.code, found.line, found.column) == ("FF100", 1, 1) and "null" in found.message


@pytest.mark.parametrize(
    ("comment", "is_found"),
    [
        ("  # noqa", False),
        ("  # noqa: FF101", False),
        ("  # NOQA:FF101", False),
        ("  # noqa: E501,FF101", False),
        ("  # noqa: E501 FF101", False),
        ("  # noqa: FF1", False),
        ("  # noqa: FF102", True),
        ("  # noqa: E501", True),
        ("  # no qa", True),
    ],
)
def test_a_comment_waives_what_it_names(comment: str, is_found: bool) -> None:
    assert bool(codes(SOURCE.format(comment))) is is_found


def test_what_cannot_be_parsed_is_a_finding_if_it_is_about_training() -> None:
    (found,) = check_source("import torch\nfor x in y\n    x.backward()", "a.py", RULES.values())
    assert (found.code, found.line) == ("FF100", 2)
    assert codes("print 'python 2'") == []


def test_a_file_that_is_not_about_torch_is_not_looked_at() -> None:
    assert codes("for x in y:\n    loss = f(x)\n    loss.backward()\n    total += loss\n") == []


def test_a_function_that_is_run_twice_gives_a_finding_once() -> None:
    source = "import torch\ndef f(m, o, d):\n    t = 0\n    for x in d:\n        l = m(x)\n        l.backward()\n"
    source += "        o.step()\n        o.zero_grad()\n        t += l\nf(a, b, c)\nf(d, e, f)\n"
    assert codes(source) == ["FF101"]
