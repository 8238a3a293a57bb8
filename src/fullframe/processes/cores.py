"""How long threads of this process stood ready to run while others had the cores, as the kernel counts it."""

import os
from contextlib import suppress
from pathlib import Path

from fullframe.wording import plural

_THREADS = Path("/proc/self/task")
_MAIN = Path("/proc/self/schedstat")  # nanoseconds: run, and ready to run without a core. Not every kernel keeps it
_BACKWARD = "pt_autograd_"  # and the number of a GPU: the names of torch's threads
_NOTABLE = 0.1  # of a step


def seconds_without_core(*threads: int) -> float:
    """So far, of the main thread and `threads`; 0.0 where the kernel does not say."""
    stood = 0
    for account in (_MAIN, *(_THREADS / str(thread) / "schedstat" for thread in threads)):
        with suppress(OSError, ValueError, IndexError):
            stood += int(account.read_bytes().split()[1])
    return stood / 1e9


def backward_threads() -> tuple[int, ...]:
    """The thread in which torch runs backward on this rank's GPU, once it has; none on a CPU, where the main one does.

    Torch starts one for each GPU that it sees: it is the one that has run longest.
    """
    ran = {}
    with suppress(OSError):
        for thread in _THREADS.iterdir():
            with suppress(OSError, ValueError, IndexError):
                if (thread / "comm").read_text().startswith(_BACKWARD):
                    ran[int(thread.name)] = int((thread / "schedstat").read_bytes().split()[0])
    return (max(ran, key=lambda thread: ran[thread]),) if ran else ()


def too_few(ranks: int) -> str:
    """What to say where this process and `ranks` like it, of one machine, have fewer cores; "" where they have not."""
    cores = len(os.sched_getaffinity(0))
    if cores >= ranks:
        return ""
    return (
        f"the {ranks} ranks of this machine have {plural(cores, 'core')} between them and wait for each other; ask for "
        "more (Slurm: --cpus-per-task, fullframe launch: --cpus-per-node)"
    )


def apart(seconds: float, stood: float) -> tuple[float, float]:
    """A step's `seconds` without those in which it `stood` without a core, and those: where they are worth saying."""
    stood = min(stood, seconds / 2) if stood > _NOTABLE * seconds else 0.0
    return seconds - stood, stood
