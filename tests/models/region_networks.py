"""Mask R-CNN (He 2017) in the idioms of torchvision's detection package, with its losses."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.networks import conv_bn_relu
from tests.models.perception_inputs import mask_lists, with_boxes
from tests.models.perception_networks import backbone
from tests.models.zoo import Inputs
from tests.spatial.torchvision_kernels import torchvision_ops

CLIP = math.log(1000.0 / 16)
STRIDES = (4, 8)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """(N, 4), (M, 4) corners to (N, M)."""
    inner = (torch.min(a[:, None, 2:], b[:, 2:]) - torch.max(a[:, None, :2], b[:, :2])).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (a, b)]
    return inner / (areas[0][:, None] + areas[1] - inner)


def encoded(wanted: Tensor, boxes: Tensor) -> Tensor:
    size, target = boxes[:, 2:] - boxes[:, :2], wanted[:, 2:] - wanted[:, :2]
    shift = (wanted[:, :2] + target / 2 - boxes[:, :2] - size / 2) / size
    return torch.cat((shift, torch.log(target / size)), dim=1)


def decoded(codes: Tensor, boxes: Tensor) -> Tensor:
    """Codes (N, classes * 4), boxes (N, 4) to (N, classes, 4)."""
    codes = codes.reshape(codes.size(0), -1, 4)
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    x = codes[..., 0] * width[:, None] + (boxes[:, 0] + 0.5 * width)[:, None]
    y = codes[..., 1] * height[:, None] + (boxes[:, 1] + 0.5 * height)[:, None]
    half_w = torch.exp(codes[..., 2].clamp(max=CLIP)) * width[:, None] * 0.5
    half_h = torch.exp(codes[..., 3].clamp(max=CLIP)) * height[:, None] * 0.5
    return torch.stack((x - half_w, y - half_h, x + half_w, y + half_h), dim=2)


def clipped(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    x, y = boxes[..., 0::2].clamp(min=0, max=size[1]), boxes[..., 1::2].clamp(min=0, max=size[0])
    return torch.stack((x, y), dim=boxes.dim()).reshape(boxes.shape)


def suppressed(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> Tensor:
    """Groups far apart, so that boxes of different ones do not meet."""
    if boxes.numel() == 0:
        return torch.empty((0,), dtype=torch.int64, device=boxes.device)
    offsets = groups.to(boxes) * (boxes.max() + torch.tensor(1).to(boxes))
    return torchvision_ops().nms(boxes + offsets[:, None], scores, threshold)  # type: ignore[no-any-return]


def drawn(labels: Tensor, count: int, share: float) -> tuple[Tensor, Tensor]:
    """Masks of the positives and the negatives that a loss takes, by chance."""
    positive, negative = torch.where(labels >= 1)[0], torch.where(labels == 0)[0]
    few = min(positive.numel(), int(count * share))
    masks = []
    for indices, number in ((positive, few), (negative, min(negative.numel(), count - few))):
        mask = torch.zeros_like(labels, dtype=torch.uint8)
        mask[indices[torch.randperm(indices.numel(), device=labels.device)[:number]]] = 1
        masks.append(mask)
    return masks[0], masks[1]


def by_anchor(layer: Tensor, n: int, a: int, c: int, h: int, w: int) -> Tensor:
    return layer.view(n, -1, c, h, w).permute(0, 3, 4, 1, 2).reshape(n, -1, c)


class Proposals(nn.Module):
    def __init__(self, width: int, shapes: int = 2):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.score, self.move = nn.Conv2d(width, shapes, 1), nn.Conv2d(width, 4 * shapes, 1)

    def anchors(self, features: list[Tensor]) -> list[Tensor]:
        found = []
        for x, stride in zip(features, STRIDES, strict=True):
            half = torch.tensor([[2.0, 4.0], [4.0, 2.0]], dtype=x.dtype, device=x.device) * stride
            down = torch.arange(0, x.shape[-2], dtype=torch.int32, device=x.device) * stride
            right = torch.arange(0, x.shape[-1], dtype=torch.int32, device=x.device) * stride
            y, x_ = (grid.reshape(-1) for grid in torch.meshgrid(down, right, indexing="ij"))
            shifts = torch.stack((x_, y, x_, y), dim=1)
            found.append((shifts.view(-1, 1, 4) + torch.cat((-half, half), 1).view(1, -1, 4)).reshape(-1, 4))
        return found

    def forward(
        self, features: list[Tensor], size: tuple[int, int], boxes: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        scores = [self.score(self.conv(x)) for x in features]
        moves = [self.move(self.conv(x)) for x in features]
        levels = self.anchors(features)
        anchors, counts, n = torch.cat(levels), [len(level) for level in levels], len(boxes)
        flat = []
        for score, move in zip(scores, moves, strict=True):
            _, a, h, w = score.shape
            flat.append((by_anchor(score, n, a, 1, h, w), by_anchor(move, n, a, 4, h, w)))
        objectness = torch.cat([score for score, _ in flat], dim=1).flatten(0, -2)
        codes = torch.cat([move for _, move in flat], dim=1).reshape(-1, 4)
        proposals = decoded(codes.detach(), anchors.repeat(n, 1)).view(n, -1, 4)
        return self.best(proposals, objectness, counts, size), self.loss(objectness, codes, anchors, boxes)

    def best(self, proposals: Tensor, objectness: Tensor, counts: list[int], size: tuple[int, int]) -> list[Tensor]:
        n, device = proposals.shape[0], proposals.device
        objectness = objectness.detach().reshape(n, -1)
        levels = torch.cat([torch.full((c,), i, dtype=torch.int64, device=device) for i, c in enumerate(counts)])
        levels = levels.reshape(1, -1).expand_as(objectness)
        top, offset = [], 0
        for scores in objectness.split(counts, 1):
            top.append(scores.topk(min(60, scores.shape[1]), dim=1)[1] + offset)
            offset += scores.shape[1]
        best, image = torch.cat(top, dim=1), torch.arange(n, device=device)[:, None]
        found = []
        for boxes, scores, level in zip(
            proposals[image, best], torch.sigmoid(objectness[image, best]), levels[image, best], strict=True
        ):
            boxes = clipped(boxes, size)
            keep = torch.where((boxes[:, 2] - boxes[:, 0] >= 1e-3) & (boxes[:, 3] - boxes[:, 1] >= 1e-3))[0]
            boxes, scores, level = boxes[keep], scores[keep], level[keep]
            found.append(boxes[suppressed(boxes, scores, level, 0.7)[:30]])
        return found

    def loss(self, objectness: Tensor, codes: Tensor, anchors: Tensor, boxes: list[Tensor]) -> Tensor:
        labels, wanted = [], []
        for own in boxes:
            overlap, matched = iou(own, anchors).max(dim=0)
            overlap = torch.where(torch.isin(torch.arange(len(anchors)), iou(own, anchors).argmax(1)), 1.0, overlap)
            labels.append(torch.where(overlap >= 0.5, 1.0, torch.where(overlap < 0.3, 0.0, -1.0)).to(anchors.dtype))
            wanted.append(encoded(own[matched], anchors))
        chosen = [drawn(label, 64, 0.5) for label in labels]
        positive = torch.where(torch.cat([p for p, _ in chosen], dim=0))[0]
        negative = torch.where(torch.cat([n for _, n in chosen], dim=0))[0]
        taken, label, target = torch.cat([positive, negative]), torch.cat(labels), torch.cat(wanted)
        moved = F.smooth_l1_loss(codes[positive], target[positive], beta=1 / 9, reduction="sum") / taken.numel()
        return moved + F.binary_cross_entropy_with_logits(objectness.flatten()[taken], label[taken])


class MaskRCNN(nn.Module):
    def __init__(self, width: int = 8, classes: int = 4):
        super().__init__()
        self.stem, self.deeper = backbone(width), conv_bn_relu(width, width, stride=2)
        self.lateral = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in STRIDES)
        self.proposals = Proposals(width)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(width * 9, 16), nn.ReLU())
        self.scores, self.moves = nn.Linear(16, classes), nn.Linear(16, 4 * classes)
        self.masks = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(width, width, 2, 2), nn.ReLU(),
            nn.Conv2d(width, classes, 1),
        )  # fmt: skip

    def pooled(self, features: list[Tensor], boxes: list[Tensor], size: int) -> Tensor:
        """(K, C, size, size): each region from the level that its size calls for."""
        flat = torch.cat(boxes, dim=0)
        image = torch.cat([torch.full_like(b[:, :1], i) for i, b in enumerate(boxes)], dim=0)
        regions = torch.cat([image, flat], dim=1)
        levels = (((flat[:, 2:] - flat[:, :2]).prod(1).sqrt() / 24).log2() + 1e-6).floor().clamp(0, 1).to(torch.int64)
        result = torch.zeros((len(regions), features[0].shape[1], size, size), dtype=flat.dtype, device=flat.device)
        for level, (x, stride) in enumerate(zip(features, STRIDES, strict=True)):
            here = torch.where(levels == level)[0]
            read = torchvision_ops().roi_align(x, regions[here], 1 / stride, size, size, 2, False)
            result[here] = read.to(result.dtype)
        return result

    def forward(self, images: Tensor, targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        first = self.stem(images)
        inner = [lateral(x) for lateral, x in zip(self.lateral, (first, self.deeper(first)), strict=True)]
        features = [inner[0] + F.interpolate(inner[1], size=inner[0].shape[-2:], mode="nearest"), inner[1]]
        boxes = [target["boxes"] for target in targets]
        size = images.shape[-2], images.shape[-1]
        proposals, proposed = self.proposals(features, size, boxes)
        taken, labels, wanted, matched = [], [], [], []
        for found, target in zip(proposals, targets, strict=True):
            found = torch.cat((found, target["boxes"]))
            overlap, match = iou(target["boxes"], found).max(dim=0)
            label = torch.where(overlap >= 0.5, target["labels"][match], 0)
            chosen = torch.where(sum(drawn(label, 16, 0.25)))[0]  # type: ignore[arg-type]
            taken.append(found[chosen].detach())
            labels.append(label[chosen])
            matched.append(match[chosen])
            wanted.append(encoded(target["boxes"][match[chosen]], found[chosen]))
        label = torch.cat(labels)
        read = self.head(self.pooled(features, taken, 3))
        moves, positive = self.moves(read).reshape(len(label), -1, 4), torch.where(label > 0)[0]
        moved = F.smooth_l1_loss(
            moves[positive, label[positive]], torch.cat(wanted)[positive], beta=1 / 9, reduction="sum"
        )
        objects = [torch.where(label > 0)[0] for label in labels]
        drawn_masks = self.masks(self.pooled(features, [t[o] for t, o in zip(taken, objects, strict=True)], 7))
        targets_of = []
        for target, match, box, o in zip(targets, matched, taken, objects, strict=True):
            rows = torch.cat([match[o][:, None].to(box), box[o]], dim=1)
            shapes = target["masks"][:, None].to(box)
            targets_of.append(torchvision_ops().roi_align(shapes, rows, 1.0, 14, 14, -1, False)[:, 0])
        own = label[positive]
        mask = F.binary_cross_entropy_with_logits(
            drawn_masks[torch.arange(len(own), device=own.device), own], torch.cat(targets_of, dim=0)
        )
        return {"proposals": proposed, "classes": F.cross_entropy(self.scores(read), label),
                "boxes": moved / label.numel(), "masks": mask}  # fmt: skip


def objects_with_masks(height: int, width: int) -> Inputs:
    """Boxes as shares of the image, and all objects' masks as one tensor."""
    return {**with_boxes(height, width), "masks": torch.cat(mask_lists(height, width))}


def mask_rcnn_loss(model: Any, inputs: Any) -> Tensor:
    height, width = inputs["pixel_values"].shape[-2:]
    scale = torch.tensor([width, height, width, height])
    targets = []
    masks = inputs["masks"].split([len(label["boxes"]) for label in inputs["labels"]])
    for label, own in zip(inputs["labels"], masks, strict=True):
        center, size = label["boxes"][:, :2], label["boxes"][:, 2:]
        corners = torch.cat((center - size / 2, center + size / 2), 1) * scale
        targets.append({"boxes": corners, "labels": label["class_labels"] + 1, "masks": own})
    return sum(model(inputs["pixel_values"], targets).values(), torch.zeros((), dtype=torch.float64))
