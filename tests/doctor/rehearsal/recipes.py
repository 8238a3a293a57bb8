"""Recipes with one fault each, on large enough frames that there is a small form."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff


class Frames(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        image = torch.rand(3, 160, 96)
        return {"image": image, "mask": (image[0] > 0.5).long(), "coarse": torch.zeros(1, 40, 24)}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(3)]
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["mask"])


def evaluate(model: nn.Module, batch: Any) -> Any:
    return {"loss": (loss(model, batch), 1)}


def sound() -> ff.Recipe:
    return ff.Recipe(
        model=Network,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=Frames,
        batch_size=2,
        evaluation_data=Frames,
        evaluate=evaluate,
    )


def leaking() -> ff.Recipe:
    history: list[Tensor] = []

    def kept(model: nn.Module, batch: Any) -> Tensor:
        history.append(loss(model, batch))
        return history[-1]

    return replace(sound(), loss=kept)


def unused() -> ff.Recipe:
    def model() -> nn.Module:
        network = Network()
        network.spare = nn.Linear(2, 2)
        return network

    return replace(sound(), model=model)


def without_rate() -> ff.Recipe:
    return replace(sound(), schedule=lambda step: 0.0)


def not_finite() -> ff.Recipe:
    return replace(sound(), loss=lambda model, batch: loss(model, batch) / 0.0)


def forgetful() -> ff.Recipe:
    """A noise that no seed repeats."""
    counter = itertools.count()

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) * (1 + 0.1 * next(counter))

    return replace(sound(), loss=noisy)


def forgetful_data() -> ff.Recipe:
    counter = itertools.count()

    class Unseeded(Frames):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "image": torch.full((3, 160, 96), float(next(counter)))}

    return replace(sound(), data=Unseeded)


def overflowing() -> ff.Recipe:
    """Gradients that no scale brings into fp16's range."""
    return replace(sound(), loss=lambda model, batch: loss(model, batch) * 1e35)


def few_values() -> ff.Recipe:
    class Pooled(Network):
        def __init__(self) -> None:
            super().__init__()
            self.tail = nn.BatchNorm2d(4)

        def forward(self, image: Tensor) -> Tensor:
            pooled = self.tail(F.adaptive_avg_pool2d(self.body(image), 1))
            return self.head(self.body(image) + pooled)

    return replace(sound(), model=Pooled)


def not_scaled() -> ff.Recipe:
    class Bytes(Frames):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "image": torch.randint(0, 256, (3, 160, 96)).float()}

    return replace(sound(), data=Bytes)


def broken_evaluation() -> ff.Recipe:
    return replace(sound(), evaluate=lambda model, batch: {"loss": batch["no_such_key"]})


FAULTS: dict[Callable[[], ff.Recipe], str] = {
    leaking: "FF318",
    unused: "FF311",
    without_rate: "FF315",
    not_finite: "FF323",
    forgetful: "FF325",
    forgetful_data: "FF308",
    few_values: "FF328",
    not_scaled: "FF342",
    broken_evaluation: "FF336",
}
