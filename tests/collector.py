"""What only Python's garbage collector would free."""

import gc
from collections.abc import Callable

from torch import Tensor


def tensors_for_the_collector(work: Callable[[], object]) -> int:
    """How many tensors a second call of `work` leaves in cycles of references.

    The first call is for what torch imports then, which keeps frames; what was there before the second is not looked
    at, whoever lets go of it meanwhile.
    """
    work()
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        return sum(isinstance(left, Tensor) for left in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        if not was_frozen:
            gc.unfreeze()
