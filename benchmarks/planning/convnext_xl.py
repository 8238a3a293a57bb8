"""ConvNeXt-XL on 7 camera frames of 512 x 2048: what `fullframe plan` is asked about; there is no data."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff

FRAMES, ROWS, COLUMNS, CLASSES = 7, 512, 2048, 19


class Segmenter(nn.Module):
    """`transformers` ConvNeXt at the published XL size, and a class for each pixel from its last map."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.ConvNextConfig(hidden_sizes=[256, 512, 1024, 2048], depths=[3, 3, 27, 3])
        self.backbone = transformers.ConvNextModel(config)
        self.backbone.layernorm = nn.Identity()  # of the pooled output, which is not used: it would get no gradient
        self.head = nn.Conv2d(2048, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Logits at a 32nd of the size."""
        return self.head(self.backbone(image).last_hidden_state)


def sample() -> dict[str, Tensor]:
    """One frame and its classes at a 32nd of the size."""
    return {"image": torch.zeros(3, ROWS, COLUMNS), "target": torch.zeros(ROWS // 32, COLUMNS // 32, dtype=torch.int64)}


def data() -> Dataset[dict[str, Tensor]]:
    """Nothing to train on."""
    raise FileNotFoundError("this recipe is for planning; it has a sample, and no data")


def recipe() -> ff.Recipe:
    """What `fullframe plan` asks for."""
    return ff.Recipe(
        model=Segmenter,
        loss=lambda model, batch: F.cross_entropy(model(batch["image"]), batch["target"]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=data,
        sample=sample,
        batch_size=FRAMES,
    )
