"""Which texture is where: SegFormer on mosaics of scikit-image's photographs.

Each mosaic is cut out of photographs of brick, grass, gravel, tissue and stars, so that the truth is known to the
pixel. What is held out comes from the right quarter of each photograph, which training never sees.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import skimage.data
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import SegformerConfig, SegformerForSemanticSegmentation

import fullframe as ff

TEXTURES = ("brick", "grass", "gravel", "immunohistochemistry", "hubble_deep_field")
IGNORED, BORDER = 255, 2  # the class of pixels so near to another texture, in pixels
PIECES = (4, 9)  # of a mosaic, the last excluded
HELD_OUT = 16  # mosaics


class Mosaics(Dataset[dict[str, Tensor]]):
    """Random mosaics; those held out are the same in every run.

    image: (3, H, W), each piece with mean 0 and deviation 1 before light and noise. mask: (H, W) int64, or IGNORED.
    """

    def __init__(self, height: int, width: int, samples: int = 4096, held_out: bool = False):
        self.size, self.samples, self.held_out = (height, width), HELD_OUT if held_out else samples, held_out
        self.photographs = [part(name, held_out) for name in TEXTURES]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator()
        random.manual_seed(index) if self.held_out else random.manual_seed(int(torch.randint(2**62, ())))
        return mosaic(self.photographs, self.size, random)


def part(name: str, held_out: bool) -> Tensor:
    """(H, W) of a photograph, mean 0 and deviation 1; its right quarter, or the rest."""
    values = torch.from_numpy(getattr(skimage.data, name)()).float()
    grey = values[..., :3].mean(-1) if values.dim() == 3 else values
    border = grey.shape[1] * 3 // 4
    grey = (grey - grey.mean()) / grey.std()
    return grey[:, border:] if held_out else grey[:, :border]


def mosaic(photographs: list[Tensor], size: tuple[int, int], random: torch.Generator) -> dict[str, Tensor]:
    """Each pixel belongs to the nearest of a few points, and each point to a texture."""
    height, width = size
    count = int(torch.randint(*PIECES, (), generator=random))
    points = torch.rand(count, 2, generator=random) * torch.tensor([height, width])
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    distance = torch.hypot(rows[..., None] - points[:, 0], columns[..., None] - points[:, 1])
    nearest, piece = distance.topk(2, largest=False)  # (H, W, 2)
    image, mask = torch.zeros(size), torch.zeros(size, dtype=torch.int64)
    for number in range(count):
        texture = int(torch.randint(len(photographs), (), generator=random))
        here = piece[..., 0] == number
        image[here], mask[here] = filled(photographs[texture], size, random)[here], texture
    apart = torch.linalg.vector_norm(points[piece[..., 0]] - points[piece[..., 1]], dim=-1)
    mask[nearest[..., 1] ** 2 - nearest[..., 0] ** 2 < 2 * BORDER * apart] = IGNORED  # the border lies midway
    light = torch.rand(3, 1, 1, generator=random) * 0.4 + 0.8
    return {"image": image * light + 0.1 * torch.randn(3, *size, generator=random), "mask": mask}


def filled(photograph: Tensor, size: tuple[int, int], random: torch.Generator) -> Tensor:
    """A random part, mirrored at the photograph's borders where it is too small, turned or not."""
    if torch.rand((), generator=random) < 0.5:
        photograph = photograph.T
    for dim, wanted in enumerate(size):
        there = photograph.shape[dim]
        first = int(torch.randint(2 * there, (), generator=random))
        index = (first + torch.arange(wanted)) % (2 * there)
        photograph = photograph.index_select(dim, torch.minimum(index, 2 * there - 1 - index))
    return photograph


def segformer() -> nn.Module:
    """An eighth of the smallest published one: 0.49 million parameters."""
    config = SegformerConfig(
        hidden_sizes=[24, 48, 80, 96],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=64,
        drop_path_rate=0.0,
        num_labels=len(TEXTURES),
    )
    return SegformerForSemanticSegmentation(config)


