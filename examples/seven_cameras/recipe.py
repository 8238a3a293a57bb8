"""ConvNeXt-XL on seven camera frames of 512 x 2048, as NVIDIA and NIO published its memory: to plan, and to train.

Their figures are for a batch of all seven frames, split over GPUs by the width. They say neither the head nor the loss,
the optimizer, the precision or the device: here they are a class a frame, cross entropy, AdamW.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import ConvNextConfig, ConvNextForImageClassification

import fullframe as ff

CAMERAS, CLASSES = 7, 1000
PUBLISHED = (512, 2048)  # rows and columns of a frame
XL = {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 3, 27, 3]}
TINY = {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]}  # for tests: the same network, narrow


class Frames(Dataset[dict[str, Tensor]]):
    """Noise in the place of frames, each brighter the higher its class: no data belongs to the published figures.

    image: (3, H, W). target: () int64. A frame is a sample, and seven of them a batch.
    """

    def __init__(self, height: int, width: int, samples: int = 70, classes: int = CAMERAS):
        self.size, self.samples, self.classes = (height, width), samples, classes

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        target = torch.randint(self.classes, ())
        return {"image": torch.randn(3, *self.size) + target / self.classes, "target": target}


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Cross entropy of a class a frame."""
    return F.cross_entropy(model(batch["image"]).logits, batch["target"])


def sample(height: int, width: int) -> dict[str, Tensor]:
    """Shapes and dtypes of a frame: all that a plan asks for."""
    return {"image": torch.zeros(3, height, width), "target": torch.zeros((), dtype=torch.int64)}


def recipe(
    height: int = PUBLISHED[0],
    width: int = PUBLISHED[1],
    tiny: bool = False,
    stochastic_depth: float = 0.0,
    steps: int = 100,
) -> ff.Recipe:
    """What `fullframe plan` and `fullframe train` ask for; `tiny` is for machines without the GPUs."""
    config = ConvNextConfig(**(TINY if tiny else XL), drop_path_rate=stochastic_depth, num_labels=CLASSES)
    return ff.Recipe(
        model=lambda: ConvNextForImageClassification(config),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=lambda: Frames(height, width),
        sample=lambda: sample(height, width),
        batch_size=CAMERAS,
        steps=steps,
    )
