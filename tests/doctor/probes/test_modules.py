"""Modules as they are called from outside."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullframe.doctor.probes.modules import Modules, unwrapped, wrapper_of


def called(model: nn.Module, trained: bool = True) -> tuple[Modules, list[tuple[str, str, str]]]:
    said: list[tuple[str, str, str]] = []
    modules = Modules(lambda *words: said.append(words))
    modules.trained = {id(p) for p in model.parameters()} if trained else set()
    return modules, said


def run(modules: Modules, *calls: Any) -> None:
    handles = modules.attach()
    try:
        for call in calls:
            call()
    finally:
        for handle in handles:
            handle.remove()
        modules.ended()


def test_roots_are_what_is_called_from_outside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    modules, said = called(model)
    run(
        modules,
        lambda: model[0](torch.ones(1, 2)),
        lambda: model(torch.ones(1, 2)),
        lambda: nn.MSELoss()(*torch.ones(2, 1)),
    )
    assert modules.roots() == [model]
    assert [name for name, _ in modules.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert said == []


def test_a_module_that_raises_is_left() -> None:
    model = nn.Linear(2, 2)
    modules, _ = called(model)

    def fails() -> None:
        with contextlib.suppress(RuntimeError):
            model(torch.ones(1, 3))

    run(modules, fails, lambda: model(torch.ones(1, 2)))
    assert modules.roots() == [model]


def test_evaluation_in_training_mode_changes_statistics_only_of_what_is_trained() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(1, 1, 8, 8))

    modules, said = called(model)
    run(modules, evaluate)
    assert said == [("statistics of evaluation", "Sequential", "1")]
    modules, said = called(model, trained=False)  # a teacher, say
    run(modules, evaluate)
    assert said == []


def test_what_is_given_to_another_model_s_step_is_no_evaluation() -> None:
    generator, critic, decoder = (nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)) for _ in range(3))
    modules, said = called(nn.ModuleList([generator, critic, decoder]))
    image = torch.ones(1, 1, 8, 8)
    quiet = torch.no_grad()(generator)
    run(modules, lambda: (critic(quiet(image)), modules.used()), lambda: generator(image))
    assert said == []
    run(modules, lambda: (quiet(image), generator(image), critic(image), modules.used()))  # not given to the critic
    assert said == [("statistics of evaluation", "Sequential", "1")]
    said.clear()
    run(modules, lambda: (torch.no_grad()(decoder)(quiet(image)), decoder(generator(image)), modules.used()))
    assert len(said) == 2


def test_a_graph_of_evaluation_that_is_used_is_none_of_its_faults() -> None:
    model = nn.Linear(2, 1).eval()
    modules, said = called(model)
    run(modules, lambda: (model(torch.ones(1, 2)), modules.used(), model(torch.ones(1, 2)), modules.used()))
    assert said == []
    run(modules, lambda: (model(torch.ones(1, 2)), model(torch.ones(1, 2))))
    assert [kind for kind, *_ in said] == ["evaluation keeps a graph"]


def test_one_backward_uses_all_passes_before_it() -> None:
    encoder, decoder, x = nn.Linear(2, 2).eval(), nn.Linear(2, 2), torch.ones(1, 2)
    modules, said = called(nn.ModuleList([encoder, decoder]))
    run(modules, lambda: (encoder(x), decoder(x), encoder(x), modules.used(), encoder.train()(x)))
    assert said == []
    encoder.eval()
    run(modules, lambda: (encoder(x), decoder(x), encoder.train()(x), modules.used()))
    assert [kind for kind, *_ in said] == ["evaluation keeps a graph"]


def test_wrappers_are_known_and_taken_off() -> None:
    class DataParallel(nn.Module):
        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

    plain = nn.Linear(2, 2)
    assert unwrapped(DataParallel(plain)) is plain and wrapper_of(DataParallel(plain)) == "DataParallel"
    assert unwrapped(plain) is plain and wrapper_of(plain) == ""


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (lambda: torch.arange(256.0), True),
        (lambda: torch.arange(256.0).bfloat16(), True),
        (lambda: torch.arange(256.0) / 255, False),
        (lambda: torch.arange(256.0) - 103.53, False),
        (lambda: torch.arange(256.0) - 128, False),
        (lambda: torch.arange(256.0) * 4, False),  # of a sensor, or a distance
        (lambda: torch.arange(256.0) % 34 * 6, False),  # classes, or instances
        (lambda: torch.arange(256.0).requires_grad_(), False),
        (lambda: torch.full((256,), torch.inf), False),
        (lambda: torch.empty(0), False),
    ],
)
def test_an_image_in_bytes_is_told_once(image: Callable[[], torch.Tensor], told: bool) -> None:
    pixels = image()
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1)).to(pixels.dtype)
    modules, said = called(model)
    run(modules, *[lambda: model(pixels.reshape(-1, 1, 16, 16))] * 2)
    words = ("pixels as bytes", "whole numbers from 0 to 255, 128 on average", "0")
    assert said == ([words] if told else [])
