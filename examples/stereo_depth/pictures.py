"""What a run looked like and what the network sees, as PNG."""

import json
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")  # no window: this runs wherever training runs
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d9822b", "#b9c4d0"


def draw_curves(metrics: Path, path: Path) -> None:
    """Loss of every step, and end-point error on the held-out columns and on the others."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = [r for r in records if "end_point_error" in r]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
    left.plot(steps, losses, color=_GREY, linewidth=1, label="each step")
    left.plot(steps, smoothed(losses), color=_BLUE, linewidth=2, label="smoothed")
    _finish(left, "Training loss", "smooth L1, pixels")
    steps = [r["step"] for r in measured]
    for name, color, label in (
        ("end_point_error", _ORANGE, "held-out columns"),
        ("end_point_error_seen", _BLUE, "trained columns"),
    ):
        right.plot(steps, [r[name] for r in measured], color=color, linewidth=2, marker="o", markersize=4, label=label)
    _finish(right, "End-point error", "mean error, pixels")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_depth(photo: Tensor, measured: Tensor, predicted: Tensor, held_out: slice, path: Path) -> None:
    """Left photograph (3, H, W) in 0 to 1, measured and predicted disparity (H, W) in pixels on one colour scale."""
    known = torch.isfinite(measured)
    span = {"vmin": float(measured[known].min()), "vmax": float(measured[known].max()), "cmap": "turbo"}
    unseen = known.clone()
    unseen[:, : held_out.start] = unseen[:, held_out.stop :] = False
    error = float((predicted - measured)[unseen].abs().mean())
    figure, axes = plt.subplots(1, 3, figsize=(15, 3.75), layout="constrained")
    axes[0].imshow(photo.permute(1, 2, 0).numpy())
    axes[1].imshow(torch.where(known, measured, torch.nan).numpy(), **span)
    shown = axes[2].imshow(predicted.numpy(), **span)
    titles = ("Left photograph", "Measured disparity (white: not measured)", "Predicted disparity")
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, fontsize=11)
        panel.set_xticks([])
        panel.set_yticks([])
        for column in (held_out.start, held_out.stop):
            panel.axvline(column - 0.5, color="white", linewidth=3)
            panel.axvline(column - 0.5, color="black", linestyle="--", linewidth=1.2)
    figure.colorbar(shown, ax=axes, shrink=0.85, pad=0.01, label="disparity, pixels")
    figure.supxlabel(
        f"Between the dashed lines: not used in the loss; mean error there {error:.2f} pixels", fontsize=10
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def smoothed(values: list[float | None], weight: float = 0.8) -> list[float]:
    """Running mean that forgets `weight` of itself a step; a skipped step (None) repeats the last value."""
    means: list[float] = []
    total = mass = 0.0
    for value in values:
        if value is not None:
            total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        means.append(total / mass if mass else float("nan"))
    return means


def _finish(panel: Axes, title: str, ylabel: str) -> None:
    panel.set_title(title, fontsize=11)
    panel.set_xlabel("optimizer step")
    panel.set_ylabel(ylabel)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    panel.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    panel.tick_params(axis="y", which="minor", labelsize=8)
    panel.grid(which="both", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
