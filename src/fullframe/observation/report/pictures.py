"""What the recipe drew: the PNG files of the run directory, made small enough to be part of the page."""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fullframe.observation.report.sections import Shown, section

_ALL_BYTES = 3_200_000  # of all pictures on the page, as files; base64 makes 4.3 MB of it
_WIDEST = 1600


def pictures(shown: Sequence[Shown]) -> str:
    """All pictures, each run's in turn; "" where there are none."""
    found = [(one, path) for one in shown for path in one.run.pictures]
    if not found:
        return ""
    room, parts = _ALL_BYTES, []
    for number, (one, path) in enumerate(found):
        of = f"{one.name}: " if len(shown) > 1 else ""
        kind, data, problem = small_enough(path, room // (len(found) - number))
        room -= len(data)
        if problem:
            shown_as = f'<p class="muted">{escape(problem)}</p>'
        else:
            source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
            shown_as = f'<img src="{source}" alt="{escape(path.stem)}">'
        parts.append(f"<figure><figcaption><h3>{escape(of + path.name)}</h3></figcaption>{shown_as}</figure>")
    return section("Pictures", f'<div class="pictures">{"".join(parts)}</div>')


def small_enough(path: Path, most: int) -> tuple[str, bytes, str]:
    """Format, file and problem of a picture of at most `most` bytes: as it is, or smaller where it must be."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return "", b"", f"not readable: {error.strerror}"
    if len(data) <= most:
        return "png", data, ""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        return "", b"", f"{len(data):,} bytes are too many for one page; it can be shown smaller with fullframe[data]"
    try:
        with Image.open(io.BytesIO(data)) as picture:
            flat = picture.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        return "", b"", f"not readable: {error}"
    for width in (_WIDEST, _WIDEST // 2, _WIDEST // 4):
        flat.thumbnail((width, 4 * width))
        written = io.BytesIO()
        flat.save(written, "JPEG", quality=85)
        if written.tell() <= most:
            return "jpeg", written.getvalue(), ""
    return "", b"", f"{len(data):,} bytes are too many for a page with so many pictures"
