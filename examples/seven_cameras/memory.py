"""Draws how much memory each GPU needs, for one to eight of them: predicted, and published where it was.

python examples/seven_cameras/memory.py memory.png
"""

import sys
from pathlib import Path

import matplotlib
from recipe import recipe

import fullframe as ff

matplotlib.use("Agg")  # no window: this runs wherever training runs
from matplotlib import pyplot as plt

GPUS = (1, 2, 4, 8)
WAYS = {"nothing dropped": "none", "blocks recomputed": "blocks"}
PUBLISHED = {"nothing dropped": 43.28, "blocks recomputed": 11.89}  # GiB, by NVIDIA and NIO, on one GPU
COLOURS = ("#1f5fa8", "#d9822b")
GIB = 2**30


def predicted(job: ff.Recipe, recompute: str, gpus: int) -> float:
    """GiB that torch allocates on each of `gpus` A100-80GB, split on the width, in bf16."""
    strategy = ff.Strategy(width=gpus, precision="bf16", recompute=recompute)  # type: ignore[arg-type]
    return ff.simulate(job, strategy, f"{gpus}xA100-80GB").peak_bytes / GIB


def draw(memory: dict[str, list[float]], path: Path) -> None:
    """`memory`: GiB for each of GPUS, by way."""
    figure, panel = plt.subplots(figsize=(7, 3.8), layout="constrained")
    for place, (way, colour) in enumerate(zip(memory, COLOURS, strict=True)):
        left = [number + 0.38 * (place - 0.5) for number in range(len(GPUS))]
        bars = panel.bar(left, memory[way], 0.36, color=colour, label=f"{way}, predicted")
        panel.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        panel.plot(left[0], PUBLISHED[way], "D", color="black", markersize=5, label="published" if place else None)
    panel.set_xticks(range(len(GPUS)), [f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS])
    panel.set_ylabel("GiB allocated on each GPU")
    panel.set_title("ConvNeXt-XL, seven frames of 512 x 2048, bf16, split on the width", fontsize=11)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(path: Path, gpus: tuple[int, ...] = GPUS) -> None:
    """Predict, print and draw."""
    job = recipe()
    memory = {way: [predicted(job, recompute, count) for count in gpus] for way, recompute in WAYS.items()}
    for way, values in memory.items():
        print(f"{way:18}", *(f"{count} GPUs {value:6.2f} GiB  " for count, value in zip(gpus, values, strict=True)))
    draw(memory, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
