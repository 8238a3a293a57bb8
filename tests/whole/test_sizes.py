"""The cases of all families at other sizes and on more ranks than in `tests/spatial/rules`.

Equal parts at odd columns, narrow maps; on eight ranks a window reaches over several of them, and some have nothing.
"""

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


def _on_eight_ranks() -> dict[str, float]:
    """Of every second case, for eight ranks take long on two cores."""
    found = {}
    for name, case in all_cases(2).items():
        volume = any(len(lead) == 3 for lead in case.split)
        meshes = [(2, 4), *([(2, 2, 2)] if volume else [])]
        found[name] = max(error for _, error in differences_of(case, meshes, [case.smallest]))
    return found


@pytest.mark.further
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_rules_are_exact_on_eight_ranks() -> None:
    for found in rank_group(8).run(_on_eight_ranks, timeout_seconds=800):
        assert len(found) > 150
        assert not {name: error for name, error in found.items() if not error <= TOLERANCE}
