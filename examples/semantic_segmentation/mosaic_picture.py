"""Mosaics, the textures in them, and where the network and a guess see which."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")  # no window: this runs wherever training runs
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

COLOURS = ("#b5533c", "#4c9f4c", "#8c8c8c", "#b56bb5", "#26365f")


def draw(
    samples: Sequence[Mapping[str, Tensor]],
    found: Tensor,
    guessed: Tensor,
    names: Sequence[str],
    results: Mapping[str, Mapping[str, float]],
    path: Path,
) -> None:
    """A row for each sample; `found` and `guessed` are (N, H, W) classes."""
    figure, axes = plt.subplots(len(samples), 4, figsize=(13, 1.75 * len(samples)), layout="constrained", squeeze=False)
    colours = {"cmap": ListedColormap(COLOURS), "vmin": 0, "vmax": len(names) - 1, "interpolation": "nearest"}
    for panels, sample, network, guess in zip(axes, samples, found, guessed, strict=True):
        panels[0].imshow((sample["image"].mean(0) / 5 + 0.5).clamp(0, 1), cmap="gray", vmin=0, vmax=1)
        true = torch.where(sample["mask"] < len(names), sample["mask"].double(), torch.nan)
        for panel, classes in zip(panels[1:], (true, network, guess), strict=True):
            panel.imshow(classes.numpy(), **colours)
        for panel in panels:
            panel.set_xticks([])
            panel.set_yticks([])
    network, guess = results["network"], results["brightness"]
    titles = (
        "Mosaic (held out)",
        "Textures (white: ignored)",
        f"SegFormer: {network['right']:.0%} right, mean IoU {network['iou']:.2f}",
        f"By brightness: {guess['right']:.0%}, {guess['iou']:.2f}",
    )
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set_title(title, fontsize=10)
    patches = [Patch(color=colour, label=name.replace("_", " ")) for colour, name in zip(COLOURS, names, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
