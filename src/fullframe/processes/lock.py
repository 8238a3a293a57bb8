"""One process at a time: a lock on a file, which the kernel takes back when its process ends, however it ends.

A record lock (POSIX): children that were forked do not hold it, and NFS passes it on to other machines. Where a file
system has none, nobody is kept out.
"""

import errno
import fcntl
import os
from pathlib import Path

_HELD = (errno.EACCES, errno.EAGAIN)


class ProcessLock:
    """The lock at `path`, which is made; raises OSError where it cannot be.

    `is_held` says whether another process had it. A process must not ask twice for one file: closing it gives back
    what the process holds of it.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.is_held = False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.is_held = error.errno in _HELD

    def release(self) -> None:
        """Let others have it; done twice it does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def is_held(path: Path) -> bool:
    """Whether another process holds the lock at `path`."""
    if not path.exists():
        return False
    try:
        lock = ProcessLock(path)
    except OSError:
        return False
    lock.release()
    return lock.is_held
