"""Sorting and the k largest along split dims: values, global numbers, torch's choice among equals, few bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process, one, raised, small
from tests.spatial.sent import bytes_sent
from tests.spatial.values import as_in_torch, found, on_all_meshes

CASES: dict[str, Case] = {
    "topk": one(lambda x: [*x.topk(3), *x.topk(5, 2, False), *x.topk(2, 1), *torch.topk(x.relu(), k=4, dim=-2)]),
    "all of them": one(lambda x: [*x.topk(x.shape[3]), *x.topk(x.shape[2], 2, sorted=False)]),
    "topk unsorted": one(lambda x: [*x.topk(1, sorted=False), *x.topk(9, sorted=False)]),
    "topk of tokens": small(lambda x: [*x.flatten(2).topk(20), *x.flatten(2).transpose(1, 2).topk(6, dim=1),
                                       *x.flatten(1).topk(30, sorted=False), *x.flatten().topk(7), *x[0].topk(0, 2)]),
    "sort": one(lambda x: [*x.sort(), *x.sort(2, True), *x.sort(dim=3, stable=True), x.argsort(2), x[0, 0].msort()]),
    "sort of tokens": small(lambda x: [*x.flatten(2).sort(), *x.flatten().sort(), x.flatten(1).argsort(1, True)]),
    "sorted again": small(lambda x: (x.sort(3).values * x).topk(2, 2).values.sin()),
    "uneven parts": small(lambda x: [*x[0, 0, 4:].flatten().sort(), *x[0, 0, :, :5].sort(), *x[..., :4].topk(2),
                                     *x[:, :, 3:].topk(2, 2), *x[..., :1].sort(), *x[..., 3:].flatten(2).topk(5)]),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "along whole dims": lambda x: [*x.sort(1), *torch.sort(x, dim=1, stable=True), *x.sort(1, True), x.argsort(1),
                                   *x.sort(descending=True, dim=0, stable=True), *x.topk(2, 1),
                                   torch.argsort(x, stable=True, dim=1), x.msort()],
    "sort": lambda x: [*x.sort(), *x.sort(2, True), *x.sort(dim=3, stable=True), x.argsort(3), x.msort(),
                       *x.flatten(2).sort(), *x.flatten().sort(descending=True)],
    "topk": lambda x: [*x.topk(1), *x.topk(3), *x.topk(4, 2, False), *x.topk(7), *x.topk(5, sorted=False),
                       *x.flatten(2).topk(9), *x.flatten().topk(3, largest=False)],
}  # fmt: skip
HALVES: dict[str, Op] = {
    "order": lambda x: [*x.topk(5), *x.topk(120, sorted=False), *x.sort(), *x.sort(2, descending=True),
                        *x.flatten(2).topk(40), *x.flatten().sort()],
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
test_unusual_values_and_dtypes_as_in_torch = as_in_torch(__name__, OVER_FLOATS, HALVES)


def _equal_numbers(world: int) -> list[str]:
    """Rows of few different numbers, of all dtypes, long enough for each of torch's ways."""
    cases: dict[str, tuple[Op, list[Tensor], list[Tensor]]] = {}
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16):
        x = torch.randint(0, 5, (2, 1, 3, 1501), generator=generator).to(dtype)
        cases[f"topk {dtype}"] = (_many_topk, [x], [])
        cases[f"sort {dtype}"] = (_many_sorts, [x], [])
    cases["sort bool"] = (_many_sorts, [x > 2], [])
    cases["one long row"] = (lambda x: [*x.flatten().sort(), x.flatten().argsort(stable=True)],
                             [torch.randint(0, 9, (1, 1, 90, 500), generator=generator)], [])  # fmt: skip
    return found(cases, 0.0, world)


def _many_topk(x: Tensor) -> list[Tensor]:
    x = x.detach()
    return [t for k in (1, 7, 400) for largest in (True, False) for sorted_ in (True, False)
            for t in (*x.topk(k, 3, largest, sorted_), *x.flatten(2).topk(k, 2, largest, sorted_))]  # fmt: skip


def _many_sorts(x: Tensor) -> list[Tensor]:
    x = x.detach()
    return [t for descending in (True, False) for stable in (True, False)
            for t in (*torch.sort(x, dim=3, descending=descending, stable=stable),
                      *torch.sort(x.flatten(2), dim=2, descending=descending, stable=stable))]  # fmt: skip


def test_among_equal_numbers_the_choice_is_torchs() -> None:
    assert not on_all_meshes(_equal_numbers)


def queries(scores: Tensor, tokens: Tensor) -> list[Tensor]:
    """Where a two-stage detector's queries stand: the best tokens of (N, C, H, W) by their best class."""
    flat = scores.flatten(2).transpose(1, 2)
    return [*torch.topk(flat.max(-1).values, 30, dim=1), (tokens * scores).flatten(2).sum(2)]


@pytest.mark.parametrize("op", ["tokens", "columns"])
def test_the_k_largest_send_their_candidates_alone(op: str) -> None:
    for sent in rank_group(2).run(_sent, op, False):
        heads = 4 * 256
        assert sent[0] <= 2 * 301 * 16 + heads, "values and numbers of 2 rows"
        assert sent[1] <= 2 * 300 * 8 + heads, "the gradients of the values"


def _by_gloo() -> list[int]:
    """Bytes of a sort by messages that no mailbox takes, of dtypes that gloo's reductions do not know."""
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)) * 9
    kinds = (torch.int16, torch.bool, torch.uint8, torch.bfloat16)
    return [bytes_sent(lambda x: x.sort(-1).values, x.to(kind))[0] for kind in kinds]


def test_all_dtypes_are_sent() -> None:
    for sent in rank_group(2).run(_by_gloo):
        assert all(0 < one < 4000 for one in sent)


def test_where_equal_values_decide_each_rank_sends_a_part_of_its_part() -> None:
    for sent in rank_group(2).run(_sent, "columns", True):
        assert sent[0] <= (2 * 10_000 // 2) * 8 + 2 * 301 * 16 + 2 * 300 * 16 + 12 * 256


def _sent(op: str, ties: bool) -> tuple[int, int]:
    x = torch.randn(2, 100, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x.round() if ties else x
    if op == "columns":
        return bytes_sent(lambda x: x.topk(300).values, x.flatten(1))
    return bytes_sent(lambda x: x.flatten(1).topk(300).values, x)


def _queries(world: int) -> list[str]:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(2, 4, 13, 19, generator=generator, dtype=torch.float64)
    tokens = torch.randn(2, 1, 13, 19, generator=generator, dtype=torch.float64)
    return found({"queries": (queries, [scores, tokens], [])}, 1e-12, world)


def test_a_two_stage_detector_picks_its_queries_from_split_tokens() -> None:
    assert not on_all_meshes(_queries)


def _refusals(x: Any = None) -> list[str]:
    x = ff.shard(torch.ones(2, 3, 6, 8), mesh(1, 2)) if x is None else x
    return raised((lambda: x.topk(9), lambda: x.topk(1, 4), lambda: (x > 0).topk(2), lambda: x.sort(5)))


def test_what_torch_refuses_is_refused_on_all_ranks() -> None:
    """By errors of torch's kinds; torch 2.11's meta function, which is asked, has an assertion for one of them."""
    plain, meta = _refusals(torch.ones(2, 3, 6, 8)), _refusals(torch.ones(2, 3, 6, 8, device="meta"))
    expected = ["RuntimeError" if asked == "AssertionError" else kind for kind, asked in zip(plain, meta, strict=True)]
    assert "nothing" not in expected
    assert rank_group(2).run(_refusals) == [expected] * 2
