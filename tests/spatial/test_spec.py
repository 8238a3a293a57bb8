"""What all ranks know of a split tensor."""

import numpy
import pytest

from fullframe.spatial.rules.registry import Merged
from fullframe.spatial.spec import spec_of
from tests.spatial.fake import on_height, on_width, spatial, spec


def test_equal_facts_are_one_object_in_plain_integers() -> None:
    with spatial(1, 2) as on:
        first = spec(on, (2, 9), on_width((0, 5, 9), 1))
        second = spec_of(on, (numpy.int64(2), numpy.int64(9)), (on_width((0, 5, 9), 1),), False, None)
        assert first is second and {type(n) for n in second.shape} == {int}
        assert first.with_((2, 9), first.placements) is first is first.strided(None)
        assert first.strided((9, 1)) is not first and first.strided((9, 1)) is first.strided((9, 1))
        assert spec_of(on, (2, 9), first.placements, True, None).with_((9,), ()).gather


def test_rows_and_coordinates_of_this_rank() -> None:
    with spatial(2, 3, rank=5) as on:  # the last row of ranks, the last column
        here = spec(on, (4, 9), on_height((0, 1, 4), 0), on_width((0, 2, 5, 9), 1))
        assert [here.rows(p) for p in here.placements] == [range(1, 4), range(5, 9)]
        assert here.coordinates == {"height": 1, "width": 2, "height and width": 5}


def test_a_merged_dim_has_no_rows() -> None:
    with spatial(1, 2) as on:
        merged = spec(on, (2, 36), on_width((0, 5, 9), 1, outer=4))
        assert merged.of(0) is None and merged.of(-2) is None and merged.is_split(-1) and not merged.is_split(0)
        with pytest.raises(Merged, match="dim 1 is merged") as caught:
            merged.require_plain((0, -1))
        assert caught.value.spec is merged and caught.value.dim == 1


def test_the_strides_of_a_pointwise_result() -> None:
    with spatial(1, 2) as on:
        plain = spec(on, (2, 3, 4), on_width((0, 2, 4), 2))
        assert plain.elementwise is plain and plain.facts == ((2, 3, 4), None)
        assert plain.strided((24, 1, 6)).elementwise.strides == (12, 1, 3)  # the order stays, the gaps go
        assert plain.strided((24, 8, 2)).elementwise.strides is None
