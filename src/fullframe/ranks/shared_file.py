"""Memory that the processes of one machine share: a file that has a name only until all have mapped it.

What one writes another sees in the order of the program on x86-64 alone: Python has no memory fence.
"""

import contextlib
import mmap
import os
import platform
import tempfile
from pathlib import Path

_FOLDER = Path("/dev/shm")


def can_share_memory() -> bool:
    """Whether this machine's processes can talk through memory."""
    return platform.machine() in ("x86_64", "AMD64") and _FOLDER.is_dir()


def reserve(size: int) -> str | None:
    """A new file with room for everything: to write beyond a full /dev/shm would kill the process. None: no room."""
    _remove_those_of_the_dead()
    try:
        descriptor, name = tempfile.mkstemp(prefix=f"{_family()}{os.getpid()}-{life_of(os.getpid())}-", dir=_FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.unlink(name)
        return None
    finally:
        os.close(descriptor)
    return name


def _family() -> str:
    """How names of files begin whose makers' numbers mean the same processes as here; containers may share a folder."""
    return f"fullframe-{os.stat('/proc/self/ns/pid').st_ino}-"


def _remove_those_of_the_dead() -> None:
    """Files whose maker was killed before all had mapped them: they hold their memory until the machine starts anew."""
    family = _family()
    for path in _FOLDER.glob(f"{family}*-*-*"):
        pid, life, _ = path.name.removeprefix(family).split("-", 2)
        if pid.isdecimal() and life_of(int(pid)) != life:
            with contextlib.suppress(OSError):
                path.unlink()


def mapped(name: str, size: int) -> mmap.mmap | None:
    """The file, if it is of this machine: its random name is nowhere else."""
    try:
        with open(name, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except OSError:
        return None


def life_of(pid: int) -> str | None:
    """When the process was started, by which it is told from a later one; None where there is none, or a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if words[0] in "ZX" else words[19]
    except (OSError, IndexError):
        return None
