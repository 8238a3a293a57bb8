"""docs/findings.md is what the rules say."""

from pathlib import Path

from fullframe.doctor.findings_page import SECTIONS, page

PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m fullframe.doctor.findings_page"


def test_every_kind_stands_there_once_and_codes_rise() -> None:
    codes = [kind.code for _, _, kinds in SECTIONS for kind in kinds]
    assert codes == sorted(set(codes))
    assert [line[4:] for line in page().splitlines() if line.startswith("### ")] == codes
