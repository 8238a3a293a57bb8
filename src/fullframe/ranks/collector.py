"""Python's garbage collector asked for objects."""

import gc
from typing import Any


def objects_of(kind: type) -> list[Any]:
    """All objects of exactly this kind that the collector knows, also those that a user has frozen, before a fork say.

    To go through all takes some 50 ms where torch and transformers are loaded.
    """
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        return [each for each in gc.get_objects() if type(each) is kind]
    finally:
        if is_frozen:
            gc.freeze()
