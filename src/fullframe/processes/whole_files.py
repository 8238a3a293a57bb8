"""Files that other processes read while they are written: the old text or the new one, never a part."""

import os
from contextlib import suppress
from pathlib import Path


def replace_text(path: Path, text: str, writer: str = "") -> None:
    """Write `text` beside `path`, then put it in its place; raises OSError and leaves `path` as it was.

    Where several write at once each has a `writer` of its own.
    """
    partial = path.with_name(f"{path.name}{writer}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
