"""Maps that are resized by tables of weights can be simulated: the tables have numbers, though the maps have none."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff


class _Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(image), 3, 2, 1)
        y = F.interpolate(x, scale_factor=2) + F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        for size, mode in ((6, "bicubic"), (1, "bilinear")):
            y = y + F.interpolate(F.adaptive_avg_pool2d(x, size), size=y.shape[-2:], mode=mode)
        return self.last(y)  # type: ignore[no-any-return]


class _Images(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": torch.zeros(3, 64, 96)}


def test_resized_maps_can_be_simulated() -> None:
    recipe = ff.Recipe(
        model=_Resized,
        loss=lambda model, batch: model(batch["image"]).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=_Images,
        batch_size=2,
    )
    alone, half = (
        ff.simulate(recipe, ff.Strategy(width=width), device="A100-80GB").bytes["activation"] for width in (1, 2)
    )
    assert 0 < half < 0.75 * alone
