"""Perception networks in the shapes users write them, with their losses: detection heads, depth by reprojection, points
in a bird's-eye map, frames in time.

Plain torch; nothing here knows that a tensor may be split.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.networks import conv_bn_relu

Inputs = dict[str, Any]


class SegNet(nn.Module):
    """Max pooling keeps where each maximum was; the decoder puts values back there (SegNet, Badrinarayanan 2015)."""

    def __init__(self, width: int = 4, classes: int = 5):
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(conv_bn_relu(before, after) for before, after in pairs)
        self.up = nn.ModuleList(conv_bn_relu(after, max(before, width)) for before, after in reversed(pairs))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, pooled = image, []
        for stage in self.down:
            x = stage(x)
            size = x.shape[-2:]
            x, where = F.max_pool2d(x, 2, stride=2, return_indices=True)
            pooled.append((where, size))
        for stage in self.up:
            where, size = pooled.pop()
            x = stage(F.max_unpool2d(x, where, 2, stride=2, output_size=size))
        return self.head(x)  # (N, classes, H, W)


class PointPillars(nn.Module):
    """Points are gathered into pillars, pillars written into a bird's-eye map that a drawn map is joined with."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.ReLU())
        self.drawn = conv_bn_relu(3, width)
        self.neck = nn.Sequential(conv_bn_relu(2 * width, width, stride=2), conv_bn_relu(width, width))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, drawn: Tensor, points: Tensor, cells: Tensor) -> Tensor:
        """A map (N, 3, H, W), points (N, P, K, 4) of P pillars, and their rows and columns (N, P, 2)."""
        pillars = self.encode(points).amax(dim=2)  # (N, P, C)
        x = self.drawn(drawn)
        n, c, h, w = x.shape
        canvas = torch.zeros_like(x).flatten(2)
        where = cells[..., 0] * w + cells[..., 1]
        canvas = canvas.scatter(2, where.unsqueeze(1).expand(-1, c, -1), pillars.transpose(1, 2))
        return self.head(self.neck(torch.cat([x, canvas.view(n, c, h, w)], dim=1)))


class ConvLSTM(nn.Module):
    """Frames (N, T, 3, H, W) one after the other, a cell of convolutions (Shi 2015), a map for the last."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.width = width
        self.stem = conv_bn_relu(3, width, stride=2)
        self.gates = nn.Conv2d(2 * width, 4 * width, 5, padding=2)
        self.head = nn.ConvTranspose2d(width, 1, 4, 2, 1)

    def forward(self, frames: Tensor) -> Tensor:
        hidden = cell = None
        for frame in frames.unbind(1):
            x = self.stem(frame)
            if hidden is None:
                hidden, cell = torch.zeros_like(x), torch.zeros_like(x)
            gates = self.gates(torch.cat([x, hidden], dim=1))
            i, f, o, g = gates.chunk(4, dim=1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return self.head(hidden)


def backbone(width: int = 8, strides: tuple[int, ...] = (2, 2, 1)) -> nn.Sequential:
    widths = (3, *(width for _ in strides))
    return nn.Sequential(*(conv_bn_relu(a, b, stride=s) for a, b, s in zip(widths, widths[1:], strides, strict=False)))


class CenterNet(nn.Module):
    """Heat of centres, sizes and offsets at a quarter of the image (Zhou 2019)."""

    def __init__(self, width: int = 8, classes: int = 3):
        super().__init__()
        self.backbone = backbone(width)
        self.heat, self.size, self.offset = (nn.Conv2d(width, c, 1) for c in (classes, 2, 2))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.backbone(image)
        return self.heat(x), self.size(x), self.offset(x)


def at_cells(x: Tensor, index: Tensor) -> Tensor:
    """(N, C, h, w) at (N, K) cells, as (N, K, C)."""
    n, c = x.shape[:2]
    x = x.permute(0, 2, 3, 1).contiguous().view(n, -1, c)
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, c))


def center_loss(model: Any, inputs: Inputs) -> Tensor:
    """Penalty-reduced focal loss, L1 at the objects' cells, and what the ten best peaks are decoded to."""
    heat, size, offset = model(inputs["image"])
    target = inputs["heat"]
    score = heat.sigmoid().clamp(1e-4, 1 - 1e-4)
    positive = target.eq(1).to(score.dtype)
    near = (1 - score).pow(2) * score.log() * positive
    far = score.pow(2) * (1 - score).log() * (1 - target).pow(4) * (1 - positive)
    loss = -(near.sum() + far.sum()) / positive.sum().clamp(min=1)
    for predicted, key in ((size, "sizes"), (offset, "offsets")):
        loss = loss + F.l1_loss(at_cells(predicted, inputs["cells"]), inputs[key])
    peaks = heat.sigmoid()
    peaks = peaks * (F.max_pool2d(peaks, 3, 1, 1) == peaks).to(peaks.dtype)
    best, where = peaks.flatten(1).topk(10)
    cells = where % (heat.shape[2] * heat.shape[3])
    boxes = torch.cat([at_cells(size, cells), at_cells(offset, cells)], dim=-1)
    return loss + (best.unsqueeze(-1) * boxes).mean()


