"""Tomography from few, noisy views: photographs and phantoms as slices, a network that iterates.

Trained on thirteen of scikit-image's photographs and on random ellipses; judged on the Shepp-Logan phantom and on four
other photographs. Readings come from images of twice the resolution, so that the network's own projection is, as in a
scanner, not quite what has made them.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import skimage.data
import torch
import torch.nn.functional as F
from radon import Scan, filtered_back_projection, project
from reconstruction import Reconstruction
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff

SCAN = Scan(size=64, views=30, detectors=92)
PHOTONS, ABSORPTION = 400, 0.05  # of a ray, and their loss in one pixel of brightness 1: noise of about 9 %

PHOTOGRAPHS = (
    "brick", "cell", "clock", "coins", "grass", "gravel", "hubble_deep_field", "immunohistochemistry", "moon", "page",
    "retina", "rocket", "text",
)  # fmt: skip
HELD_OUT = ("shepp_logan_phantom", "camera", "astronaut", "chelsea", "coffee")


class Slices(Dataset[dict[str, Tensor]]):
    """Random slices, or those that are held out.

    image: (1, size, size) in 0 to 1. sinogram: (views * detectors,). guess: the filtered back-projection, as image.
    """

    def __init__(self, scan: Scan = SCAN, samples: int = 4096, held_out: bool = False):
        self.scan, self.samples, self.held_out = scan, len(HELD_OUT) if held_out else samples, held_out
        self.photographs = [photograph(name) for name in (HELD_OUT if held_out else PHOTOGRAPHS)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        size = 2 * self.scan.size
        if self.held_out:
            fine = F.interpolate(squared(self.photographs[index])[None], size=(size, size), mode="area")
            return measured(self.scan, fine, torch.Generator().manual_seed(index))
        if index % 3 == 0:
            return measured(self.scan, ellipses(size))
        return measured(self.scan, cropped(self.photographs[index % len(self.photographs)], size))


def photograph(name: str) -> Tensor:
    """(1, H, W) in 0 to 1, of what comes with scikit-image."""
    values = torch.from_numpy(getattr(skimage.data, name)())
    values = values.float() / 255 if values.dtype == torch.uint8 else values.float()
    return values[..., :3].mean(-1)[None] if values.dim() == 3 else values[None]


def squared(photo: Tensor) -> Tensor:
    """The middle."""
    side = min(photo.shape[1:])
    top, left = ((rows - side) // 2 for rows in photo.shape[1:])
    return photo[:, top : top + side, left : left + side]


def cropped(photo: Tensor, size: int) -> Tensor:
    """A random square of the photograph, (1, 1, size, size), mirrored or not."""
    height, width = photo.shape[1:]
    side = int(torch.randint(min(size, height, width), min(height, width) + 1, ()))
    top, left = (int(torch.randint(rows - side + 1, ())) for rows in (height, width))
    crop = photo[None, :, top : top + side, left : left + side]
    crop = F.interpolate(crop, size=(size, size), mode="area" if side > size else "bilinear")
    return crop.flip(3) if torch.rand(()) < 0.5 else crop


def ellipses(size: int) -> Tensor:
    """Five to twelve random ellipses on black, (1, 1, size, size)."""
    count = int(torch.randint(5, 13, ()))
    axis = torch.linspace(-1, 1, size)
    y, x = axis[:, None], axis[None, :]
    image = torch.zeros(size, size)
    for number in range(count):
        angle, reach = torch.rand(()) * math.pi, 0.6 if number else 0.1
        centre_x, centre_y = (torch.rand(2) * 2 - 1) * reach
        long, wide = torch.rand(2) * 0.35 + (0.03 if number else 0.5)
        u = (x - centre_x) * angle.cos() + (y - centre_y) * angle.sin()
        v = (y - centre_y) * angle.cos() - (x - centre_x) * angle.sin()
        image += ((u / long) ** 2 + (v / wide) ** 2 <= 1) * (torch.rand(()) * 1.4 - 0.5 if number else 0.3)
    return image.clamp(0, 1)[None, None]


def measured(scan: Scan, fine: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """The sample of an image of twice the size, (1, 1, 2 * size, 2 * size)."""
    finer = Scan(2 * scan.size, scan.views, 2 * scan.detectors)
    exact = project(finer, fine).unflatten(1, (-1, 2)).mean(-1) / 2  # in pixels of the scan
    photons = torch.poisson(PHOTONS * torch.exp(-ABSORPTION * exact), generator).clamp(min=1)
    sinogram = -torch.log(photons / PHOTONS) / ABSORPTION
    guess = filtered_back_projection(scan, sinogram)
    return {"image": F.avg_pool2d(fine, 2)[0], "sinogram": sinogram[0], "guess": guess[0]}


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(model(batch["guess"], batch["sinogram"]), batch["image"])


def evaluate(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
    """PSNR in dB, the mean over images."""
    found = model(batch["guess"], batch["sinogram"])
    return {"psnr": (psnr(found, batch["image"]), 1), "psnr_filtered": (psnr(batch["guess"], batch["image"]), 1)}


def psnr(found: Tensor, image: Tensor) -> Tensor:
    """In dB, of one image in 0 to 1."""
    return -10 * torch.log10(F.mse_loss(found.clamp(0, 1), image))


def finish(model: nn.Module, run_dir: Path, scan: Scan) -> None:
    """Draw the images that were held out; their figures as JSON."""
    from figure import draw, judged

    device = next(model.parameters()).device
    samples = [{key: t[None].to(device) for key, t in sample.items()} for sample in Slices(scan, held_out=True)]
    found = [model(sample["guess"], sample["sinogram"]) for sample in samples]
    results = judged(HELD_OUT, samples, found)
    (run_dir / "held_out.json").write_text(json.dumps(results, indent=2))
    draw(results, samples, found, scan, run_dir / "held_out.png")


def recipe(scan: Scan = SCAN, steps: int = 200, iterations: int = 6) -> ff.Recipe:
    """What `fullframe train` asks for; smaller ones are for tests."""

    def schedule(step: int) -> float:  # up in a straight line, down in half a cosine
        return min(step / 20, 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))

    return ff.Recipe(
        model=lambda: Reconstruction(scan, iterations),  # recompute=True where all iterations do not fit
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=6e-3),
        data=lambda: Slices(scan),
        batch_size=4,
        steps=steps,
        schedule=schedule,
        evaluation_data=lambda: Slices(scan, held_out=True),
        evaluate=evaluate,
        evaluate_every=100,
        finish=lambda model, run_dir: finish(model, run_dir, scan),
    )
