"""Photographs with the shapes that are there, and those that the network sees."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from torch import Tensor

matplotlib.use("Agg")  # no window: this runs wherever training runs
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

COLOURS = ("#ffd92f", "#66e0ff", "#ff66cc")
SURE, SHOWN = 0.5, (2, 6)


def draw(
    batch: Mapping[str, Tensor],
    likely: Tensor,
    boxes: Tensor,
    names: Sequence[str],
    results: Mapping[str, Mapping[str, float]],
    path: Path,
) -> None:
    """Solid: predictions that are likelier than SURE; dashed: the truth."""
    figure, axes = plt.subplots(*SHOWN, figsize=(15, 4.3), layout="constrained")
    for number, panel in enumerate(axes.flat):
        panel.imshow(batch["image"][number].clamp(0, 1).permute(1, 2, 0).numpy())
        panel.set_xticks([])
        panel.set_yticks([])
        height, width = batch["image"].shape[-2:]
        for box in batch["boxes"][number][batch["boxes_mask"][number]]:
            outline(panel, box, (width, height), "white", "--", 1.0)
        for box, scores in zip(boxes[number], likely[number], strict=True):
            if float(scores.max()) > SURE:
                outline(panel, box, (width, height), COLOURS[int(scores.argmax())], "-", 2.0)
    network, usual = results["network"], results["usual_boxes"]
    patches = [Patch(color=colour, label=name) for colour, name in zip(COLOURS, names, strict=True)]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(names), frameon=False)
    figure.supxlabel(
        "Photographs that training never saw; dashed: the truth. "
        f"AP50 {network['ap50']:.2f}, IoU {network['iou']:.2f}; "
        f"boxes that look at no image {usual['ap50']:.2f}, {usual['iou']:.2f}",
        fontsize=10,
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def outline(panel: Axes, box: Tensor, size: tuple[int, int], colour: str, style: str, thickness: float) -> None:
    """A box in shares of the image's `size`, width and height."""
    x, y, width, height = (float(v) for v in box)
    corner = (x - width / 2) * size[0] - 0.5, (y - height / 2) * size[1] - 0.5
    panel.add_patch(
        Rectangle(
            corner,
            width * size[0],
            height * size[1],
            fill=False,
            edgecolor=colour,
            linestyle=style,
            linewidth=thickness,
        )
    )
