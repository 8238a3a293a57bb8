"""Compiled blocks in a simulation: fused kernels count once, equal blocks are lowered once, what cannot be is named."""

import dataclasses
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe.simulation.compiled.blocks import EXPERIMENTAL, SimulatedPrograms
from fullframe.simulation.compiled.lowering import Lowering
from fullframe.simulation.prediction import Prediction
from tests.rank_group import rank_group
from tests.simulation.real_steps import peak_and_left

SAMPLE = {"image": torch.ones(3, 96, 161)}  # not made while bytes are counted


class Block(nn.Module):
    """A convolution and six pointwise ops, which keep their results unless they are fused."""

    looks = False

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.mix = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        y = torch.tanh(F.silu(F.gelu(y) * 2) + 1).sigmoid()
        if self.looks and y.shape[0] > 0:
            y.register_hook(lambda gradient: gradient)
        return x + self.mix(y)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["image"]).square().mean()  # type: ignore[no-any-return]


def simulated(device: str, looks: tuple[bool, ...] = (False, False, False), **strategy: Any) -> Prediction:
    def model() -> nn.Module:
        blocks = nn.Sequential(nn.Conv2d(3, 8, 1), *(Block() for _ in looks))
        for block, does in zip(list(blocks)[1:], looks, strict=True):
            block.looks = does  # type: ignore[assignment]
        return blocks

    recipe = ff.Recipe(
        model=model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: None,  # type: ignore[arg-type, return-value]
        sample=lambda: {"image": torch.zeros(3, 96, 160)},
        batch_size=2,
    )
    return ff.simulate(recipe, ff.Strategy(**strategy), device)


@pytest.mark.parametrize("width", [1, 2])
def test_fused_ops_read_and_keep_less_on_a_gpu(width: int) -> None:
    plain = simulated("2xA100-80GB", width=width)
    with mock.patch.object(Lowering, "__call__", autospec=True, side_effect=Lowering.__call__) as lowered:
        compiled = simulated("2xA100-80GB", width=width, compile=True)
    assert EXPERIMENTAL in compiled.notes and not any("without compile" in note for note in compiled.notes)
    assert lowered.call_count == 2  # forward and backward of three equal blocks
    assert compiled.seconds["memory"] < 0.8 * plain.seconds["memory"]
    assert compiled.bytes["activation"] < 0.7 * plain.bytes["activation"]
    assert compiled.seconds["convolution"] == pytest.approx(plain.seconds["convolution"], rel=0.1)
    assert (compiled.seconds["exchange"] > 0) == (width == 2)
    assert width == 1 or compiled.host_seconds < plain.host_seconds


def test_a_model_as_one_program_has_a_program_for_each_pass() -> None:
    with mock.patch.object(Lowering, "__call__", autospec=True, side_effect=Lowering.__call__) as lowered:
        found = simulated("2xA100-80GB", width=2, compile="all")
    assert lowered.call_count == 2 and found.notes == (EXPERIMENTAL,)
    assert found.host_seconds < simulated("2xA100-80GB", width=2, compile=True).host_seconds


def test_a_block_that_cannot_be_captured_is_simulated_as_it_is_and_named() -> None:
    found = simulated("A100-80GB", (True, True, True), compile=True)
    said = [note for note in found.notes if "without compile" in note]
    assert said == ["simulated without compile: 1 and 2 more: it calls register_hook"]
    assert EXPERIMENTAL not in found.notes
    plain = simulated("A100-80GB", (True, True, True))
    assert found.peak_bytes == plain.peak_bytes and found.step_seconds == plain.step_seconds


class Settled(Block):
    """Takes its width from the first map that it gets."""

    def forward(self, x: Tensor) -> Tensor:
        self.columns = x.shape[-1]
        return super().forward(x)


def test_a_block_that_is_captured_at_its_second_microbatch_is_not_named() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 1), Settled(), Settled())

    found = ff.simulate(
        dataclasses.replace(recipe_of_blocks(), model=model), ff.Strategy(microbatches=2, compile=True), "A100-80GB"
    )
    assert found.notes == (EXPERIMENTAL,)


def test_a_simulation_has_no_note_of_blocks_that_it_does_not_compile() -> None:
    assert SimulatedPrograms(mock.Mock()).notes == []


def recipe_of_blocks() -> ff.Recipe:
    return ff.Recipe(
        model=lambda: nn.Sequential(nn.Conv2d(3, 8, 1), *(Block() for _ in range(3))),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=lambda: [SAMPLE] * 8,  # type: ignore[arg-type, return-value]
        batch_size=2,
    )


def real_peak(width: int) -> int:
    return peak_and_left(recipe_of_blocks(), ff.Strategy(width=width, compile=True))[0]


@pytest.mark.slow  # inductor compiles kernels
@pytest.mark.parametrize("width", [1, 2])
def test_bytes_are_those_of_two_compiled_steps(width: int) -> None:
    strategy = ff.Strategy(width=width, compile=True)
    found = rank_group(width).run(real_peak, width)
    predicted = [ff.simulate(recipe_of_blocks(), strategy, "cpu", rank=rank).peak_bytes for rank in range(width)]
    assert predicted == pytest.approx(found, rel=0.005)
    assert predicted[0] < 0.9 * ff.simulate(recipe_of_blocks(), ff.Strategy(width=width), "cpu", rank=0).peak_bytes
