"""The loss of DETR (Carion et al., ECCV 2020): each true box is paired with one prediction, by the Hungarian method.

The pairing is an op of its own with a shape that does not depend on values, so that `fullframe plan` can reckon
with the loss where there are no values.
"""

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

LENGTH, OVERLAP = 5.0, 2.0  # what the distance and the overlap of boxes count beside the class, as in the paper
NOTHING = 0.2  # what a prediction counts that has no box


@torch.library.custom_op("fullframe_examples::paired", mutates_args=())
def paired(cost: Tensor, real: Tensor) -> Tensor:
    """The prediction of each box, (N, M) int64, of costs (N, Q, M); Q for those that `real`, (N, M), calls padding."""
    result = torch.full(real.shape, cost.shape[1])
    for number, (costs, there) in enumerate(zip(cost.detach().cpu(), real.cpu(), strict=True)):
        boxes = there.nonzero().flatten()
        predictions, columns = linear_sum_assignment(costs[:, boxes])
        result[number, boxes[columns]] = torch.from_numpy(predictions)
    return result.to(cost.device)


@paired.register_fake
def _(cost: Tensor, real: Tensor) -> Tensor:
    return torch.empty_like(real, dtype=torch.int64)


def loss_of_layer(logits: Tensor, boxes: Tensor, classes: Tensor, true: Tensor, real: Tensor) -> Tensor:
    """The sum over all true boxes.

    logits: (N, Q, classes + 1), the last is nothing. boxes: (N, Q, 4). classes: (N, M). true: (N, M, 4). real: (N, M).
    """
    queries, nothing = logits.shape[1], logits.shape[2] - 1
    likely = logits.softmax(-1).gather(2, classes[:, None].expand(-1, queries, -1))
    distance = (boxes[:, :, None] - true[:, None]).abs().sum(-1)  # (N, Q, M)
    cost = LENGTH * distance - likely - OVERLAP * overlap(boxes[:, :, None], true[:, None])[1]
    index = paired(cost.detach(), real)
    target = torch.full_like(logits[..., 0], nothing, dtype=torch.int64)
    target = F.pad(target, (0, 1)).scatter(1, index, classes)[:, :queries]
    weight = torch.ones_like(logits[0, 0])
    weight[nothing] = NOTHING
    wrong = F.cross_entropy(logits.transpose(1, 2), target, weight, reduction="sum")
    chosen = boxes.gather(1, index.clamp(max=queries - 1)[..., None].expand(-1, -1, 4))
    off = LENGTH * (chosen - true).abs().sum(-1) + OVERLAP * (1 - overlap(chosen, true)[1])
    return wrong + torch.where(real, off, 0.0).sum()


def overlap(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union, and the generalized one (Rezatofighi et al., CVPR 2019), of boxes (..., 4).

    A box is its middle x, y, and its width and height.
    """
    first = torch.maximum(one[..., :2] - one[..., 2:] / 2, other[..., :2] - other[..., 2:] / 2)
    last = torch.minimum(one[..., :2] + one[..., 2:] / 2, other[..., :2] + other[..., 2:] / 2)
    outer_first = torch.minimum(one[..., :2] - one[..., 2:] / 2, other[..., :2] - other[..., 2:] / 2)
    outer_last = torch.maximum(one[..., :2] + one[..., 2:] / 2, other[..., :2] + other[..., 2:] / 2)
    both = (last - first).clamp(min=0).prod(-1)
    either = one[..., 2:].prod(-1) + other[..., 2:].prod(-1) - both
    around = (outer_last - outer_first).prod(-1).clamp(min=1e-9)
    shared = both / either.clamp(min=1e-9)  # padding has no area
    return shared, shared - (around - either) / around
