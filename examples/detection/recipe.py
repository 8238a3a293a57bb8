"""Shapes on photographs: DETR learns to say which there are, and where.

The photographs are scikit-image's; those on which it is judged are no part of the training.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import skimage.data
import torch
import torch.nn.functional as F
from judging import average_precision, best_overlap, usual_boxes
from matching import loss_of_layer
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import ConvNextConfig, DetrConfig, DetrForObjectDetection

import fullframe as ff
from fullframe.data import Padded

PHOTOGRAPHS = (
    "brick", "coffee", "coins", "grass", "gravel", "hubble_deep_field", "immunohistochemistry", "moon", "retina",
    "rocket",
)  # fmt: skip
HELD_OUT = ("astronaut", "camera", "chelsea")
SAMPLES_HELD_OUT = 48
CLASSES = ("rectangle", "ellipse", "triangle")
MOST, SIZES = 3, (0.3, 0.6)  # shapes on a photograph, and their sides as shares of its height
QUERIES = 8


class Shapes(Dataset[dict[str, Tensor]]):
    """One to MOST shapes on a part of a photograph; those held out are the same in every run.

    image: (3, H, W) in 0 to 1. boxes: (shapes, 4), middle x, y, width and height in shares of W and H.
    classes: (shapes,) int64.
    """

    def __init__(self, height: int, width: int, samples: int = 8192, held_out: bool = False):
        self.size, self.held_out = (height, width), held_out
        self.samples = SAMPLES_HELD_OUT if held_out else samples
        self.photographs = [photograph(name) for name in (HELD_OUT if held_out else PHOTOGRAPHS)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        seed = index if self.held_out else int(torch.randint(2**62, ()))
        return drawn(self.photographs[index % len(self.photographs)], self.size, torch.Generator().manual_seed(seed))


def photograph(name: str) -> Tensor:
    """(3, H, W) in 0 to 1, grey."""
    values = torch.from_numpy(getattr(skimage.data, name)()).float() / 255
    return (values[..., :3].mean(-1) if values.dim() == 3 else values).expand(3, -1, -1)


def drawn(photo: Tensor, size: tuple[int, int], random: torch.Generator) -> dict[str, Tensor]:
    """A random part of the photograph, and shapes on it that hardly cover each other."""
    height, width = size
    scale = min(photo.shape[1] / height, photo.shape[2] / width) * (0.5 + 0.5 * float(torch.rand((), generator=random)))
    part = [int(scale * height), int(scale * width)]
    top, left = (
        int(torch.randint(there - here + 1, (), generator=random))
        for there, here in zip(photo.shape[1:], part, strict=True)
    )
    image = F.interpolate(photo[None, :, top : top + part[0], left : left + part[1]], size=size, mode="area")[0]
    rows, columns = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    boxes, classes = [], []
    taken = torch.zeros(size, dtype=torch.bool)
    for _ in range(int(torch.randint(1, MOST + 1, (), generator=random))):
        sides = (SIZES[0] + (SIZES[1] - SIZES[0]) * torch.rand(2, generator=random)) * height  # width, height
        middle = sides / 2 + torch.rand(2, generator=random) * (torch.tensor([width, height]) - sides)
        kind = int(torch.randint(len(CLASSES), (), generator=random))
        x, y = (columns - middle[0]) / sides[0] * 2, (rows - middle[1]) / sides[1] * 2  # in -1 to 1
        inside = (x.abs() < 1) & (y.abs() < 1)
        if (inside & taken).any():
            continue
        taken |= inside
        shape = (inside, x**2 + y**2 < 1, inside & (2 * x.abs() < y + 1))[kind]
        colour = torch.rand(3, 1, generator=random) * 0.5
        colour[kind] += 0.5  # rectangles are rather red, ellipses green, triangles blue
        image[:, shape] = 0.85 * colour + 0.15 * image[:, shape]
        boxes.append(torch.cat([middle, sides]) / torch.tensor([width, height, width, height]))
        classes.append(kind)
    noisy = image + 0.02 * torch.randn(image.shape, generator=random)
    return {"image": noisy, "boxes": torch.stack(boxes), "classes": torch.tensor(classes)}


class Detr(nn.Module):
    """DETR on a small ConvNeXt, and what each of its decoder's layers says.

    From a ResNet it would keep the first stage and all batch norms as they are, which wants weights that were trained.
    """

    def __init__(self) -> None:
        super().__init__()
        backbone = ConvNextConfig(
            num_stages=2,
            hidden_sizes=[48, 96],
            depths=[1, 2],
            out_features=["stage2"],
            layer_scale_init_value=0.5,  # these three would be too small for a few hundred steps from random weights:
            initializer_range=0.05,
        )
        config = DetrConfig(
            backbone_config=backbone,
            d_model=96,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=192,
            decoder_ffn_dim=192,
            num_queries=QUERIES,
            num_labels=len(CLASSES),
            dropout=0.0,
            auxiliary_loss=True,
            init_std=0.08,
        )
        self.detr = DetrForObjectDetection(config)
        nn.init.normal_(self.detr.model.query_position_embeddings.weight)  # as in the paper: queries that differ
        self.train()

    def train(self, mode: bool = True) -> "Detr":
        """In training the encoder's layers look for infinities, and a plan has no values to look at.

        Nothing else in them depends on the mode, as no dropout is set.
        """
        super().train(mode)
        for layer in self.detr.model.encoder.layers:
            layer.training = False
        return self

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Images (N, 3, H, W) to logits (layers, N, Q, classes + 1), the last for nothing; boxes (layers, N, Q, 4)."""
        states = self.detr.model(image).intermediate_hidden_states
        return self.detr.class_labels_classifier(states), self.detr.bbox_predictor(states).sigmoid()


