"""Files that other processes read while they are written: the old text or the new one, never a part."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `text` beside `path`, then put it in its place; raises OSError and leaves `path` as it was."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)
