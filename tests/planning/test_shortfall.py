"""Which changes are thought of where nothing fits, and what is said of them; by simulations in test_plan."""

import dataclasses

import pytest
import torch
from torch import nn

from fullframe.planning.search import Search
from fullframe.planning.shortfall import (
    Advice,
    Shortfall,
    _larger,
    _largest_convolutions,
    _more_gpus,
    sentences,
    separable,
    shortfall,
)
from fullframe.recipe import Recipe
from fullframe.simulation.devices.table import Cluster, parse_cluster
from fullframe.simulation.prediction import Prediction
from fullframe.strategy import Strategy
from tests.planning.test_candidates import GIB, job, prediction


@pytest.mark.parametrize(
    ("cluster", "larger"),
    [  # a node is filled up to 8, then there are more nodes
        ("1xT4", ["2xT4", "4xT4", "8xT4"]),
        ("3xT4", ["6xT4", "2x6xT4", "4x6xT4"]),
        ("2x4xT4", ["2x8xT4", "4x8xT4", "8x8xT4"]),
        ("16xT4", ["2x16xT4", "4x16xT4", "8x16xT4"]),
    ],
)
def test_larger_clusters(cluster: str, larger: list[str]) -> None:
    assert [_larger(parse_cluster(cluster), times).name for times in (2, 4, 8)] == larger


def test_of_more_gpus_stages_are_thought_of_too() -> None:
    # One frame of 16 rows, which no split cuts, by a model of eight parts whose activations alone do not fit.
    asked = dataclasses.replace(job("1xT4", 1, rows=16, columns=16), ranks=1, parts=8)
    large = prediction(parameter=GIB // 8, activation=64 * GIB)
    search = Search(job=asked, limit_bytes=15 * GIB, known={Strategy(): large})
    found = [(cluster.name, strategy.stages) for _, _, strategy, cluster in _more_gpus(None, search)]  # type: ignore[arg-type]
    assert found == [("4xT4", 4), ("8xT4", 8)]  # two keep no less than recompute on one


def test_a_batch_of_fewer_is_named_with_what_it_saves() -> None:
    asked = job("1xT4", 4)
    search = Search(job=asked, limit_bytes=15 * GIB, known={Strategy(): prediction(activation=20 * GIB)})

    def simulate(recipe: Recipe, strategy: Strategy, cluster: Cluster) -> Prediction:
        return prediction(activation=5 * recipe.batch_size * GIB)

    recipe = Recipe(
        model=nn.Identity,
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters),
        data=list,
        batch_size=4,
    )
    found = shortfall(recipe, search, simulate)
    assert found is not None and found.is_final and found.missing_bytes == 5 * GIB
    change = "a batch of 1 in place of 4, which is another training"
    assert found.advice == (Advice(change=change, saved_bytes=15 * GIB, fits=True),)


def test_sentences() -> None:
    advice = (Advice(change="this", saved_bytes=3 * GIB, fits=True), Advice(change="that", saved_bytes=GIB, fits=False))
    found = Shortfall(
        closest=Strategy(), missing_bytes=2 * GIB, is_final=True, modules=(("a.b", GIB), ("", 2 * GIB)), advice=advice
    )
    assert sentences(found) == [
        "nothing fits: 2.0 GiB missing with one rank, fp32",
        "  saves 3.0 GiB, fits: this",
        "  saves 1.0 GiB, does not fit yet: that",
        "  most activations: a.b 1.0 GiB, the loss 2.0 GiB",
    ]
    assert len(sentences(dataclasses.replace(found, modules=(), advice=()))) == 1


def test_the_convolutions_with_most_weights_that_can_be_taken_apart() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3),
        nn.Conv3d(8, 16, 3),
        nn.Conv2d(7, 512, 3),  # of too few channels to gain
        nn.Conv2d(64, 64, 3, groups=2),
        nn.Conv2d(64, 64, 1),
        nn.Conv2d(64, 64, 3, padding=1, padding_mode="circular"),
    )
    assert _largest_convolutions(model) == ["1", "0"]


def test_a_separable_convolution_is_of_the_plain_one_s_dtype() -> None:
    changed = separable(nn.Sequential(nn.Conv2d(8, 8, 3)).double(), ["0"])
    assert {parameter.dtype for parameter in changed.parameters()} == {torch.float64}
