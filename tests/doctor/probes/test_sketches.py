"""Tensors in a few numbers, and who keeps a graph."""

import gc
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fullframe.doctor.probes.sketches import LiveGraphs, checksum_of_batch, graph_nodes, sketch


def test_equal_tensors_have_equal_sketches_and_others_do_not() -> None:
    values = torch.randn(100, 7)
    assert sketch(values) == sketch(values.clone())
    assert sketch(values).norm == torch.linalg.vector_norm(values.double()).item()
    changed = values.clone()
    changed[50, 3] = torch.nextafter(changed[50, 3], torch.tensor(9.0))
    assert sketch(changed).checksum != sketch(values).checksum
    assert sketch(torch.zeros(0)).norm == 0.0
    assert sketch(torch.tensor([1 + 2j])).sample == (1.0, 2.0)
    assert sketch(torch.tensor([1 + 2j]).conj()) == sketch(torch.tensor([1 - 2j]))  # as gradients come through a conj
    assert len(sketch(torch.randn(10_000)).sample) == 16


def test_a_batch_is_known_by_its_values_and_shapes() -> None:
    batch = {"image": torch.arange(6.0).view(2, 3), "names": ["a", "b"], "more": [torch.ones(2)]}
    assert checksum_of_batch(batch) == checksum_of_batch({**batch, "names": ["c"]})
    assert checksum_of_batch(batch) != checksum_of_batch({**batch, "image": torch.arange(6.0).view(3, 2)})
    assert checksum_of_batch(batch) != checksum_of_batch({**batch, "more": [torch.zeros(2)]})
    wave = torch.tensor([1 + 2j]).conj()
    assert checksum_of_batch(wave) == checksum_of_batch(wave.resolve_conj())


def test_nodes_of_a_graph_are_counted_once() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert graph_nodes((y + y).grad_fn) == 3  # add, mul, accumulate
    assert graph_nodes(None) == 0


class Meter:
    def __init__(self) -> None:
        self.values: list[Tensor] = []


@pytest.fixture
def collected() -> None:
    """No graph that an earlier test left is freed between two counts, nor looked at."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("collected")
def test_what_keeps_graphs_is_named() -> None:
    live, meter, weight = LiveGraphs(), Meter(), torch.ones(3, requires_grad=True)
    found = []
    for _ in range(5):
        meter.values.append((weight * 2).sum())
        found.append(live.count())
    nodes = [count for count, _ in found]
    assert [b - a for a, b in pairwise(nodes)] == [2, 2, 2, 2]
    assert found[-1][1] == "Meter.values"


@pytest.mark.usefixtures("collected")
def test_a_loop_that_lets_go_holds_one_graph() -> None:
    live, weight = LiveGraphs(), torch.ones(3, requires_grad=True)
    nodes = []
    for _ in range(4):
        loss = (weight * 2).sum()
        loss.backward()
        nodes.append(live.count()[0])
    assert len(set(nodes)) == 1
