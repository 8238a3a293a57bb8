"""All cases of all families at once, on two ranks and one uneven size: the quick look, for `make quick` alone.

The same cases run at two sizes on four meshes in `tests/spatial/rules`, and at more in `tests/whole/test_sizes.py`.
"""

from unittest import mock

import pytest

from fullframe.errors import UnsupportedOp
from fullframe.spatial.rules import points, tables
from tests.rank_group import rank_group
from tests.spatial.cases import TOLERANCE, Case, all_cases, differences_of

# Of maps so large that a rank may hold no more besides its part than that part again; by mesh, height x width.
_SEARCHED = {"masks: what follows: as statistics", "tables: searchsorted in rows split themselves"}
_TWO_DIMS = {"points: by a split index", "scattering: rows of a split source", "scattering: set split values"}
REFUSED_WHEN_LARGE = {(1, 2): _SEARCHED, (2, 2): _SEARCHED | _TWO_DIMS}


def _swept() -> dict[str, float]:
    return {name: _error(case, (1, 2)) for name, case in all_cases().items()}


def _swept_as_if_large(mesh: tuple[int, int]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    with mock.patch.object(points, "FEW", 0), mock.patch.object(tables, "FEW", 0):
        for name, case in all_cases().items():
            try:
                found[name] = _error(case, mesh)
            except UnsupportedOp:
                found[name] = None
    return found


def _error(case: Case, mesh: tuple[int, int]) -> float:
    return max(error for _, error in differences_of(case, [mesh], case.sizes[-1:]))


@pytest.mark.further
@pytest.mark.filterwarnings("ignore")
def test_every_rule_is_exact_on_two_ranks() -> None:
    for found in rank_group(2).run(_swept):
        assert len(found) > 200
        assert not {name: error for name, error in found.items() if not error <= TOLERANCE}


@pytest.mark.further
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh", REFUSED_WHEN_LARGE)
def test_what_is_exact_is_so_on_large_frames(mesh: tuple[int, int]) -> None:
    """Tests' maps are small, and ranks may hold whole what they could not of a large one: as if these were large."""
    for found in rank_group(mesh[0] * mesh[1]).run(_swept_as_if_large, mesh):
        assert not {name: error for name, error in found.items() if error is not None and not error <= TOLERANCE}
        assert {name for name, error in found.items() if error is None} == REFUSED_WHEN_LARGE[mesh]
