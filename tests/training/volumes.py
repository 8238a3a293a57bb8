"""A job of volumes: a small 3-D network that goes down and up, random scans of uneven sizes, labels with holes (-1)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff

SIZE = (9, 10, 11)


class Scans(Dataset[dict[str, Any]]):
    """Sample i: a scan (1, D, H, W) and a class a voxel (D, H, W)."""

    def __init__(self, samples: int = 12, size: tuple[int, int, int] = SIZE, dtype: torch.dtype = torch.float64):
        generator = torch.Generator().manual_seed(1)
        self.scans = torch.randn(samples, 1, *size, generator=generator, dtype=dtype)
        self.labels = torch.randint(-1, 3, (samples, *size), generator=generator)

    def __len__(self) -> int:
        return len(self.scans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"scan": self.scans[index], "label": self.labels[index], "index": index}


class Network(nn.Module):
    """Strided, normalised, back by a transposed convolution, with a skip."""

    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU())
        self.down = nn.Sequential(nn.Conv3d(width, 2 * width, 3, 2, 1), nn.InstanceNorm3d(2 * width, affine=True))
        self.middle = nn.Sequential(nn.ReLU(), nn.Conv3d(2 * width, 2 * width, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.head = nn.Conv3d(2 * width, 3, 1)
        self.to(dtype)

    def forward(self, scan: Tensor) -> Tensor:
        first = self.enter(scan)
        second = self.up(self.middle(self.down(first)))
        size = scan.shape[2:]
        return self.head(torch.cat([first, second[:, :, : size[0], : size[1], : size[2]]], 1))  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Cross entropy where the label has no hole, as (sum, count)."""
    label = batch["label"]
    total = F.cross_entropy(model(batch["scan"]), label, ignore_index=-1, reduction="sum")
    return total, (label >= 0).sum()


def recipe(**changes: Any) -> ff.Recipe:
    """The whole job."""
    fields: dict[str, Any] = {
        "model": Network,
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "data": Scans,
        "batch_size": 4,
        "seed": 3,
        "steps": 10,
    }
    return ff.Recipe(**(fields | changes))
