"""What the loops in these folders learn: bright rectangles and discs on a noisy background, and a network for them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

HEIGHT, WIDTH = 64, 96


class Shapes(Dataset[dict[str, Tensor]]):
    """image: (3, H, W). mask: (H, W) int64, 0 background, 1 rectangle, 2 disc. Sample i is the same in every run."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
        mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.int64)
        for shape in (1, 2, 1, 2):
            row, column, size = (int(torch.randint(low, high, (), generator=generator)) for low, high in _RANGES)
            across, down = (columns - column).abs(), (rows - row).abs()
            mask[(across < size) & (down < size) if shape == 1 else across**2 + down**2 < size**2] = shape
        noise = torch.rand(3, HEIGHT, WIDTH, generator=generator)
        return {"image": noise + 0.2 * mask, "mask": mask}


_RANGES = ((0, HEIGHT), (0, WIDTH), (5, 15))  # of a shape's row, column and half size


class Network(nn.Module):
    """Down by 4 and up again, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, H, W) images to (N, 3, H, W) class scores."""
        return F.interpolate(self.head(self.down(image)), size=image.shape[-2:], mode="bilinear")
