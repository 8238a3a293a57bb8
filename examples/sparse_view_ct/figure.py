"""What was held out, as figures and as PNG: image, filtered back-projection, reconstruction."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from radon import Scan
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor

matplotlib.use("Agg")  # no window: this runs wherever training runs
from matplotlib import pyplot as plt

Results = list[dict[str, float | str]]


def judged(names: Sequence[str], samples: Sequence[Mapping[str, Tensor]], found: Sequence[Tensor]) -> Results:
    """PSNR in dB and SSIM of filtered back-projection and reconstruction, clipped to 0 to 1, of each image."""
    results: Results = []
    for name, sample, image in zip(names, samples, found, strict=True):
        true = picture(sample["image"])
        row: dict[str, float | str] = {"name": name}
        for kind, other in (("filtered", picture(sample["guess"])), ("network", picture(image))):
            row[f"psnr_{kind}"] = float(peak_signal_noise_ratio(true, other, data_range=1.0))
            row[f"ssim_{kind}"] = float(structural_similarity(true, other, data_range=1.0))
        results.append(row)
    return results


def draw(
    results: Results, samples: Sequence[Mapping[str, Tensor]], found: Sequence[Tensor], scan: Scan, path: Path
) -> None:
    """A row for each image: the readings, filtered back-projection, reconstruction, the image itself."""
    figure, axes = plt.subplots(len(results), 4, figsize=(10, 2.6 * len(results)), layout="constrained", squeeze=False)
    for panels, row, sample, image in zip(axes, results, samples, found, strict=True):
        readings = sample["sinogram"][0].view(scan.views, scan.detectors)
        panels[0].imshow(readings.cpu().numpy(), cmap="gray", aspect="auto")
        for panel, shown in zip(panels[1:], (sample["guess"], image, sample["image"]), strict=True):
            panel.imshow(picture(shown), cmap="gray", vmin=0, vmax=1)
        for panel, kind in zip(panels[1:3], ("filtered", "network"), strict=True):
            panel.set_xlabel(f"{row[f'psnr_{kind}']:.1f} dB, SSIM {row[f'ssim_{kind}']:.2f}")
        panels[0].set_ylabel(str(row["name"]).replace("_", " "))
        for panel in panels:
            panel.set_xticks([])
            panel.set_yticks([])
    titles = (f"Readings of {scan.views} views", "Filtered back-projection", "Reconstruction", "Image (held out)")
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set_title(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def picture(image: Tensor) -> np.ndarray:
    """(1, 1, H, W) as (H, W), clipped to 0 to 1."""
    return image[0, 0].detach().double().clamp(0, 1).cpu().numpy()
