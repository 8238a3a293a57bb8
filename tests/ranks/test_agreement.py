"""One outcome on all ranks, whoever acted and whoever failed."""

import pytest
import torch.distributed as dist

from fullframe.errors import RecipeError
from fullframe.ranks.agreement import (
    first_difference,
    from_all_ranks,
    is_same_on_all,
    on_all_ranks,
    on_any_rank,
    on_any_rank_each,
    on_first_rank,
)
from tests.rank_group import rank_group


def _refused() -> int:
    raise RecipeError("no")


def test_one_process_is_its_own_first_rank() -> None:
    assert on_first_rank(lambda: 3) == 3
    assert on_all_ranks(lambda: 4) == 4
    assert from_all_ranks(5) == [5]
    assert on_any_rank(True) and not on_any_rank(False)
    for agreed in (on_first_rank, on_all_ranks):
        with pytest.raises(RecipeError, match="no"):
            agreed(_refused)


def test_the_first_difference_of_lists_is_found_with_both_sides() -> None:
    assert first_difference([["a", "b"], ["a", "b"], ["a", "c"]]) == ("b", 2, "c")
    assert first_difference([["a"], ["a", "b"]]) == ("nothing", 1, "b"), "one may be shorter"


def _agreed() -> tuple[object, ...]:
    rank = dist.get_rank()
    raised = []
    for agreed, first_to_fail in ((on_first_rank, 0), (on_all_ranks, 1)):
        try:
            agreed(lambda fails=first_to_fail: _refused() if rank == fails else rank)
        except RecipeError as error:
            raised.append(str(error))
    return (
        on_first_rank(lambda: f"by {rank}"),
        on_all_ranks(lambda: rank),
        from_all_ranks(rank * 2),
        on_any_rank(rank == 1),
        on_any_rank(False),
        [on_any_rank_each([rank == 1, False], each) for each in (0, 2**31, 2**32 - 1, 2**31 - 1 + rank)],
        [is_same_on_all(number, dist.group.WORLD) for number in (3, -3, rank)],
        raised,
    )


def test_all_ranks_get_the_result_or_the_error() -> None:
    for rank, found in enumerate(rank_group(2).run(_agreed)):
        each = [([True, False], alike) for alike in (True, True, True, False)]
        assert found == ("by 0", rank, [0, 2], True, False, each, [True, True, False], ["no", "no"])
