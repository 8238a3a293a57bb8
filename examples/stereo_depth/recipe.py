"""Depth from a real stereo pair: scikit-image's motorcycle (Middlebury 2014) at its full 500 x 741.

The loss never sees the columns of `HELD_OUT`; the end-point error there, in pixels, tells whether the network has
learned to match or only to remember.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import skimage.data
import torch
import torch.nn.functional as F
from network import StereoNetwork
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff

HELD_OUT = slice(330, 430)  # columns: through the engine, the tank, the shelf and the floor
STEPS, WARM_UP = 160, 20


class Motorcycle(Dataset[dict[str, Tensor]]):
    """The pair as `views` samples, each under other lighting and noise; one sample as photographed if not `augment`.

    left, right: (3, H, W) in 0 to 1. disparity: (1, H, W) pixels, infinite where it was not measured.
    held_out: (1, H, W), true where the loss must not look.
    """

    def __init__(self, views: int = 100, augment: bool = True):
        left, right, disparity = skimage.data.stereo_motorcycle()
        self.left, self.right = (torch.from_numpy(v).permute(2, 0, 1).float() / 255 for v in (left, right))
        self.disparity = torch.from_numpy(disparity)[None]
        self.held_out = torch.zeros_like(self.disparity, dtype=torch.bool)
        self.held_out[..., HELD_OUT] = True
        self.views, self.augment = views, augment

    def __len__(self) -> int:
        return self.views

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        change = relit if self.augment else torch.clone
        return {
            "left": change(self.left),
            "right": change(self.right),
            "disparity": self.disparity,
            "held_out": self.held_out,
        }


def relit(photo: Tensor) -> Tensor:
    """The photograph under another exposure, white balance, gamma and sensor noise, drawn for this view alone."""
    gain = torch.empty(1, 1, 1).uniform_(0.8, 1.2) * torch.empty(3, 1, 1).uniform_(0.9, 1.1)
    gamma = torch.empty(1).uniform_(0.8, 1.25)
    noise = torch.randn_like(photo) * torch.empty(1).uniform_(0.0, 0.02)
    return ((photo * gain).clamp(0, 1) ** gamma + noise).clamp(0, 1)


def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Smooth L1 in pixels over what was measured and is not held out, as (sum, count)."""
    fine, coarse = model(batch["left"], batch["right"])
    used = torch.isfinite(batch["disparity"]) & ~batch["held_out"]
    target = torch.where(used, batch["disparity"], 0.0)  # an infinite target would make NaN of a zero gradient
    error = F.smooth_l1_loss(fine, target, reduction="none") + 0.5 * F.smooth_l1_loss(coarse, target, reduction="none")
    return torch.where(used, error, 0.0).sum(), used.sum()


def evaluate(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """End-point error in pixels, where the loss never looked and where it did."""
    fine, _ = model(batch["left"], batch["right"])
    measured = torch.isfinite(batch["disparity"])
    error = (fine - torch.where(measured, batch["disparity"], 0.0)).abs()
    unseen, seen = measured & batch["held_out"], measured & ~batch["held_out"]
    return {
        "end_point_error": (torch.where(unseen, error, 0.0).sum(), unseen.sum()),
        "end_point_error_seen": (torch.where(seen, error, 0.0).sum(), seen.sum()),
    }


def schedule(step: int) -> float:
    """Up in a straight line, down in half a cosine."""
    return min(step / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * min(step / STEPS, 1.0)))


def finish(model: nn.Module, run_dir: Path) -> None:
    """Draw how the run went and what the network sees now."""
    from pictures import draw_curves, draw_depth

    sample = Motorcycle(views=1, augment=False)[0]
    device = next(model.parameters()).device
    predicted, _ = model(sample["left"][None].to(device), sample["right"][None].to(device))
    draw_curves(run_dir / "metrics.jsonl", run_dir / "curves.png")
    draw_depth(sample["left"], sample["disparity"][0], predicted[0, 0].cpu(), HELD_OUT, run_dir / "depth.png")


def recipe() -> ff.Recipe:
    """What `fullframe train` asks for."""
    return ff.Recipe(
        model=StereoNetwork,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        data=Motorcycle,
        batch_size=1,
        steps=STEPS,
        schedule=schedule,
        evaluation_data=lambda: Motorcycle(views=1, augment=False),
        evaluate=evaluate,
        evaluate_every=20,
        finish=finish,
    )
