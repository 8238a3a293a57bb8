"""What the pages count of this repository is there so many times."""

import re

import pytest

from fullframe.doctor.lint.catalog import RULES
from tests.docs.page import ROOT
from tests.doctor import planted
from tests.doctor.rehearsal import recipes
from tests.horovod.conformance import CASES
from tests.observation.leaks.scripts import HONEST, LEAKS


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("features.md", f"{len(RULES)} rules on values"),
        ("features.md", f"{len(planted.FAULTS)} planted loops and {len(recipes.FAULTS)} planted recipes"),
        ("features.md", f"{len(CASES)} conformance cases"),
        ("features.md", f"{len(LEAKS)} planted ones found, {len(HONEST)} honest programs"),
        ("how_to/leaks.md", f"{len(LEAKS)} planted leaks and {len(HONEST)} honest programs"),
    ],
)
def test_what_is_counted(page: str, words: str) -> None:
    assert words in (ROOT / "docs" / page).read_text()


def test_what_the_op_database_gave_is_said_alike() -> None:
    """README and features.md have the figures of ops.md, which a command writes."""
    ops, features = ((ROOT / "docs" / name).read_text() for name in ("ops.md", "features.md"))
    found = re.search(
        r"\*\*(\d+) ops and modules with an image-like sample: (\d+) exact.*\*\* ([\d,]+) cases on the meshes .*: "
        r"([\d,]+) error agrees, ([\d,]+) exact, ([\d,]+) refused",
        ops,
    )
    assert found is not None
    every, exact, cases, alike, right, refused = found.groups()
    assert f"{cases} cases on four meshes" in features
    assert f"{exact} of {every} ops with an image-like sample exact" in features
    assert f"| {right} | {refused} by name; {alike} as in one process | 0 |" in (ROOT / "README.md").read_text()
