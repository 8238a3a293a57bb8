"""All cases of all families at once, on two ranks and one uneven size: the quick look, for `make quick` alone.

The same cases run at two sizes on four meshes in `tests/spatial/rules`, and at more in `tests/whole/test_sizes.py`.
"""

import pytest

from tests.rank_group import rank_group
from tests.spatial.cases import TOLERANCE, all_cases, differences_of


def _swept() -> dict[str, float]:
    return {
        name: max(error for _, error in differences_of(case, [(1, 2)], case.sizes[-1:]))
        for name, case in all_cases().items()
    }


@pytest.mark.further
@pytest.mark.filterwarnings("ignore")
def test_every_rule_is_exact_on_two_ranks() -> None:
    for found in rank_group(2).run(_swept):
        assert len(found) > 200
        assert not {name: error for name, error in found.items() if not error <= TOLERANCE}
