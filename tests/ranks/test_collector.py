"""Objects are found, frozen ones too, which stay frozen."""

import gc

from fullframe.ranks.collector import objects_of


class Kind:
    """As nothing else has it."""


def test_frozen_objects_are_found_and_stay_frozen() -> None:
    first = Kind()
    assert objects_of(Kind) == [first] and not gc.get_freeze_count()
    gc.freeze()
    try:
        second = Kind()
        assert {id(each) for each in objects_of(Kind)} == {id(first), id(second)}
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
