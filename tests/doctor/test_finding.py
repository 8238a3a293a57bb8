"""A finding takes after its kind."""

from fullframe.doctor.finding import Finding, Kind, Severity

KIND = Kind(code="FF999", title="a title", severity=Severity.WARNING, reason="it hurts", fix="mend it")


def test_a_finding_takes_code_severity_title_and_fix_from_its_kind() -> None:
    found = KIND.found("x grows", evidence="x += y", path="a.py", line=3, column=5)
    assert found == Finding("FF999", Severity.WARNING, "a title", "x grows", "x += y", "mend it", "a.py", 3, 5)
    assert KIND.found("x grows", fix="mend x").fix == "mend x"


def test_as_a_dict_it_leaves_out_what_is_not_known_and_keeps_zero() -> None:
    found = KIND.found("x grows", line=0)
    assert found.as_dict() == {
        "code": "FF999",
        "severity": "warning",
        "title": "a title",
        "message": "x grows",
        "fix": "mend it",
        "line": 0,
    }
