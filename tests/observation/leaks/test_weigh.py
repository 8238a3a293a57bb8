"""What one step has put into a place."""

import functools

import numpy as np
import torch
from torch import nn

from fullframe.observation.leaks.graph import next_number
from fullframe.observation.leaks.weigh import new_elements, weigh


@functools.cache
def doubled(number):
    return 2 * number


def test_the_last_elements():
    assert new_elements([1, 2, 3], 1) == [3, 2]
    assert new_elements({"a": 1, "b": 2}, 1) == [2]
    assert len(new_elements({1, 2, 3}, 2)) == 1
    for number in range(3):
        doubled(number)
    assert new_elements(doubled, 2) == [(2, 4)]


def test_bytes_are_those_of_storages_counted_once():
    whole = torch.zeros(100)
    found = weigh([whole[:1], {"again": whole[50:]}], 0)
    assert (found.nodes, found.what) == (0, "tensor") and 400 <= found.bytes < 800
    array = np.zeros(100)
    assert weigh([array, array], 0).bytes == 800
    assert weigh([torch.zeros(100).numpy()[:1]], 0).bytes == 400 and weigh([array], 0).what == "array"
    assert weigh([np.frombuffer(bytes(80))], 0).bytes == 80
    larger = torch.zeros(200)
    deep = weigh([[{"a": (whole,)}], larger], 0)
    assert 1200 <= deep.bytes < 2000 and deep.tensors[0] is larger and deep.tensors[1] is whole
    assert weigh([nn.Parameter(torch.zeros(1000))], 0).bytes == 0, "the model is not what a step adds"
    assert weigh([nn.Linear(100, 100)], 0).bytes < 1000
    assert weigh([lambda: whole], 0).what == "function"
    assert 1600 < weigh([[float(n) for n in range(200)]], 0).bytes < 20_000


def test_a_graph_with_what_it_saved():
    weight, start = torch.ones(1000, requires_grad=True), next_number()
    old = (weight * 2).exp()
    middle = next_number()
    new = (old * 2).sum()
    assert weigh([new], middle).nodes == 2
    kept = weigh([new], start)
    assert kept.nodes == 4 and 4004 <= kept.bytes < 4050, "the scalar itself, and what exp keeps"
    new.backward()
    assert weigh([new], start).bytes < 50
