"""A scan, its organs, and what the network and a guess say, in three cuts."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")  # no window: this runs wherever training runs
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

COLOURS = ("#b5533c", "#b56bb5", "#2e7fb8", "#e0c04c")  # one an organ


def draw(
    scan: Tensor, organs: tuple[Tensor, Tensor, Tensor], results: Mapping[str, Mapping[str, float]], path: Path
) -> None:
    """`scan` and each of `organs` (the truth, the network's, the guess) are (D, H, W)."""
    depth, height, width = scan.shape
    cuts = {
        "across, D = 1/2": lambda t: t[depth // 2],
        "from the front, H = 0.6": lambda t: t[:, int(0.6 * height)],
        "from the side, W = 0.35": lambda t: t[:, :, int(0.35 * width)],
    }
    network, guess = results["network"], results["usual_place"]
    titles = ("Scan (held out)", "Organs", f"3-D UNet: Dice {network['mean']:.2f}", f"Usual place: {guess['mean']:.2f}")
    figure, axes = plt.subplots(len(cuts), 4, figsize=(13, 7.6), layout="constrained")
    colours = {"cmap": ListedColormap(COLOURS), "vmin": 1, "vmax": len(COLOURS), "interpolation": "nearest"}
    for panels, (name, cut) in zip(axes, cuts.items(), strict=True):
        panels[0].set_ylabel(name)
        for panel in panels:
            panel.imshow(cut(scan).numpy(), cmap="gray", vmin=-0.3, vmax=1)
            panel.set_xticks([])
            panel.set_yticks([])
        for panel, classes in zip(panels[1:], organs, strict=True):
            shown = cut(classes)
            panel.imshow(torch.where(shown > 0, shown.double(), torch.nan).numpy(), alpha=0.75, **colours)
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set_title(title, fontsize=11)
    names = [name for name in network if name != "mean"]
    patches = [Patch(color=c, label=f"{n} {network[n]:.2f}") for c, n in zip(COLOURS, names, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=90)
    plt.close(figure)
