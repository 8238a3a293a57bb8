"""Which modules are found as a model's repeated blocks."""

from collections.abc import Callable

import pytest
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullframe.errors import StrategyError
from fullframe.model.blocks import blocks_that_repeat, matching, repeated_blocks
from tests.models import zoo


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvNorm(), ConvNorm())


class ConvNorm(nn.Module):
    """One weight: several in a row are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)


class Stage(nn.Module):
    """Most of it are blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down, self.blocks = nn.Conv2d(4, 4, 2), nn.Sequential(*(Residual() for _ in range(depth)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class Decoder(nn.Module):
    """Two attentions make a part of the block, but are no blocks themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.attention1, self.attention2 = Attention(), Attention()
        self.wide, self.narrow = nn.Linear(4, 16), nn.Linear(16, 4)


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.head = Residual(), Residual(), nn.Conv2d(4, 4, 1)


def two_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a list of blocks": (lambda: nn.Sequential(Residual(), Residual()), ["0", "1"]),
    "stages": (lambda: nn.Sequential(Stage(2), Stage(2)), ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]),
    "a stage of one": (lambda: nn.Sequential(Stage(2), Stage(1)), ["0.blocks.0", "0.blocks.1", "1.blocks.0"]),
    "attentions in a layer": (lambda: nn.Sequential(Decoder(), Decoder()), ["0", "1"]),
    "attributes with numbers": (Levels, ["down1", "down2"]),
    "sequences": (lambda: nn.ModuleList([two_convolutions(), two_convolutions()]), ["0", "1"]),
    "lists are never called": (lambda: nn.ModuleList([nn.ModuleList([ConvNorm(), ConvNorm()])] * 2), []),
    "nothing repeated": (two_convolutions, []),
    "single convolutions": (lambda: nn.Sequential(ConvNorm(), ConvNorm()), []),
    "no parameters": (lambda: nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())), []),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks(case: str) -> None:
    build, names = CASES[case]
    assert repeated_blocks(build()) == names


@pytest.mark.parametrize(
    ("build", "kind", "number"),
    [
        (lambda: zoo.resnet("bottleneck"), "ResNetBottleNeckLayer", 6),
        (zoo.convnext, "ConvNextLayer", 5),
        (lambda: transformers.SegformerModel(transformers.SegformerConfig()), "SegformerLayer", 8),
        (zoo.mobilenet, "MobileNetV2InvertedResidual", 16),
    ],
)
def test_blocks_of_known_models(build: Callable[[], nn.Module], kind: str, number: int) -> None:
    model = build()
    assert [type(model.get_submodule(name)).__name__ for name in repeated_blocks(model)] == [kind] * number


def test_blocks_of_one_convolution_are_better_than_none() -> None:
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 3, 1), "body": nn.ModuleList([ConvNorm(), ConvNorm()])})
    assert blocks_that_repeat(model) == ["body.0", "body.1"]
    assert blocks_that_repeat(nn.ModuleList([nn.Conv2d(3, 3, 1)] * 2)) == []
    assert blocks_that_repeat(nn.ModuleList([ConvNorm(), *two_convolutions()])) == []


def test_an_error_names_the_users_class_of_a_sharded_model() -> None:
    model = Stage(2)
    model.__class__ = type("FSDPStage", (FSDPModule, Stage), {})  # as fully_shard does it
    with pytest.raises(StrategyError, match="no module of Stage matches"):
        list(matching(model, ["nothing"], "recompute_modules"))
