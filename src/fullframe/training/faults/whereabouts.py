"""Where a rank is, by the stacks of its threads: what it runs, and whether it waits for other ranks.

On GPUs the host waits for other ranks where it reads a number of the device, whose work waits for a message.
"""

import ast
import linecache
import os
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType

import torch

from fullframe.ranks import device
from fullframe.ranks.waiting import waits
from fullframe.spatial.module_path import module_path

_TORCH, _PACKAGE = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])
# Our own code says where it waits (`waiting_for_ranks`); of torch's we know the modules.
_WAITING = ("torch.distributed", "torch.autograd", "torch.nn.parallel")
_LIBRARY = (f"{_TORCH}/", f"{_PACKAGE}/", f"{Path(os.__file__).parent}/", "<")
_COMPILERS = {"torch._dynamo.convert_frame", "torch._inductor.compile_fx"}  # on the stack while they compile
_READERS = {"item", "tolist", "cpu", "numpy", "to", "synchronize", "nonzero", "copy_", "float", "int", "bool", "print"}


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread; None where it has ended."""
    return _frames().get(thread)


def is_compiling() -> bool:
    """Whether a thread compiles a graph or a kernel."""
    frames = _frames().values()
    return any(_module(frame) in _COMPILERS for innermost in frames for frame in _outwards(innermost))


def _frames() -> dict[int, FrameType]:
    """The innermost frames of all threads; of this one that of the caller's caller.

    With its own among them a frame that holds them holds itself, and what all threads compute lives until Python
    collects: in a training step the activations.
    """
    frames, own = sys._current_frames(), threading.get_ident()
    if frames.get(own) is sys._getframe():
        frames[own] = sys._getframe(2)
    return frames


def where(frame: FrameType | None) -> str:
    """The innermost line of the user's own code, else the innermost line; with the module whose forward runs."""
    if frame is None:
        return "nowhere"
    frames = list(_outwards(frame))
    chosen = next((one for one in frames if not one.f_code.co_filename.startswith(_LIBRARY)), frames[0])
    where = f"{chosen.f_code.co_filename}, line {chosen.f_lineno}, in {chosen.f_code.co_name}"
    module = module_path(frame)
    return f"{where}, module {module}" if module else where


def waits_for_ranks(thread: int, frame: FrameType | None) -> bool:
    """Whether a thread waits for other ranks: it says so, is in a module of torch's that waits, or reads the device."""
    if waits(thread) or (device.is_in_use() and reads_a_tensor(frame)):
        return True
    # What the standard library does, it does for whoever called it.
    modules = map(_module, _outwards(frame))
    module = next((name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names), "")
    return f"{module}.".startswith(tuple(f"{name}." for name in _WAITING))


def reads_a_tensor(frame: FrameType | None) -> bool:
    """Whether a frame is in the middle of a call, by its name, that brings numbers from the device to the host."""
    if frame is None or frame.f_lasti < 0:
        return False
    place = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line, last, column, end = place
    if line is None or last is None or column is None or end is None:
        return False
    lines = [linecache.getline(frame.f_code.co_filename, number).encode() for number in range(line, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][column:]
    try:
        call = ast.parse(b"".join(lines).strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return False
    called = call.func if isinstance(call, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in _READERS


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
