"""What is said of states: their form, where they are, which call has made them."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullframe.errors import DeviceError, GradientError
from fullframe.techniques.unrolling.states import (
    form_of,
    moved,
    note_made,
    require_device,
    require_live,
    tensors_of,
    told,
)


def test_a_state_is_a_tree_of_tensors() -> None:
    image, memory = torch.ones(2, 3), torch.ones(4)
    assert tensors_of({"x": image, "more": (memory, "name")}) == [image, memory]
    on_meta = moved({"x": image, "more": (memory, "name")}, torch.device("meta"))
    assert on_meta["x"].is_meta and on_meta["more"][0].is_meta and on_meta["more"][1] == "name"


def test_its_form_is_told_as_far_as_it_differs() -> None:
    one, two = form_of([torch.ones(2, 3), torch.ones(4)]), form_of([torch.ones(2, 3), torch.ones(5)])
    assert one != two and form_of([torch.zeros(2, 3), torch.zeros(4)]) == one
    assert told(two, one) == "shape (5,) (part 1)"
    assert told(form_of(torch.ones(5)), form_of(torch.ones(4))) == "shape (5,)"
    assert told(one, form_of(torch.ones(2, 3))).startswith("2 parts (")


def test_the_order_of_a_dict_s_keys_is_no_part_of_its_form() -> None:
    a, b = torch.ones(2), torch.ones(3)
    one, two = form_of(({"x": a, "more": [b]},)), form_of(({"more": [b], "x": a},))
    assert one == two and form_of(({"more": [a], "x": b},)) != one


def test_weights_and_state_are_on_one_device() -> None:
    require_device(nn.Identity(), torch.device("meta"))
    require_device(nn.Linear(2, 2), torch.device("cpu"))
    with pytest.raises(DeviceError, match="the state is on meta and the weights of Linear on cpu"):
        require_device(nn.Linear(2, 2), torch.device("meta"))


def made(x: Tensor) -> Tensor:
    result = x.exp() + 1  # whose last node saves nothing
    note_made([result])
    return result


def test_a_freed_graph_is_seen_and_its_line_named() -> None:
    state = made(torch.ones(3, requires_grad=True))
    require_live([state * 2])
    state.sum().backward()
    with pytest.raises(GradientError, match=r"call at .*test_states\.py:\d+.*state\.detach\(\)"):
        require_live([state * 2])
    require_live([state.detach()])
    own = torch.ones(3, requires_grad=True).exp()
    own.sum().backward()
    require_live([own * 2])  # of a graph that no call has made torch itself says that it is freed


def test_to_look_recomputes_nothing() -> None:
    calls = []

    def block(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp().tanh()

    state = checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=False)
    note_made([state])
    require_live([state * 2])
    assert len(calls) == 1
    state.sum().backward()
    with pytest.raises(GradientError, match="an earlier call"):
        require_live([state * 2])
