"""What a message is, in words that both its ends can compare: the exchange, dtype, shape and line of the program.

Ranks that run one program make equal heads. So where they run apart, the first message says so, instead of being read
as another one.
"""

import os
import sys
import warnings
import zlib
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEAD_BYTES = 256

_INSIDE = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
    "<frozen",
    "<eval_with_key",
)
_STANDARD = str(Path(os.__file__).parent) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_MOST_KEPT = 20_000

_OPERATION = "__torch_function__"  # of a split tensor: its frame holds the op and its operands

# By identity, as to compare code objects takes longer; they are kept, so that no other gets the same.
_files: dict[int, tuple[CodeType, str, bool]] = {}
_lines: dict[tuple[Any, ...], str] = {}
_generated: set[str] = set()  # folders of code that torch has written
_heads: dict[tuple[Any, ...], bytes] = {}


def line(with_op: bool = True) -> str:
    """Where the program is, as `folder/train.py:31, mean of (2, 3, 6, 8)`.

    That is the innermost line of Python that belongs neither to fullframe nor to torch (in backward the line that
    called it), and, `with_op`, the op on split tensors that it runs, with their global shapes.
    """
    frame = sys._getframe(1)
    op: tuple[Any, ...] = ()
    while True:
        code = frame.f_code
        known = _files.get(id(code)) or _kept(code)
        if known[1]:
            return _lines.get((id(code), frame.f_lasti, *op)) or _named(frame, known[1], op)
        if known[2] and with_op and not op:
            op = _operation(frame)
        outer = frame.f_back
        if outer is None:
            return _named(frame, code.co_filename, op)
        frame = outer


def is_a_rules_own() -> bool:
    """Whether the op on split tensors that runs was called for another one, and not by the program."""
    frame, operations = sys._getframe(1).f_back, 0
    while frame is not None and not (known := _files.get(id(frame.f_code)) or _kept(frame.f_code))[1]:
        operations, frame = operations + known[2], frame.f_back
    return operations > 1


def warn(text: str) -> None:
    """A warning of the line that `line` names."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not (_files.get(id(frame.f_code)) or _kept(frame.f_code))[1]:
        frame = frame.f_back
    said = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=said)


def line_of(trace: TracebackType | None) -> str:
    """Where an error was raised, by its traceback: likewise the innermost line of the program's own."""
    found = "?"
    for frame, number in walk_tb(trace):
        file = (_files.get(id(frame.f_code)) or _kept(frame.f_code))[1]
        found = f"{file or frame.f_code.co_filename}:{number}" if file or found == "?" else found
    return found


def count_as_inside(folder: str) -> None:
    """Code in this folder is written by torch: from now on its lines are none of the program's."""
    _generated.add(folder.rstrip(os.sep) + os.sep)


def _kept(code: CodeType) -> tuple[CodeType, str, bool]:
    """The code, its file ("" inside fullframe, torch or the standard library), and whether it runs an op."""
    name = code.co_filename
    inside = name.startswith(_INSIDE) or name.startswith(tuple(_generated))
    inside |= name.startswith(_STANDARD) and not any(folder in name for folder in _INSTALLED)
    if len(_files) > _MOST_KEPT:
        _files.clear()
        _lines.clear()
    file = "" if inside else "/".join(Path(name).parts[-2:])
    is_ours = name.startswith(_INSIDE[1])  # torch's modes, as of a default device, have methods of that name too
    known = _files[id(code)] = code, file, is_ours and code.co_name == _OPERATION
    return known


def _operation(frame: FrameType) -> tuple[Any, ...]:
    """The op, and the global shapes of its split operands."""
    held = frame.f_locals
    operands: list[Any] = []
    for value in held.get("args", ()):
        operands += value if isinstance(value, (list, tuple)) else [value]
    specs = (getattr(value, "spec", None) for value in operands)
    return held.get("func"), *(spec.shape for spec in specs if spec is not None)


def _named(frame: FrameType, file: str, op: tuple[Any, ...]) -> str:
    text = f"{file}:{frame.f_lineno}"
    if op:
        name = getattr(op[0], "__name__", None) or getattr(op[0], "name", None) or type(op[0]).__name__
        text += f", {name} of {', '.join(map(str, op[1:])) or 'no split operand'}"
    if len(_lines) > _MOST_KEPT:
        _lines.clear()
    _lines[(id(frame.f_code), frame.f_lasti, *op)] = text
    return text


def head_of(kind: str, at: str, like: Tensor, errors: int = 0, rows: "Rows | None" = None) -> bytes:
    """The head of a message of the shape and dtype of `like`, `HEAD_BYTES` long.

    `kind` is the exchange it belongs to, `at` the line, `errors` how many errors its rank has announced before, `rows`
    what it holds of a split dim.
    """
    key = kind, at, like.dtype, like.shape, errors, rows
    head = _heads.get(key)
    if head is None:
        which = f" {rows.start}:{rows.stop} of {rows.size}" if rows else ""
        text = f"{kind}{which}, {str(like.dtype).removeprefix('torch.')} {tuple(like.shape)}, at {at}"
        if errors:
            text += f", after {errors} {'errors' if errors > 1 else 'error'}"
        if len(_heads) > _MOST_KEPT:
            _heads.clear()
        head = _heads[key] = padded(text, HEAD_BYTES)
    return head


class Rows(NamedTuple):
    """Rows of a split dim, counted in the whole tensor, of `size` rows in all."""

    start: int
    stop: int
    size: int


def padded(text: str, size: int) -> bytes:
    """`text` in `size` bytes; where it is longer, its middle gives way to a checksum."""
    raw = text.encode()
    if len(raw) > size:
        half = size // 2 - 8
        raw = raw[:half] + b"[...%08x]" % zlib.crc32(raw) + raw[len(raw) - half :]
    return raw.ljust(size, b"\0")


def text_of(raw: bytes) -> str:
    """What `padded` was given."""
    return raw.rstrip(b"\0").decode(errors="replace")
