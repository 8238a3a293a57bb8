"""The moving average of parameters, by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from fullframe.errors import StrategyError
from fullframe.techniques.ema import ParameterAverage


def weight(value: float) -> nn.Module:
    model = nn.BatchNorm1d(1)
    nn.init.constant_(model.weight, value)
    return model


def test_the_average_follows_by_its_decay() -> None:
    model = weight(1.0)
    average = ParameterAverage(model, 0.75)
    for value, expected in ((5.0, 2.0), (2.0, 2.0), (6.0, 3.0)):
        nn.init.constant_(model.weight, value)
        model.weight.requires_grad_(value < 6)  # a frozen one's is brought to it as well
        average.update()
        assert average.state_dict()["weight"].item() == expected
        assert model.weight.item() == value
    assert set(average.state_dict()) == {"weight", "bias"}  # buffers are averages already


def test_frozen_whole_numbers_are_taken_as_they_are() -> None:
    model = weight(1.0)
    model.frozen = nn.Parameter(torch.tensor([100, 3], dtype=torch.int8), requires_grad=False)
    average = ParameterAverage(model, 0.5)
    model.frozen.data = torch.tensor([3, 100], dtype=torch.int8)
    nn.init.constant_(model.weight, 3.0)
    average.update()
    with average.applied():
        assert model.frozen.tolist() == [3, 100] and model.weight.item() == 2


def test_the_model_holds_the_average_inside_and_its_own_after_an_error_too() -> None:
    model = weight(1.0)
    average = ParameterAverage(model, 0.5)
    nn.init.constant_(model.weight, 3.0)
    average.update()
    address = model.weight.data_ptr()
    with pytest.raises(OSError), average.applied():
        assert model.weight.item() == 2 and model.weight.data_ptr() == address
        raise OSError
    assert model.weight.item() == 3 and average.state_dict()["weight"].item() == 2


def test_its_own_comes_back_where_there_is_no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(weight(1.0), weight(2.0))
    average = ParameterAverage(model, 0.5)
    nn.init.constant_(model[0].weight, 3.0)
    average.update()

    def none_left(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    with average.applied():
        assert model[0].weight.item() == 2
        for make in ("clone", "new_empty", "empty_like"):
            monkeypatch.setattr(torch.Tensor, make, none_left, raising=False)
    monkeypatch.undo()
    assert model[0].weight.item() == 3 and average.state_dict()["0.weight"].item() == 2


def test_another_parameter_in_the_place_of_one() -> None:
    model = weight(1.0)
    average = ParameterAverage(model, 0.5)
    model.weight, model.bias = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([4.0, 5.0]))
    average.update()
    assert average.state_dict()["weight"].tolist() == [2] and average.state_dict()["bias"].tolist() == [4, 5]
    with average.applied():
        assert model.weight.item() == 2


def test_a_parameter_that_is_put_in_after_a_step_holds_the_average_too() -> None:
    model = nn.Linear(3, 2)
    average = ParameterAverage(model, 0.5)
    expected = model.weight.detach().clone()
    model.weight = nn.Parameter(torch.zeros(2, 3))
    with average.applied():
        assert torch.equal(model.weight, expected)
    assert not model.weight.any()


def test_it_goes_on_from_a_state() -> None:
    first, second = ParameterAverage(weight(4.0), 0.5), ParameterAverage(weight(0.0), 0.5)
    second.load_state_dict({name: t.clone() for name, t in first.state_dict().items()})
    assert second.state_dict()["weight"].item() == 4
    with pytest.raises(KeyError):
        second.load_state_dict({"other": torch.zeros(1)})


def test_trained_parameters_of_16_bits_are_refused() -> None:
    """In bfloat16 an average by 0.99 of a parameter that went from -0.3 to 2.9 came to 2.2 and stayed there."""
    model = nn.Sequential(weight(1.0).bfloat16().requires_grad_(False), weight(2.0))
    ParameterAverage(model, 0.99)
    model[0].weight.requires_grad_(True)
    with pytest.raises(StrategyError, match=r"average 0.weight in torch.bfloat16, .* precision='bf16'"):
        ParameterAverage(model, 0.99)
