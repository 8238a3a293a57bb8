"""Networks that match, iterate or attend, as users write them: optical flow, stereo volumes, unrolled solvers, tokens.

Plain torch; nothing here knows that a tensor may be split.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.networks import SeparableGRU, conv_bn_relu


def encoder(outputs: int, norm: type[nn.Module] = nn.InstanceNorm2d) -> nn.Sequential:
    """Features at an eighth of the image's size."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3), norm(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, 2, 1), norm(8), nn.ReLU(),
        nn.Conv2d(8, outputs, 3, 2, 1),
    )  # fmt: skip


class RAFT(nn.Module):
    """Optical flow: all-pairs correlation pyramid, lookup by `grid_sample`, a GRU, convex upsampling by `F.unfold`."""

    def __init__(self, width: int = 8, levels: int = 2, radius: int = 1, iterations: int = 3):
        super().__init__()
        self.levels, self.radius, self.iterations, self.width = levels, radius, iterations, width
        self.features, self.context = encoder(width), encoder(2 * width, nn.BatchNorm2d)
        planes = levels * (2 * radius + 1) ** 2
        self.motion = nn.Conv2d(planes + 2, width, 3, padding=1)
        self.update = SeparableGRU(width, 2 * width)
        self.flow = nn.Conv2d(width, 2, 3, padding=1)
        self.mask = nn.Conv2d(width, 64 * 9, 1)

    def correlations(self, first: Tensor, second: Tensor) -> list[Tensor]:
        n, c, h, w = first.shape
        volume = torch.matmul(first.view(n, c, h * w).transpose(1, 2), second.view(n, c, h * w)) / c**0.5
        volume = volume.reshape(n * h * w, 1, h, w)
        pyramid = [volume]
        for _ in range(self.levels - 1):
            pyramid.append(F.avg_pool2d(pyramid[-1], 2, stride=2))
        return pyramid

    def lookup(self, pyramid: list[Tensor], where: Tensor) -> Tensor:
        n, _, h, w = where.shape
        where = where.permute(0, 2, 3, 1)
        offsets = torch.arange(-self.radius, self.radius + 1, dtype=where.dtype, device=where.device)
        delta = torch.stack(torch.meshgrid(offsets, offsets, indexing="ij"), dim=-1)
        found = []
        for level, volume in enumerate(pyramid):
            grid = where.reshape(n * h * w, 1, 1, 2) / 2**level + delta.unsqueeze(0)
            rows, columns = volume.shape[-2:]
            grid = torch.stack([2 * grid[..., 0] / (columns - 1) - 1, 2 * grid[..., 1] / (rows - 1) - 1], dim=-1)
            found.append(F.grid_sample(volume, grid, align_corners=True).view(n, h, w, -1))
        return torch.cat(found, dim=-1).permute(0, 3, 1, 2).contiguous()

    def upsampled(self, flow: Tensor, mask: Tensor) -> Tensor:
        n, _, h, w = flow.shape
        weights = mask.view(n, 1, 9, 8, 8, h, w).softmax(dim=2)
        windows = F.unfold(8 * flow, [3, 3], padding=1).view(n, 2, 9, 1, 1, h, w)
        return (weights * windows).sum(dim=2).permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 8 * h, 8 * w)

    def forward(self, first: Tensor, second: Tensor) -> list[Tensor]:
        pyramid = self.correlations(self.features(first), self.features(second))
        hidden, context = self.context(first).split([self.width, self.width], dim=1)
        hidden, context = torch.tanh(hidden), torch.relu(context)
        n, _, h, w = hidden.shape
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        start = torch.stack([x, y], dim=0).to(hidden).repeat(n, 1, 1, 1)
        where, predictions = start, []
        for _ in range(self.iterations):
            where = where.detach()
            flow = where - start
            motion = F.relu(self.motion(torch.cat([self.lookup(pyramid, where), flow], dim=1)))
            hidden = self.update(hidden, torch.cat([context, motion], dim=1))
            where = where + self.flow(hidden)
            predictions.append(self.upsampled(where - start, 0.25 * self.mask(hidden)))
        return predictions  # `iterations` maps (N, 2, H, W)


class ConvexStereo(nn.Module):
    """RAFT-Stereo without the lookup: shifted correlations, a GRU, convex upsampling of one disparity channel."""

    def __init__(self, width: int = 8, disparities: int = 5, iterations: int = 3):
        super().__init__()
        self.disparities, self.iterations, self.width = disparities, iterations, width
        self.features, self.context = encoder(width), encoder(2 * width, nn.BatchNorm2d)
        self.update = SeparableGRU(width, width + disparities + 1)
        self.delta = nn.Conv2d(width, 1, 3, padding=1)
        self.mask = nn.Conv2d(width, 64 * 9, 1)

    def forward(self, left: Tensor, right: Tensor) -> list[Tensor]:
        a, b = self.features(left), self.features(right)
        cost = torch.stack(
            [(a * F.pad(b, (shift, 0))[..., : b.shape[-1]]).mean(1) for shift in range(self.disparities)], 1
        )
        hidden, context = torch.split(self.context(left), self.width, dim=1)
        hidden, context, predictions = hidden.tanh(), context.relu(), []
        disparity = torch.zeros_like(cost[:, :1])
        for _ in range(self.iterations):
            disparity = disparity.detach()
            hidden = self.update(hidden, torch.cat([context, cost, disparity], dim=1))
            disparity = disparity + self.delta(hidden)
            n, _, h, w = disparity.shape
            weights = torch.softmax(self.mask(hidden).view(n, 1, 9, 8, 8, h, w), dim=2)
            windows = F.unfold(8 * disparity, 3, padding=1).view(n, 1, 9, 1, 1, h, w)
            fine = (weights * windows).sum(2).permute(0, 1, 4, 2, 5, 3).reshape(n, 1, 8 * h, 8 * w)
            predictions.append(fine)
        return predictions


