"""A rank that outlives its launcher holds a GPU for nothing: it dies with it, and so does a planner's worker."""

import ctypes
import os
import signal
import sys
from pathlib import Path

LAUNCHER = "FULLFRAME_LAUNCHER"  # where our launcher says its process number
_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Have the kernel kill this process when the launcher (ours or torchrun) dies, of SIGKILL too."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with(os.getppid())
    ours = os.environ.get(LAUNCHER)
    if ours is not None and not Path("/proc", ours).exists() and Path("/proc/self").exists():
        os.kill(os.getpid(), signal.SIGKILL)  # it died before this process had asked who its parent is


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, dies, of SIGKILL too."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
