"""Counts, amounts, lists of names and errors in sentences, and their beginning."""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from types import FunctionType
from typing import Any

GIB, MIB = 2**30, 2**20
SHOWN = (int, float, str, bool, type(None))  # whose values are short enough for a sentence


def amount(bytes: float) -> str:
    """As printed: 12.3 GiB, 53 MiB."""
    return f"{bytes / GIB:.1f} GiB" if bytes >= GIB else f"{bytes / MIB:.0f} MiB"


def figure(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def plural(number: int, noun: str) -> str:
    """'1 rank', '2 ranks', '3 batches', '1,024 strategies'."""
    return f"{number:,} {noun if number == 1 else _many(noun)}"


def _many(noun: str) -> str:
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith(("ch", "ss")) else "s")


def numbered(noun: str, numbers: Collection[int]) -> str:
    """'rank 1', 'ranks 0, 2'."""
    return f"{noun if len(numbers) == 1 else _many(noun)} {', '.join(map(str, sorted(numbers)))}"


def some(names: Iterable[str], most: int = 3) -> str:
    """'a, b, c and 4 more'."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def first_of(names: Collection[str], most: int = 3) -> str:
    """'a, b, c, ...', for a sentence that says how many there are, or need not."""
    return ", ".join(list(names)[:most]) + (", ..." if len(names) > most else "")


def inside(path: str, name: str) -> str:
    """The full name of what is called `name` inside of the module at `path`, which is "" for the model."""
    return f"{path}.{name}" if path else name


def capital(sentence: str) -> str:
    """With a capital at its beginning, unless a name of a program stands there (`torch.load`); the rest as it is."""
    first = sentence.partition(" ")[0]
    return sentence if re.search(r"\w[._=]\w|\(|\d", first) else sentence[:1].upper() + sentence[1:]


def first_line(error: BaseException) -> str:
    """What an error says, to go on with in a sentence: its first line without a full stop, or its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def in_one_line(text: str) -> str:
    """As a line of a table takes it: what ends a line, or steers a terminal, as Python writes it ('\\n')."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def in_json(value: Any) -> str:
    """One line; a number that is not finite is null, which JSON knows."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def described(value: object) -> str:
    """What was given in place of something else: 'the class Conv2d', "'4'", 'a Tensor of shape (3, 4)'."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return repr(value) if isinstance(value, SHOWN) else indefinite(type(value).__name__) + of_shape


def indefinite(noun: str) -> str:
    """'a Tensor', 'an ndarray'."""
    return f"{'an' if noun[:1] in 'aeiouAEIO' or noun.startswith('nd') else 'a'} {noun}"
