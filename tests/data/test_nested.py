"""Nested containers, with those that torch's pytree takes for leaves."""

from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch

from fullframe.data.nested import attributes, held, leaves, replaced, tensors_in, tensors_replaced
from fullframe.errors import DataError

Pair = namedtuple("Pair", "left right")


class Features(UserDict):
    pass


class Boxes(list):
    pass


class Stored(MutableMapping):
    __slots__ = ("__items",)

    def __init__(self, items):
        self.__items = items

    def __getitem__(self, key):
        return self.__items[key]

    def __setitem__(self, key, value):
        self.__items[key] = value

    def __delitem__(self, key):
        del self.__items[key]

    def __iter__(self):
        return iter(self.__items)

    def __len__(self):
        return len(self.__items)


class Attributes(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


@dataclass
class Found:
    boxes: list
    scores: torch.Tensor | None


@dataclass
class Node:
    value: torch.Tensor
    parent: "Node | None" = None
    children: list = field(default_factory=list)
    unset: torch.Tensor = field(init=False)


class Named:
    __slots__ = "name"


@dataclass(slots=True)
class Boxed(Named):
    boxes: list


class Noted(Boxed):
    pass


class Hidden(Boxed):
    __slots__ = ("__hidden",)

    def hide(self, value):
        self.__hidden = value


def test_attributes_are_found_wherever_they_are_kept():
    assert attributes(Node(1)) == {"value": 1, "parent": None, "children": []}  # without one that is not set
    value = Noted([2])
    assert attributes(value) == {"boxes": [2]}
    value.name, value.note = "a", "b"
    assert attributes(value) == {"note": "b", "boxes": [2], "name": "a"}
    private = Hidden([3])
    private.hide(4)
    assert attributes(private) == {"_Hidden__hidden": 4, "boxes": [3]}
    assert attributes(5) == attributes("a") == {}


def test_what_objects_hold_is_found_three_deep_and_once() -> None:
    tensors = [torch.ones(size) for size in (1, 2, 3, 4)]
    root = Node(tensors[0], children=[Boxed([tensors[1]]), Node(tensors[2], children=[Boxed([Boxed([tensors[3]])])])])
    for child in root.children[1:]:
        child.parent = root
    assert [leaf.numel() for leaf in held(root) if isinstance(leaf, torch.Tensor)] == [1, 2, 3]
    assert all(leaf is not root for leaf in held(root))


def test_containers_keep_their_kind_and_leaves_their_place():
    value = Features(a=[1, (2, Pair(3, 4))], b=OrderedDict(x=Boxes([5])), c=MappingProxyType({"y": 6}))
    found = replaced(value, lambda leaf, path: (leaf, *path))
    assert type(found) is Features and found is not value and value["a"][0] == 1
    assert found["a"] == [(1, "a", 0), ((2, "a", 1, 0), Pair((3, "a", 1, 1, 0), (4, "a", 1, 1, 1)))]
    assert type(found["a"][1][1]) is Pair
    assert type(found["b"]) is OrderedDict and type(found["b"]["x"]) is Boxes and found["b"]["x"] == [(5, "b", "x", 0)]
    assert found["c"] == {"y": (6, "c", "y")}
    assert list(leaves(value)) == [1, 2, 3, 4, 5, 6]


def test_a_mapping_that_keeps_its_items_in_another_stays_as_it_was():
    value = Stored({"a": 1})
    found = replaced(value, lambda leaf, path: leaf + 1)
    assert type(found) is Stored and (found["a"], value["a"]) == (2, 1)


def test_what_is_an_item_and_an_attribute_is_replaced_as_both():
    from transformers.modeling_outputs import BaseModelOutput

    for value in (Attributes(logits=1), BaseModelOutput(last_hidden_state=torch.ones(1))):
        (name, was), found = *value.items(), tensors_replaced(replaced(value, lambda leaf, path: leaf * 2), torch.clone)
        assert type(found) is type(value) and found[name] == getattr(found, name) == 2
        assert was is value[name] is getattr(value, name)
    found.new = found["new"] = 3
    assert not hasattr(value, "new")


def test_a_list_keeps_its_attributes():
    value = Boxes([1])
    value.size = (2, 3)
    found = replaced(value, lambda leaf, path: leaf + 1)
    assert (found, found.size, value) == ([2], (2, 3), [1])


def test_tensors_are_replaced_also_in_what_torch_knows():
    value = Features(image=torch.zeros(2), shape=torch.return_types.max((torch.ones(1), torch.tensor([0]))), name="a")
    found = tensors_replaced(value, lambda tensor: tuple(tensor.shape))
    assert found["image"] == (2,) and list(found["shape"]) == [(1,), (1,)] and found["name"] == "a"


def test_tensors_are_found_wherever_they_lie():
    from transformers.modeling_outputs import BaseModelOutput

    one, two, three, four, five, six = (torch.ones(size) for size in range(1, 7))
    known = torch.return_types.max((five, six))
    output = BaseModelOutput(last_hidden_state=three, hidden_states=(four,))
    value = Features(a=[Found(Boxes([one, "x"]), two), 3, None], b=output, c=deque([{"d": known}]), d=Found)
    assert [len(tensor) for tensor in tensors_in(value)] == [1, 2, 3, 4, 5, 6]


def test_tensors_of_nodes_that_know_their_parent():
    root, value = Node(torch.zeros(1)), torch.ones(1)
    root.children = [Node(value, root), Node(value, root)]
    assert [tensor.item() for tensor in tensors_in([root])] == [0, 1, 1]


def test_a_list_that_holds_itself_is_entered_once_and_not_replaced():
    tensor, graph = torch.ones(2), {"nodes": [1]}
    graph["nodes"] += [graph, tensor]
    assert list(leaves(graph)) == [1, tensor] and list(tensors_in(graph)) == [tensor]
    with pytest.raises(DataError, match=r"by 'nodes', 1, 'nodes', 1, \.\.\.: a list or mapping in it holds itself"):
        replaced(graph, lambda leaf, path: leaf)
