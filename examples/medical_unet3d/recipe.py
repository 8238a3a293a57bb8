"""Organs in volumes: a 3-D UNet on scans that are drawn, with noise and an uneven field, split on their depth.

Organs are ellipsoids whose brightness hardly differs from that of what is around them; they are told apart by where
they lie, by their shape and by how bright they are. Two seeds never give the same patient.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff

SAMPLES, HELD_OUT = 96, 8  # patients
NOISE, FIELD = 0.12, 0.3  # beside contrasts of 0.1 to 0.45
BODY = (0.95, 0.9, 0.9)  # half axes z, y, x of the body, in shares of half the volume
ORGANS = {  # name: centres, half axes (z, y, x) in shares of the body, brightness, weight of a voxel in the loss
    "liver": (((-0.1, -0.1, -0.4),), (0.5, 0.5, 0.35), 0.38, 4.0),
    "spleen": (((-0.15, 0.2, 0.55),), (0.35, 0.3, 0.25), 0.42, 12.0),
    "kidneys": (((0.25, 0.45, 0.35), (0.3, 0.45, -0.35)), (0.35, 0.2, 0.2), 0.55, 10.0),
    "spine": (((0.0, 0.7, 0.0),), (1.0, 0.15, 0.15), 0.75, 10.0),
}
CLASSES = len(ORGANS) + 1  # 0 is the rest, about 95 % of a scan, with weight 1


class Scans(Dataset[dict[str, Tensor]]):
    """Drawn patients, the same in every run; held out are the last.

    scan: (1, D, H, W). organs: (D, H, W) int64.
    """

    def __init__(self, size: tuple[int, int, int], held_out: bool = False):
        self.size = size
        self.patients = range(SAMPLES, SAMPLES + HELD_OUT) if held_out else range(SAMPLES)

    def __len__(self) -> int:
        return len(self.patients)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return patient(self.size, torch.Generator().manual_seed(self.patients[index]))


def patient(size: tuple[int, int, int], random: torch.Generator) -> dict[str, Tensor]:
    """One scan; the organs are moved, stretched and turned a little, and the later ones cover the earlier."""
    axes = [torch.linspace(-1, 1, length) for length in size]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)  # (D, H, W, 3)
    body = torch.tensor(BODY) * around(1.0, 0.08, random, 3)
    place = (place - 0.05 * torch.randn(3, generator=random)) / body
    scan = torch.where((place**2).sum(-1) < 1, 0.25, 0.0)
    organs = torch.zeros(size, dtype=torch.int64)
    for number, (centres, half, brightness, _) in enumerate(ORGANS.values(), 1):
        for centre in centres:
            moved = place - torch.tensor(centre) - 0.05 * torch.randn(3, generator=random)
            turned = moved @ rotation(0.15 * torch.randn(3, generator=random))
            inside = ((turned / (torch.tensor(half) * around(1.0, 0.15, random, 3))) ** 2).sum(-1) < 1
            inside &= (place**2).sum(-1) < 1
            organs[inside], scan[inside] = number, brightness * around(1.0, 0.1, random, 1)
    vessels = F.interpolate(torch.randn(1, 1, 6, 6, 6, generator=random), size=size, mode="trilinear")[0, 0]
    scan = scan + 0.06 * vessels * (scan > 0)
    field = F.interpolate(torch.randn(1, 1, 2, 2, 2, generator=random), size=size, mode="trilinear")[0, 0]
    scan = scan * (1 + FIELD * field.tanh()) + NOISE * torch.randn(size, generator=random)
    return {"scan": scan[None], "organs": organs}


def around(middle: float, deviation: float, random: torch.Generator, count: int) -> Tensor:
    """(count,) near to `middle`, at most three deviations away."""
    return middle + deviation * torch.randn(count, generator=random).clamp(-3, 3)


def rotation(angles: Tensor) -> Tensor:
    """(3, 3), about the three axes one after the other."""
    turned = torch.eye(3)
    for axis, angle in enumerate(angles):
        one, other = (other for other in range(3) if other != axis)
        step = torch.eye(3)
        step[one, one] = step[other, other] = angle.cos()
        step[one, other], step[other, one] = -angle.sin(), angle.sin()
        turned = turned @ step
    return turned


class Twice(nn.Sequential):
    """Two convolutions, each with instance norm."""

    def __init__(self, inputs: int, outputs: int):
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv3d(channels, outputs, 3, padding=1),
                nn.InstanceNorm3d(outputs, affine=True),
                nn.LeakyReLU(0.01),
            ]
        super().__init__(*layers)


class UNet3d(nn.Module):
    """Cicek et al., MICCAI 2016, narrow: `width` channels at first, twice as many a level."""

    def __init__(self, width: int = 8, levels: int = 3):
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(Twice(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.joined = nn.ModuleList(Twice(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv3d(width, CLASSES, 1)

    def forward(self, scan: Tensor) -> Tensor:
        """(N, 1, D, H, W), divisible by 2 a level, to (N, classes, D, H, W)."""
        x, kept = self.down[0](scan), []
        for block in self.down[1:]:
            kept.append(x)
            x = block(F.max_pool3d(x, 2))
        for up, joined, before in zip(self.up, self.joined, reversed(kept), strict=True):
            x = joined(torch.cat([up(x), before], 1))
        return self.head(x)


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Cross entropy, in which the few voxels of organs weigh more, and one minus their mean Dice in each volume."""
    scores = model(batch["scan"])
    weight = torch.tensor([1.0, *(organ[-1] for organ in ORGANS.values())]).to(batch["scan"])
    wrong = F.cross_entropy(scores, batch["organs"], weight, reduction="sum") / batch["organs"].numel()
    return wrong + 1 - dice(scores.softmax(1), batch["organs"]).mean()


