"""Six images, the vehicles as they are, and as the network sees them."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from torch import Tensor

matplotlib.use("Agg")  # no window: this runs wherever training runs
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROWS = ((5, 0, 1), (4, 3, 2))  # cameras as they look: left, ahead, right; and behind
TITLES = ("front left", "front", "front right", "back left", "back", "back right")


def draw(sample: Mapping[str, Tensor], probability: Tensor, results: Mapping[str, float], path: Path) -> None:
    """One sample, (1, ...) as the data set gives it, and (cells, cells) how likely a vehicle is; ahead is up."""
    figure = plt.figure(figsize=(15, 3.6), layout="constrained")
    axes = figure.subplot_mosaic(
        [[0, 1, 2, "true", "seen"], [3, 4, 5, "true", "seen"]], width_ratios=[1.6, 1.6, 1.6, 1.3, 1.3]
    )
    for panel, (camera, title) in enumerate(zip(sum(ROWS, ()), TITLES, strict=True)):
        axes[panel].imshow(sample["image"][0, camera].permute(1, 2, 0).cpu().numpy())
        axes[panel].set_title(title, fontsize=10)
    true = sample["vehicles"][0, 0]
    for name, ground, title in (("true", true, "Vehicles, true"), ("seen", probability, "Vehicles, predicted")):
        from_above(axes[name], ground, title)
    for panel in axes.values():
        panel.set_xticks([])
        panel.set_yticks([])
    figure.supxlabel(
        f"A street that training never saw. IoU over all such: {results['network']:.2f}; "
        f"of the best map that looks at no image {results['map']:.2f}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def from_above(panel: Axes, ground: Tensor, title: str) -> None:
    """The vehicle itself is the mark in the middle."""
    panel.imshow(ground.flip(0, 1).detach().cpu().numpy(), cmap="inferno", vmin=0, vmax=1)
    middle = (len(ground) - 1) / 2
    panel.plot(middle, middle, marker="^", color="cyan", markersize=7)
    panel.set_title(title, fontsize=10)
