"""Files that other processes read while they are written: the old text or the new one, never a part."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def replace_text(path: Path, text: str, writer: str = "") -> None:
    """Write `text` beside `path`, then put it in its place; raises OSError and leaves `path` as it was.

    Where several write at once each has a `writer` of its own.
    """
    _replace(path, writer, lambda partial: partial.write_text(text, encoding="utf-8"))


def replace_end(path: Path, kept_bytes: int, end: bytes) -> None:
    """As `replace_text`: what follows the first bytes of `path`, which may be many and are not read, becomes `end`."""

    def write(partial: Path) -> None:
        shutil.copyfile(path, partial)
        with open(partial, "r+b") as file:
            file.truncate(kept_bytes)
            file.seek(kept_bytes)
            file.write(end)

    _replace(path, "", write)


def _replace(path: Path, writer: str, write: Callable[[Path], object]) -> None:
    partial = path.with_name(f"{path.name}{writer}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