def dice(likely: Tensor, organs: Tensor) -> Tensor:
    """Twice the shared over the sum of both, of each organ in each volume, (N, organs); `likely` has the rest first."""
    true = F.one_hot(organs, CLASSES).movedim(-1, 1)[:, 1:].to(likely.dtype)
    found = likely[:, 1:]
    both, each = (found * true).sum((2, 3, 4)), found.sum((2, 3, 4)) + true.sum((2, 3, 4))
    return (2 * both + 1) / (each + 1)


def evaluate(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
    """Dice of each organ, the mean over patients."""
    found = model(batch["scan"]).argmax(1)
    overlaps = dice(F.one_hot(found, CLASSES).movedim(-1, 1).float(), batch["organs"])[0]
    return {"dice": (overlaps.mean(), 1)} | {
        f"dice.{name.replace(' ', '_')}": (overlap, 1) for name, overlap in zip(ORGANS, overlaps, strict=True)
    }


def usual(scans: Scans, count: int = 32) -> Tensor:
    """(D, H, W): the organ that most patients have at a place, which looks at no scan."""
    votes = sum(F.one_hot(scans[index]["organs"], CLASSES) for index in range(count))
    return votes.argmax(-1)  # type: ignore[union-attr]


def finish(model: nn.Module, run_dir: Path, trained: Scans, held_out: Scans) -> None:
    """Draw a held-out patient; Dice of the network and of the usual place of each organ, as JSON."""
    from volume_picture import draw

    device, names = next(model.parameters()).device, list(ORGANS)
    patients = [held_out[index] for index in range(len(held_out))]
    true = torch.stack([each["organs"] for each in patients])
    with torch.no_grad():
        found = torch.cat([model(each["scan"][None].to(device)).argmax(1).cpu() for each in patients])
    guess = usual(trained).expand_as(true)
    results = {
        name: dict(zip(names, each.mean(0).tolist(), strict=True)) | {"mean": float(each.mean())}
        for name, each in (("network", judged(found, true)), ("usual_place", judged(guess, true)))
    }
    (run_dir / "held_out.json").write_text(json.dumps(results, indent=2))
    draw(patients[0]["scan"][0], (true[0], found[0], guess[0]), results, run_dir / "held_out.png")


def judged(found: Tensor, true: Tensor) -> Tensor:
    """Dice (N, organs) of classes (N, D, H, W)."""
    return dice(F.one_hot(found, CLASSES).movedim(-1, 1).float(), true)


def recipe(depth: int = 32, height: int = 40, width: int = 48, steps: int = 300) -> ff.Recipe:
    """What `fullframe train` asks for; smaller ones are for tests."""
    size = depth, height, width

    def schedule(step: int) -> float:  # up in a straight line, down in half a cosine
        return min(step / 10, 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))

    return ff.Recipe(
        model=UNet3d,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=8e-3),
        data=lambda: Scans(size),
        batch_size=2,
        steps=steps,
        schedule=schedule,
        evaluation_data=lambda: Scans(size, held_out=True),
        evaluate=evaluate,
        evaluate_every=100,
        finish=lambda model, run_dir: finish(model, run_dir, Scans(size), Scans(size, held_out=True)),
    )