def scores(model: nn.Module, image: Tensor) -> Tensor:
    """(N, classes, H, W) of (N, 3, H, W); the model gives a quarter of the size."""
    return F.interpolate(model(image).logits, size=image.shape[-2:], mode="bilinear")


def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Cross entropy as (sum, count): the pixels at borders count neither here nor there, on any rank or replica."""
    wrong = F.cross_entropy(scores(model, batch["image"]), batch["mask"], ignore_index=IGNORED, reduction="sum")
    return wrong, (batch["mask"] != IGNORED).sum()


def evaluate(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """The share of pixels that are right, and intersection over union of each texture."""
    found, true = scores(model, batch["image"]).argmax(1), batch["mask"]
    counted = true != IGNORED
    results = {"right": (((found == true) & counted).sum(), counted.sum())}
    for number, name in enumerate(TEXTURES):
        ours, theirs = (found == number) & counted, true == number
        results[f"iou.{name}"] = (ours & theirs).sum(), (ours | theirs).sum()
    return results


def finish(model: nn.Module, run_dir: Path, trained: Mosaics, held_out: Mosaics) -> None:
    """Draw held-out mosaics; the network's figures and those of guessing by brightness, as JSON."""
    from mosaic_picture import draw

    device = next(model.parameters()).device
    samples = [held_out[index] for index in range(len(held_out))]
    true = torch.stack([sample["mask"] for sample in samples])
    with torch.no_grad():
        found = torch.cat([scores(model, sample["image"][None].to(device)).argmax(1).cpu() for sample in samples])
    torch.manual_seed(0)
    seen = [trained[index] for index in range(32)]
    guessed = by_brightness(seen, samples)
    results = {"network": figures(found, true), "brightness": figures(guessed, true)}
    (run_dir / "held_out.json").write_text(json.dumps(results, indent=2))
    draw(samples[:4], found[:4], guessed[:4], TEXTURES, results, run_dir / "held_out.png")


def by_brightness(seen: list[dict[str, Tensor]], samples: list[dict[str, Tensor]], steps: int = 40) -> Tensor:
    """The best guess from a pixel's brightness alone: the class that most pixels of `seen` have which are as bright."""

    def step_of(sample: dict[str, Tensor]) -> Tensor:
        return ((sample["image"].mean(0) / 3 + 1) / 2 * steps).long().clamp(0, steps - 1)

    counts = torch.zeros(steps, len(TEXTURES))
    for sample in seen:
        used = sample["mask"] != IGNORED
        counts.index_put_((step_of(sample)[used], sample["mask"][used]), torch.ones(()), accumulate=True)
    return torch.stack([counts.argmax(1)[step_of(sample)] for sample in samples])


def figures(found: Tensor, true: Tensor) -> dict[str, float]:
    """`right`: the share of pixels. `iou`: the mean over textures of intersection over union."""
    counted = true != IGNORED
    found = torch.where(counted, found, IGNORED)
    each = [((found == n) & (true == n)).sum() / ((found == n) | (true == n)).sum() for n in range(len(TEXTURES))]
    return {"right": float((found == true)[counted].float().mean()), "iou": float(sum(each) / len(each))}


def recipe(height: int = 128, width: int = 256, steps: int = 480) -> ff.Recipe:
    """What `fullframe train` asks for; smaller ones are for tests."""

    def schedule(step: int) -> float:  # up in a straight line, down in half a cosine
        return min(step / 20, 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))

    def trained() -> Mosaics:
        return Mosaics(height, width)

    def held_out() -> Mosaics:
        return Mosaics(height, width, held_out=True)

    return ff.Recipe(
        model=segformer,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        data=trained,
        batch_size=4,
        steps=steps,
        schedule=schedule,
        evaluation_data=held_out,
        evaluate=evaluate,
        evaluate_every=160,
        finish=lambda model, run_dir: finish(model, run_dir, trained(), held_out()),
    )
