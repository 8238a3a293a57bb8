"""What the pages count of this repository is there so many times."""

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
