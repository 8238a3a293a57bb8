"""`python -m tests.docs.write [PAGE ...]`: run pages and write into them what their commands print today.

Look at the change before it is committed: a command that fails is shown failing.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from tests.docs.page import ROOT, play
from tests.docs.test_pages import FIRST, OTHERS


def main(pages: list[str]) -> None:
    """Write `pages`, or all; the tutorial is run first in any case, for the others begin with its files."""
    with tempfile.TemporaryDirectory() as root:
        start = Path(root) / "tutorial"
        start.mkdir()
        for page in (FIRST, *(page for page in (pages or OTHERS) if page != FIRST)):
            path, folder = ROOT / "docs" / page, Path(root) / page.replace("/", "-")
            if page == FIRST:
                folder = start
            else:
                shutil.copytree(start, folder)
            text, differences = play(path.read_text(), folder, page)
            print(f"{page}: {len(differences)} commands print something else")
            if page in pages or not pages:
                path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
