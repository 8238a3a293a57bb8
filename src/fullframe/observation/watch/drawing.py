"""What a terminal can draw: bars of several colours, a curve in dots, rules; in ASCII where it knows no more."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from fullframe.observation.kinds import name_of

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: column, then row
COLOURS = {
    "parameter": "blue", "gradient": "magenta", "optimizer": "cyan", "activation": "dark_orange",
    "temporary": "yellow", "communication": "hot_pink", "cached": "grey50", "batch": "green",
    "workspace": "red", "average": "purple",
    "data": "yellow", "forward": "blue", "exchange": "hot_pink", "backward": "magenta", "all_reduce": "red",
}  # fmt: skip

_SHORT = {
    "parameter": "param", "gradient": "grad", "optimizer": "optim", "activation": "activ", "temporary": "temp",
    "communication": "comm", "forward": "fwd", "backward": "bwd", "exchange": "exch",
}  # fmt: skip
_LETTERS = {"cached": "k", "average": "m"}  # the others have different first letters


class Glyphs(NamedTuple):
    """The characters to draw with; without colours the parts of a bar are told apart by letters."""

    full: str = "█"
    empty: str = "░"
    rule: str = "─"
    mark: str = "│"
    dot: str = "●"
    key: str = "■"
    has_curves: bool = True
    has_colours: bool = True


ASCII = Glyphs("#", ".", "-", "|", "*", "", has_curves=False)


def colour_of(kind: str) -> str:
    """The colour of a category of memory or a kind of seconds."""
    return COLOURS.get(kind, "grey70")


def bar(parts: Sequence[tuple[str, float]], full: float, width: int, glyphs: Glyphs, mark: float | None = None) -> Text:
    """Parts (kind, value) beside each other, `full` being the whole width, and a mark at one value."""
    text, used, reached = Text(), 0, 0.0
    for kind, value in parts:
        reached += value
        until = min(round(width * reached / full), width) if full > 0 else 0
        letter = glyphs.full if glyphs.has_colours else letter_of(kind)
        text.append(letter * max(until - used, 0), colour_of(kind))
        used = max(until, used)
    text.append(glyphs.empty * (width - used), "grey35")
    if mark is not None and full > 0:
        place = min(round(width * mark / full), width - 1)
        text = text[:place] + Text(glyphs.mark, "bold white") + text[place + 1 :]
    return text


def keys(kinds: Sequence[tuple[str, str]], width: int, glyphs: Glyphs) -> Text:
    """What the colours mean: (kind, value), with values and whole names as far as there is room."""
    wordings = (
        [(kind, f"{name_of(kind)} {value}") for kind, value in kinds],
        [(kind, f"{_SHORT.get(kind, name_of(kind))} {value}") for kind, value in kinds],
        [(kind, _SHORT.get(kind, name_of(kind))) for kind, _ in kinds],
    )
    texts = [_keys(wording, glyphs) for wording in wordings]
    return next((text for text in texts if len(text) <= width), texts[-1])


def _keys(words: Sequence[tuple[str, str]], glyphs: Glyphs) -> Text:
    pieces = []
    for kind, word in words:
        sign = f"{glyphs.key} " if glyphs.has_colours and glyphs.key else f"{letter_of(kind)} "
        pieces.append(Text(sign, colour_of(kind)) + Text(word))
    return Text("  ").join(pieces)


def letter_of(kind: str) -> str:
    """What a kind is drawn with where there are no colours."""
    return _LETTERS.get(kind, kind[:1])


def rule(title: str, width: int, glyphs: Glyphs) -> Text:
    """A line with a title in it."""
    return Text(f"{glyphs.rule} ", "grey50") + Text(title, "bold") + Text(f" {glyphs.rule * width}", "grey50")


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve in `height` lines of `width` braille characters, from the least value to the largest."""
    known = [value for value in values if math.isfinite(value)]
    if not known or width < 1 or height < 1:
        return []
    low, high = min(known), max(known)
    columns, rows = 2 * width, 4 * height
    if len(known) == len(values) < columns:  # a line between them, not steps
        places = np.linspace(0, len(values) - 1, columns)
        values = np.interp(places, range(len(values)), values).tolist()
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column in range(columns):
        part = values[column * len(values) // columns : max((column + 1) * len(values) // columns,
                                                            column * len(values) // columns + 1)]  # fmt: skip
        found = [value for value in part if math.isfinite(value)]
        if not found:
            before = None
            continue
        place = round((sum(found) / len(found) - low) / (high - low or 1.0) * (rows - 1))
        first, last = (place, place) if before is None else sorted((before, place))
        for row in range(first, last + 1):  # joined with the column before
            cells[height - 1 - row // 4][column // 2] |= _DOTS[column % 2][3 - row % 4]
        before = place
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]