class CostVolume(nn.Module):
    """PSMNet-like stereo: a volume of shifted concatenations, 3-D convolutions, soft-argmin over disparities."""

    def __init__(self, width: int = 4, disparities: int = 6):
        super().__init__()
        self.disparities = disparities
        self.features = nn.Sequential(
            conv_bn_relu(3, 8, stride=2), conv_bn_relu(8, 8, stride=2), nn.Conv2d(8, width, 1)
        )
        self.filter = nn.Sequential(
            nn.Conv3d(2 * width, 8, 3, 1, 1, bias=False), nn.BatchNorm3d(8), nn.ReLU(),
            nn.Conv3d(8, 8, 3, (1, 2, 2), 1), nn.ReLU(),
            nn.ConvTranspose3d(8, 8, 3, (1, 2, 2), 1, (0, 1, 1)), nn.ReLU(), nn.Conv3d(8, 1, 3, 1, 1),
        )  # fmt: skip

    def forward(self, left: Tensor, right: Tensor) -> list[Tensor]:
        a, b = self.features(left), self.features(right)
        n, c, h, w = a.shape
        volume = a.new_zeros(n, 2 * c, self.disparities, h, w)
        for d in range(self.disparities):
            volume[:, :c, d, :, d:], volume[:, c:, d, :, d:] = a[..., d:], b[..., : w - d]
        cost = self.filter(volume)[:, :, :, :h, :w]
        cost = F.interpolate(cost, size=(2 * self.disparities, *left.shape[-2:]), mode="trilinear", align_corners=False)
        disparities = torch.arange(2 * self.disparities, dtype=cost.dtype, device=cost.device).view(1, -1, 1, 1)
        return [(F.softmax(-cost.squeeze(1), dim=1) * disparities).sum(dim=1)]


class UnrolledDenoiser(nn.Module):
    """Total-variation-like gradient steps with learned filters and step sizes: y - step * (Kt phi(K y) + y - x)."""

    def __init__(self, filters: int = 6, iterations: int = 5):
        super().__init__()
        self.filters = nn.Parameter(torch.randn(filters, 3, 5, 5) / 10)
        self.steps = nn.Parameter(torch.linspace(0.1, 0.3, iterations))
        self.threshold = nn.Parameter(torch.full((filters, 1, 1), 0.1))

    def forward(self, image: Tensor) -> Tensor:
        y = image
        for step in self.steps:
            response = F.conv2d(F.pad(y, (2, 2, 2, 2), mode="reflect"), self.filters)
            shrunk = torch.sign(response) * torch.clamp(response.abs() - self.threshold.abs(), min=0)
            back = F.conv_transpose2d(shrunk, self.filters)[:, :, 2:-2, 2:-2]
            y = y - step * (back + y - image)
        return y


class TokenEncoder(nn.Module):
    """`nn.TransformerEncoder` over the tokens of a convolutional stem with a learned position map, and a dense head."""

    def __init__(self, width: int = 16, classes: int = 5, *, norm_first: bool = True):
        super().__init__()
        self.stem = nn.Sequential(
            conv_bn_relu(3, 8, stride=2), conv_bn_relu(8, 8, stride=2), nn.Conv2d(8, width, 3, 2, 1)
        )
        self.position = nn.Parameter(torch.randn(1, width, 5, 7))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x = x + F.interpolate(self.position, size=x.shape[-2:], mode="bicubic", align_corners=False)
        n, c, h, w = x.shape
        tokens = self.encoder(x.flatten(2).transpose(1, 2))
        x = self.head(tokens.transpose(1, 2).reshape(n, c, h, w))
        return F.interpolate(x, size=image.shape[-2:], mode="bilinear", align_corners=False)


class QueryDecoder(nn.Module):
    """DETR's shape with `nn.TransformerDecoder`: learned queries read the image's tokens, sine position encoding."""

    def __init__(self, width: int = 16, queries: int = 5):
        super().__init__()
        self.width = width
        self.stem = nn.Sequential(
            conv_bn_relu(3, 8, stride=2), conv_bn_relu(8, 8, stride=2), nn.Conv2d(8, width, 3, 2, 1)
        )
        self.queries = nn.Embedding(queries, width)
        layer = nn.TransformerDecoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.box = nn.Linear(width, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        n, _, h, w = x.shape
        ones = torch.ones_like(x[:, 0])
        y, z = ones.cumsum(1) / h, ones.cumsum(2) / w
        scale = torch.arange(1, self.width // 4 + 1, device=x.device, dtype=x.dtype)
        angles = torch.cat([y[..., None] * scale, z[..., None] * scale], dim=-1)
        position = torch.cat([angles.sin(), angles.cos()], dim=-1)  # (N, h, w, width)
        tokens = x.permute(0, 2, 3, 1).flatten(1, 2) + position.flatten(1, 2)
        queries = self.queries.weight.unsqueeze(0).expand(n, -1, -1)
        return self.box(self.decoder(queries, tokens)).sigmoid()  # (N, queries, 4)
