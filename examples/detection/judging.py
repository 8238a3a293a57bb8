"""How good boxes are: overlap, average precision, and boxes that look at no image, to compare with.

Predictions are how likely each class is, (N, Q, classes), and boxes (N, Q, 4); the truth is a batch as `Padded` gives.
"""

from collections.abc import Mapping, Sequence

import torch
from matching import overlap
from torch import Tensor


def best_overlap(likely: Tensor, boxes: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """(boxes,): the intersection over union of each true box and its prediction.

    That is the one with the largest product of overlap and likelihood of the box's class.
    """
    shared = overlap(boxes[:, :, None], batch["boxes"][:, None])[0]  # (N, Q, M)
    of_class = likely.gather(2, batch["classes"][:, None].expand(-1, likely.shape[1], -1))
    best = (shared * of_class).argmax(1, keepdim=True)
    return shared.gather(1, best)[:, 0][batch["boxes_mask"]]


def average_precision(likely: Tensor, boxes: Tensor, batch: Mapping[str, Tensor], threshold: float = 0.5) -> float:
    """The mean over classes of the area below precision against recall, at an overlap of `threshold`."""
    areas = []
    for kind in range(likely.shape[2]):
        real = batch["boxes_mask"] & (batch["classes"] == kind)
        shared = overlap(boxes[:, :, None], batch["boxes"][:, None])[0] * real[:, None]
        right = torch.zeros_like(likely[..., kind])
        found = torch.zeros_like(real)
        for place in likely[..., kind].flatten().argsort(descending=True).tolist():
            sample, query = divmod(place, likely.shape[1])
            best = int((shared[sample, query] * ~found[sample]).argmax())
            if shared[sample, query, best] >= threshold and not found[sample, best]:
                found[sample, best], right[sample, query] = True, 1
        order = likely[..., kind].flatten().argsort(descending=True)
        hits = right.flatten()[order].cumsum(0)
        precision = hits / torch.arange(1, len(hits) + 1)
        envelope = precision.flip(0).cummax(0).values.flip(0)  # of this recall or a higher one
        areas.append(float((envelope * right.flatten()[order]).sum() / real.sum().clamp(min=1)))
    return sum(areas) / len(areas)


def usual_boxes(samples: Sequence[Mapping[str, Tensor]], count: int, classes: int) -> tuple[Tensor, Tensor]:
    """The `count` boxes to which those of `samples` are nearest (k-means), and how often there is each class near."""
    boxes = torch.cat([sample["boxes"] for sample in samples])
    kinds = torch.cat([sample["classes"] for sample in samples])
    centres = boxes[:: len(boxes) // count][:count].clone()
    for _ in range(50):
        nearest = torch.cdist(boxes, centres).argmin(1)
        centres = torch.stack(
            [boxes[nearest == n].mean(0) if (nearest == n).any() else c for n, c in enumerate(centres)]
        )
    counts = torch.zeros(count, classes).index_put((nearest, kinds), torch.ones(()), accumulate=True)
    return counts / len(samples), centres
