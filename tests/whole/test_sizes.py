"""The cases of all families at sizes beside those of `tests/spatial/rules`: equal parts at odd columns, narrow ones."""

from math import prod

import pytest

from tests.rank_group import rank_group
from tests.spatial.cases import MESHES, NARROW, SIZES, TOLERANCE, WORLDS, all_cases, differences_of

OTHERS = ((17, 50), NARROW)


def _at_other_sizes(world: int) -> dict[str, float]:
    meshes = [mesh for mesh in MESHES if prod(mesh) == world]
    sizes = (*OTHERS, SIZES[0]) if world > 2 else OTHERS
    return {
        name: max(error for _, error in differences_of(case, meshes, sizes))
        for name, case in all_cases().items()
        if case.sizes == SIZES
    }


@pytest.mark.further
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world", WORLDS)
def test_every_rule_is_exact_at_other_sizes(world: int) -> None:
    for found in rank_group(world).run(_at_other_sizes, world, timeout_seconds=1700):
        assert len(found) > 200
        assert not {name: error for name, error in found.items() if not error <= TOLERANCE}
