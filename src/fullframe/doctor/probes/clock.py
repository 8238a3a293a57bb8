"""A clock for shares of a step: of a busy machine it leaves out the time in which others had the cores."""

import time
from pathlib import Path

# Of the main thread, in nanoseconds: run, and ready to run without a core. Not every kernel keeps it.
_SCHEDULED = Path("/proc/self/schedstat")


def seconds() -> float:
    """Seconds since some moment, without those in which the main thread stood ready and got no core."""
    try:
        stood = int(_SCHEDULED.read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        stood = 0
    return time.perf_counter() - stood / 1e9