class FCOS(nn.Module):
    """Classes, distances to the four sides and centreness at each cell of three levels (Tian 2019)."""

    def __init__(self, width: int = 8, classes: int = 3):
        super().__init__()
        self.stem = backbone(width)
        self.levels = nn.ModuleList(conv_bn_relu(width, width, stride=2) for _ in range(2))
        self.tower = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU())
        self.score, self.box, self.center = (nn.Conv2d(width, c, 3, padding=1) for c in (classes, 4, 1))
        self.scales = nn.Parameter(torch.ones(3))

    def forward(self, image: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        features = [self.stem(image)]
        for level in self.levels:
            features.append(level(features[-1]))
        towers = [self.tower(x) for x in features]
        return [
            (self.score(x), F.relu(self.box(x) * s) + 0.1, self.center(x))
            for x, s in zip(towers, self.scales, strict=True)
        ]


def tokens(x: Tensor) -> Tensor:
    """(N, C, h, w) to (N * h * w, C)."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def fcos_loss(model: Any, inputs: Inputs) -> Tensor:
    """Focal loss with class weights at all cells; GIoU and centreness at those that a mask calls positive."""
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for scores, sides, center in model(inputs["image"]):
        size = scores.shape[-2:]
        labels = F.interpolate(inputs["classes"][:, None].double(), size=size, mode="nearest")[:, 0].long().flatten()
        wanted = tokens(F.interpolate(inputs["sides"], size=size, mode="bilinear", align_corners=False)).abs() + 0.5
        scores, sides, center = tokens(scores), tokens(sides), tokens(center).squeeze(1)
        positive = labels < 3
        one_hot = F.one_hot(labels, 4)[:, :3].to(scores.dtype)
        score = scores.sigmoid()
        agreed = score * one_hot + (1 - score) * (1 - one_hot)
        focal = F.binary_cross_entropy_with_logits(scores, one_hot, reduction="none") * (1 - agreed) ** 2 * weight
        number = positive.sum().clamp(min=1)
        total = total + focal.sum() / number
        mine, theirs, center = sides[positive], wanted[positive], center[positive]
        overlap = torch.minimum(mine[:, :2], theirs[:, :2]) + torch.minimum(mine[:, 2:], theirs[:, 2:])
        inner = overlap.clamp(min=0).prod(dim=1)
        areas = [(box[:, 0] + box[:, 2]) * (box[:, 1] + box[:, 3]) for box in (mine, theirs)]
        iou = inner / (areas[0] + areas[1] - inner)
        across, down = theirs[:, [0, 2]], theirs[:, [1, 3]]
        centered = (across.amin(1) / across.amax(1) * down.amin(1) / down.amax(1)).sqrt()
        total = total + ((1 - iou) * centered).sum() / centered.sum().clamp(min=1e-6)
        total = total + F.binary_cross_entropy_with_logits(center, centered, reduction="sum") / number
    return total


class YOLO(nn.Module):
    """A head with anchors at two scales (N, A, h, w, 5 + classes), after YOLOv5."""

    def __init__(self, width: int = 8, classes: int = 3):
        super().__init__()
        self.outputs = 5 + classes
        self.stem, self.next = backbone(width), conv_bn_relu(width, width, stride=2)
        self.heads = nn.ModuleList(nn.Conv2d(width, 2 * self.outputs, 1) for _ in range(2))
        self.register_buffer("anchors", torch.tensor([[[1.0, 1.5], [2.0, 1.0]], [[3.0, 2.0], [2.0, 4.0]]]))

    def forward(self, image: Tensor) -> list[Tensor]:
        first = self.stem(image)
        found = []
        for x, head in zip((first, self.next(first)), self.heads, strict=True):
            n, _, h, w = x.shape
            found.append(head(x).view(n, 2, self.outputs, h, w).permute(0, 1, 3, 4, 2).contiguous())
        return found


def yolo_loss(model: Any, inputs: Inputs) -> Tensor:
    """Boxes and classes at the objects' cells, by index tensors; whether there is an object at all cells."""
    total = torch.zeros((), dtype=torch.float64)
    objects = inputs["objects"]  # (T, 6): image, class, centre x and y, width, height as shares of the image
    for level, found in enumerate(model(inputs["image"])):
        anchors = model.anchors[level]
        rows, columns = found.shape[2:4]
        place = objects[:, 2:4] * torch.tensor([columns, rows], dtype=torch.float64)
        size = objects[:, 4:6] * torch.tensor([columns, rows], dtype=torch.float64)
        cell = place.long()
        image, classes = objects[:, 0].long(), objects[:, 1].long()
        anchor = (size[:, None] / anchors).log().abs().amax(2).argmin(1)
        at = image, anchor, cell[:, 1], cell[:, 0]
        chosen = found[at]  # (T, 5 + classes)
        center = chosen[:, :2].sigmoid() * 2 - 0.5
        extent = (chosen[:, 2:4].sigmoid() * 2) ** 2 * anchors[anchor]
        overlap = 1 - (center - (place - cell)).abs().mean(1) - (extent - size).abs().mean(1) / 10
        exists = torch.zeros_like(found[..., 0])
        exists[at] = overlap.detach().clamp(min=0)
        total = total + (1 - overlap).mean() + F.binary_cross_entropy_with_logits(found[..., 4], exists)
        total = total + F.binary_cross_entropy_with_logits(chosen[:, 5:], F.one_hot(classes, 3).to(chosen.dtype))
    return total


class DepthByReprojection(nn.Module):
    """A disparity and a pose network, trained without depth (Monodepth2, Godard 2019)."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.encoder = backbone(width)
        self.disparity = nn.Conv2d(width, 1, 3, padding=1)
        self.pose = nn.Sequential(backbone(width), nn.Conv2d(width, 6, 1))
        self.mix = nn.Conv2d(6, 3, 1)

    def forward(self, frame: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        disparity = F.interpolate(self.disparity(self.encoder(frame)), frame.shape[-2:], mode="bilinear")
        pose = self.pose(self.mix(torch.cat([frame, other], dim=1))).mean((2, 3))
        return disparity.sigmoid(), 0.05 * pose


def structure(x: Tensor, y: Tensor) -> Tensor:
    """1 - SSIM, halved, of windows of 3 x 3."""
    x, y = F.pad(x, (1, 1, 1, 1), mode="reflect"), F.pad(y, (1, 1, 1, 1), mode="reflect")
    a, b = F.avg_pool2d(x, 3, 1), F.avg_pool2d(y, 3, 1)
    aa, bb, ab = F.avg_pool2d(x * x, 3, 1) - a * a, F.avg_pool2d(y * y, 3, 1) - b * b, F.avg_pool2d(x * y, 3, 1) - a * b
    likeness = (2 * a * b + 1e-4) * (2 * ab + 9e-4) / ((a * a + b * b + 1e-4) * (aa + bb + 9e-4))
    return ((1 - likeness) / 2).clamp(0, 1)


def reprojection_loss(model: Any, inputs: Inputs) -> Tensor:
    """The other frame seen from this one, by depth and pose; the smaller error of warped and unwarped; smoothness."""
    frame, other = inputs["left"], inputs["right"]
    disparity, pose = model(frame, other)
    n, _, h, w = frame.shape
    depth = 1 / (0.1 + 2 * disparity)
    y, x = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
    rays = torch.stack([x, y, torch.ones_like(x)]).to(frame).expand(n, 3, h, w)
    turn = torch.zeros(n, 3, 3, dtype=frame.dtype)
    turn = turn + torch.eye(3, dtype=frame.dtype) + torch.linalg.cross(torch.eye(3, dtype=frame.dtype).expand(n, 3, 3),
                                                                      pose[:, None, :3].expand(n, 3, 3))  # fmt: skip
    points = (turn @ (depth * rays).flatten(2)) + pose[:, 3:, None]
    grid = (points[:, :2] / (points[:, 2:] + 1e-7)).view(n, 2, h, w).permute(0, 2, 3, 1)
    warped = F.grid_sample(other, grid, padding_mode="border", align_corners=True)
    errors = [0.85 * structure(x, frame).mean(1) + 0.15 * (x - frame).abs().mean(1) for x in (warped, other)]
    smallest, which = torch.stack(errors, 1).min(dim=1)
    scaled = disparity / (disparity.mean((2, 3), keepdim=True) + 1e-7)
    steps = (scaled[..., :-1] - scaled[..., 1:]).abs() * (-(frame[..., :-1] - frame[..., 1:]).abs().mean(1, True)).exp()
    return smallest.mean() + 0.1 * steps.mean() + 0.01 * (which == 0).double().mean()


def pointed(model: Any, inputs: Inputs) -> Tensor:
    """PointRend's loss: cross-entropy at the least certain of random points (Kirillov 2020)."""
    scores = model(inputs["image"])
    n = scores.shape[0]
    drawn = torch.rand(n, 60, 2, dtype=scores.dtype)

    def at(x: Tensor, points: Tensor, mode: str = "bilinear") -> Tensor:
        return F.grid_sample(x, 2 * points.unsqueeze(2) - 1, mode=mode, align_corners=False).squeeze(3)

    best = at(scores.detach(), drawn).topk(2, dim=1).values
    hardest = (best[:, 1] - best[:, 0]).topk(20, dim=1).indices
    points = drawn.gather(1, hardest.unsqueeze(2).expand(-1, -1, 2))
    labels = at(inputs["labels"].unsqueeze(1).to(scores.dtype), points, "nearest").squeeze(1).long()
    return F.cross_entropy(at(scores, points), labels, ignore_index=255)


def hardest_pixels(model: Any, inputs: Inputs) -> Tensor:
    """The mean over the worst quarter of the pixels (online hard example mining)."""
    losses = F.cross_entropy(model(inputs["image"]), inputs["labels"], ignore_index=255, reduction="none").flatten()
    return losses.topk(losses.numel() // 4).values.mean() + losses[losses > 1.5].mean()


def lovasz(model: Any, inputs: Inputs) -> Tensor:
    """Lovász-softmax (Berman 2018): errors sorted over all pixels, weighted by the slope of the Jaccard index."""
    scores = model(inputs["image"])
    shares = scores.softmax(1).permute(0, 2, 3, 1).reshape(-1, scores.shape[1])
    labels = inputs["labels"].flatten()
    known = labels != 255
    shares, labels = shares[known], labels[known]
    losses = []
    for number in range(scores.shape[1]):
        here = (labels == number).to(shares.dtype)
        errors, order = (here - shares[:, number]).abs().sort(0, descending=True)
        here = here[order]
        inner = here.sum() - here.cumsum(0)
        union = here.sum() + (1 - here).cumsum(0)
        jaccard = 1 - inner / union
        slope = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
        losses.append(errors.dot(slope))
    return torch.stack(losses).mean()


def scale_invariant(model: Any, inputs: Inputs) -> Tensor:
    """Eigen's loss of log depth at the pixels whose depth is known, and a median-aligned one (MiDaS)."""
    depth = model(pixel_values=inputs["pixel_values"]).predicted_depth.abs() + 0.1
    truth = F.interpolate(inputs["depth"].unsqueeze(1), depth.shape[-2:], mode="nearest").squeeze(1)
    known = truth > 0.5
    difference = depth[known].log() - truth[known].log()
    loss = ((difference**2).mean() - 0.5 * difference.mean() ** 2).sqrt()
    shift, aim = depth[known].median(), truth[known].median()
    spread, wide = (depth[known] - shift).abs().mean(), (truth[known] - aim).abs().mean()
    return loss + ((depth[known] - shift) / spread - (truth[known] - aim) / wide).abs().mean()
