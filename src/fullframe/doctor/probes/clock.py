"""A clock for shares of a step: of a busy machine it leaves out the time in which others had the cores."""

import time

from fullframe.processes.cores import seconds_without_core


def seconds() -> float:
    """Seconds since some moment, without those in which the main thread stood ready and got no core."""
    return time.perf_counter() - seconds_without_core()
