"""A program of a few modules, as users have it.

Pytest loads the tests of all rooms into one process; a walk through all of theirs would use up the watch's time.
"""

import sys

import pytest

from fullframe.observation.leaks.walk import users_modules

_NEEDED = ("tests.observation.leaks", "tests.rank_group", "tests.training")


@pytest.fixture(autouse=True)
def few_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in users_modules():
        if name not in ("tests", "tests.observation", "__main__") and not name.startswith(_NEEDED):
            monkeypatch.delitem(sys.modules, name)
