"""Ranks that draw from different random states say so after the forward pass; what they do not draw from may differ."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.errors import DivergenceError
from fullframe.model.same.program import Agreement
from fullframe.ranks.mesh import init_mesh, spatial_of
from tests.rank_group import _forget_meshes, rank_group


def _drawn_apart(draws: bool, split: bool) -> str:
    agreement = Agreement(spatial_of(init_mesh(width=2)))
    torch.manual_seed(dist.get_rank())
    agreement.before_forward(split)
    if draws:
        torch.rand(())
    try:
        agreement.after_forward([])
    except DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("draws", "split"), [(True, True), (False, True), (True, False)])
def test_a_state_that_was_drawn_from_must_be_equal(draws: bool, split: bool) -> None:
    for said in rank_group(2).run(_drawn_apart, draws, split):
        assert ("drew random numbers from torch, whose state differs over ranks [0, 1]" in said) == (draws and split)


def _told_of_draws_between(apart: bool) -> list[str]:
    agreement = Agreement(spatial_of(init_mesh(width=2)))
    torch.manual_seed(dist.get_rank() if apart else 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):  # told once
            torch.rand(())
            agreement.before_forward(True)
            agreement.after_forward([])
    return [str(warning.message) for warning in said]


@pytest.mark.parametrize("apart", [True, False])
def test_draws_between_forward_passes_are_told_where_they_differ(apart: bool) -> None:
    first, second = rank_group(2).run(_told_of_draws_between, apart)
    assert len(first) == apart and not second
    assert all("drawn from torch, whose state differs over ranks [0, 1]" in text for text in first)


def _met() -> list[int]:
    """How often the ranks meet in two backward passes through two results."""
    agreement = Agreement(spatial_of(init_mesh(width=2)))
    channel, kinds = agreement._spatial.channel, []  # type: ignore[union-attr]
    agree = type(channel).agree
    type(channel).agree = lambda self, kind, *rest: (kinds.append(kind), agree(self, kind, *rest))[1]  # type: ignore[method-assign]
    try:
        for _ in range(2):
            agreement.before_forward(True)
            results = [torch.ones(2, requires_grad=True) * n for n in (1, 2)]
            agreement.after_forward(results)
            sum(results).sum().backward()  # type: ignore[union-attr]
    finally:
        type(channel).agree = agree  # type: ignore[method-assign]
    return [kinds.count("backward")]


def test_the_ranks_meet_once_a_backward_pass() -> None:
    assert rank_group(2).run(_met) == [[2], [2]]


def _one_more_on_rank_1() -> str:
    mesh = init_mesh(width=2)
    model = ff.parallelize(torch.nn.Conv2d(2, 2, 3, padding=1), mesh)
    image = ff.shard(torch.ones(1, 2, 5, 7), mesh)
    try:
        model(image).mean().backward()
        if dist.get_rank() == 1:
            with torch.no_grad():
                model(image)
        model(image).mean().backward()
    except DivergenceError as error:
        return str(error)
    return ""


def test_a_pass_of_one_rank_alone_is_told_where_ddp_makes_its_buckets() -> None:
    for said in rank_group(2).run(_one_more_on_rank_1):
        assert "rank 0 is at: forward, " in said and "rank 1 is at: rows " in said
    rank_group(2).run(_forget_meshes)


def test_a_copy_is_on_no_mesh_and_checks_nothing() -> None:
    for made in (Agreement(None), copy.deepcopy(Agreement(None)), pickle.loads(pickle.dumps(Agreement(None)))):
        made.before_forward(True)
        made.after_forward([torch.ones(1, requires_grad=True)])