def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss of each of the decoder's layers, as (sum, count of true boxes)."""
    true = batch["classes"], batch["boxes"], batch["boxes_mask"]
    layers = [loss_of_layer(*layer, *true) for layer in zip(*model(batch["image"]), strict=True)]
    return torch.stack(layers).sum(), batch["boxes_mask"].sum()


def evaluate(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """How well the best prediction of its class covers a true box: the mean intersection over union."""
    covered = best_overlap(*predictions(model, batch["image"]), batch)
    return {"iou": (covered.sum(), covered.new_tensor(len(covered)))}


def predictions(model: nn.Module, image: Tensor) -> tuple[Tensor, Tensor]:
    """How likely each class is, (N, Q, classes), and boxes (N, Q, 4), of the last layer."""
    logits, boxes = model(image)
    return logits[-1].softmax(-1)[..., :-1], boxes[-1]


def finish(model: nn.Module, run_dir: Path, trained: Shapes, held_out: Shapes) -> None:
    """Draw held-out samples; the network's figures and those of boxes that look at no image, as JSON."""
    from detection_picture import draw

    device = next(model.parameters()).device
    batch = Padded(("boxes", "classes"))([held_out[index] for index in range(len(held_out))])
    with torch.no_grad():
        likely, boxes = (t.cpu() for t in predictions(model, batch["image"].to(device)))
    torch.manual_seed(0)
    fixed = usual_boxes([trained[index] for index in range(256)], QUERIES, len(CLASSES))
    fixed = tuple(t.expand(len(held_out), *t.shape) for t in fixed)
    results = {
        name: {"iou": float(best_overlap(*found, batch).mean()), "ap50": average_precision(*found, batch)}
        for name, found in (("network", (likely, boxes)), ("usual_boxes", fixed))
    }
    (run_dir / "held_out.json").write_text(json.dumps(results, indent=2))
    draw(batch, likely, boxes, CLASSES, results, run_dir / "held_out.png")


def recipe(height: int = 64, width: int = 96, steps: int = 1200) -> ff.Recipe:
    """What `fullframe train` asks for; smaller ones are for tests."""

    def schedule(step: int) -> float:  # up in a straight line, down in half a cosine
        return min(step / 40, 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))

    def trained() -> Shapes:
        return Shapes(height, width)

    def held_out() -> Shapes:
        return Shapes(height, width, held_out=True)

    return ff.Recipe(
        model=Detr,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-3),
        data=trained,
        collate=Padded(("boxes", "classes")),
        batch_size=8,
        steps=steps,
        schedule=schedule,
        evaluation_data=held_out,
        evaluate=evaluate,
        evaluate_every=400,
        finish=lambda model, run_dir: finish(model, run_dir, trained(), held_out()),
    )
