"""The pages are run from top to bottom, each in a folder of its own that begins with what the tutorial leaves."""

import shutil
from pathlib import Path

import pytest

from tests.docs.page import ROOT, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # on a machine that others use too

FIRST = "start/tutorial.md"
OTHERS = (
    "start/install.md",
    "start/own_loop.md",
    "start/out_of_memory.md",
    *(f"how_to/{name}.md" for name in ("train", "verify", "simulate", "plan", "report", "diagnose", "jobs")),
    *(f"how_to/{name}.md" for name in ("evaluate", "export", "horovodrun")),
    "coming_from/ddp.md",
    "troubleshooting.md",
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The tutorial's folder at its end, and what was not as the page shows it."""
    folder = tmp_path_factory.mktemp("tutorial")
    return folder, play((ROOT / "docs" / FIRST).read_text(), folder, FIRST)[1]


def test_the_tutorial_shows_what_happens(workshop: tuple[Path, list[str]]) -> None:
    assert not workshop[1], "\n".join(workshop[1])


def check(page: str, start: Path, folder: Path) -> None:
    shutil.copytree(start, folder, dirs_exist_ok=True)
    differences = play((ROOT / "docs" / page).read_text(), folder, page)[1]
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("page", OTHERS)
def test_a_page_shows_what_happens(page: str, workshop: tuple[Path, list[str]], tmp_path: Path) -> None:
    check(page, workshop[0], tmp_path)
