"""Every op with a rule against one process: outputs, input and parameter gradients, float64, awkward sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exactness import differences
from tests.rank_group import rank_group

TOLERANCE = 1e-11
MESHES = [(1, 2), (2, 1), (1, 3), (2, 2)]
SIZES = [(16, 64), (17, 50), (11, 37)]


class Case(NamedTuple):
    op: Callable[..., Any]
    split: tuple[tuple[int, ...], ...] = ((2, 4),)  # leading dims of each split operand; H and W follow
    whole: tuple[tuple[int, ...], ...] = ()


def conv(kernel: int, stride: int = 1, padding: Any = 0, dilation: int = 1, groups: int = 1) -> Case:
    return Case(
        lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups),
        whole=((8, 4 // groups, kernel, kernel), (8,)),
    )


def transposed(kernel: int, stride: int, padding: int, extra: int = 0, dilation: int = 1, groups: int = 1) -> Case:
    return Case(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride, padding, extra, groups, dilation),
        whole=((4, 6 // groups, kernel, kernel), (6,)),
    )


def one(op: Callable[[Tensor], Any]) -> Case:
    return Case(op)


def labels(x: Tensor, ignore: bool = False) -> Tensor:
    """Class numbers (N, H, W) that follow from the values, whatever the split."""
    classes = (x[:, 0].detach().abs() * 7).long() % 4
    return torch.where(classes == 3, -100, classes) if ignore else classes


def squeeze_excite(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x * F.conv2d(x.mean((2, 3), keepdim=True), w, b).sigmoid()


def attention_by_hand(x: Tensor, w: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2) @ w
    scores = (tokens @ tokens.transpose(1, 2)).softmax(-1)
    return scores @ tokens


def windows_and_back(x: Tensor, size: int = 4) -> Tensor:
    """Swin's partition into windows, something done within each, and the way back; sizes padded to whole windows."""
    height, width = x.shape[2:]
    x = F.pad(x, (0, -width % size, 0, -height % size)).permute(0, 2, 3, 1)
    n, rows, columns, c = x.shape
    tiles = x.view(n, rows // size, size, columns // size, size, c).permute(0, 1, 3, 2, 4, 5)
    tokens = tiles.reshape(-1, size * size, c)
    tokens = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
    tiles = tokens.view(-1, size, size, c).view(n, rows // size, columns // size, size, size, c)
    image = tiles.permute(0, 1, 3, 2, 4, 5).reshape(n, rows, columns, c)
    return image[:, :height, :width].permute(0, 3, 1, 2)


def class_token(x: Tensor, token: Tensor) -> Any:
    tokens = torch.cat([token.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1)
    tokens = F.scaled_dot_product_attention(tokens, tokens.sin(), tokens)
    return tokens[:, 0], tokens[:, 1:].transpose(1, 2).reshape(x.shape)


def written(x: Tensor, column: Tensor, row: Tensor) -> Tensor:
    x = x * 1
    x[:, 0] = 3
    x[:, 1:, 2:5, 1:] = column[:, :, None]
    x[..., 4, 2:7] = row
    x[1, :, -3:] = -1
    return x


def multi_head(x: Tensor, w: Tensor, b: Tensor, out: Tensor) -> Any:
    tokens = x.flatten(2).permute(2, 0, 1)
    options = {"in_proj_weight": w, "in_proj_bias": b, "bias_k": None, "bias_v": None, "add_zero_attn": False,
               "dropout_p": 0.0, "out_proj_weight": out, "out_proj_bias": None}  # fmt: skip
    quiet = F.multi_head_attention_forward(tokens, tokens, tokens, 4, 2, **options, need_weights=False)[0]
    return quiet, *F.multi_head_attention_forward(tokens, tokens, tokens, 4, 2, **options)


CASES: dict[str, Case] = {
    # convolution: kernel/stride/padding of the peers' table, and the odd ones
    "conv 3/1/1": conv(3, 1, 1),
    "conv 5/1/2": conv(5, 1, 2),
    "conv 7/1/3 depthwise": conv(7, 1, 3, groups=4),
    "conv 7/2/3": conv(7, 2, 3),
    "conv 3/2/1": conv(3, 2, 1),
    "conv 4/4/0": conv(4, 4, 0),
    "conv 2/2/0": conv(2, 2, 0),
    "conv 3 dilation 2": conv(3, 1, 2, 2),
    "conv 3 dilation 5": conv(3, 1, 5, 5),
    "conv 1/1/0": conv(1),
    "conv 1/2/0": conv(1, 2),
    "conv 3/1/0": conv(3),
    "conv 1/1/2": conv(1, 1, 2),
    "conv 6/3/1 groups": conv(6, 3, 1, groups=2),
    "conv 4 same": conv(4, 1, "same"),
    "conv 5 same dilation 2": conv(5, 1, "same", 2),
    "conv 3 valid": conv(3, 2, "valid"),
    "conv oblong": Case(lambda x, w: F.conv2d(x, w, None, (2, 1), (0, 3), (1, 2)), whole=((3, 4, 2, 5),)),
    "conv 11/1/5, halo wider than a shard": Case(
        lambda x, w: F.conv2d(F.conv2d(x, w, None, 4, 5), w, None, 1, 5), whole=((4, 4, 11, 11),)
    ),
    "conv 3d": Case(lambda x, w, b: F.conv3d(x, w, b, (1, 2, 2), 1), ((2, 3, 5),), ((4, 3, 3, 3, 3), (4,))),
    "conv whose border sees padding alone": one(
        lambda x: F.conv2d(x[:, :, :2, :5], x.new_ones(4, 1, 2, 2), None, 2, (3, 2), (2, 1), 4)
    ),
    "conv unbatched": Case(lambda x, w: F.conv2d(x, w, None, 2, 1), ((4,),), ((5, 4, 3, 3),)),
    "conv_transpose 2/2/0": transposed(2, 2, 0),
    "conv_transpose 4/2/1": transposed(4, 2, 1),
    "conv_transpose 3/2/1": transposed(3, 2, 1),
    "conv_transpose 3/2/1+1": transposed(3, 2, 1, 1),
    "conv_transpose 3/1/1 groups": transposed(3, 1, 1, groups=2),
    "conv_transpose 2/4/0+3": transposed(2, 4, 0, 3),
    "conv_transpose 3/2/2 dilation 3": transposed(3, 2, 2, 1, 3),
    "conv_transpose 3d": Case(lambda x, w: F.conv_transpose3d(x, w, None, 2, 1), ((1, 3, 4),), ((3, 2, 4, 4, 4),)),
    # pooling
    "max_pool 3/2/1": one(lambda x: F.max_pool2d(x, 3, 2, 1)),
    "max_pool 2/2": one(lambda x: F.max_pool2d(x, 2)),
    "max_pool 3/1/1 dilation 2, ceil": one(lambda x: F.max_pool2d(x, 3, 2, 1, 2, True)),
    "max_pool 3/3/0 ceil, nothing borrowed, below zero": one(lambda x: F.max_pool2d(x - 9, 3, 3, 0, 1, True)),
    "max_pool 3d": Case(lambda x: F.max_pool3d(x, 3, 2, 1), ((1, 2, 6),)),
    "max_pool of relu, many ties": one(lambda x: F.max_pool2d(x.relu(), 3, 2, 1)),
    "avg_pool 2/2": one(lambda x: F.avg_pool2d(x, 2)),
    "avg_pool 3/2/1": one(lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "avg_pool 3/2/1 without pad": one(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "avg_pool 3/2/1 ceil": one(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "avg_pool divisor": one(lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=5)),
    "avg_pool 3d": Case(lambda x: F.avg_pool3d(x, 3, 2, 1), ((1, 2, 6),)),
    "adaptive_avg_pool 1": one(lambda x: F.adaptive_avg_pool2d(x, 1)),
    "adaptive_avg_pool 7": one(lambda x: F.adaptive_avg_pool2d(x, 7)),
    "adaptive_avg_pool (3, 5)": one(lambda x: F.adaptive_avg_pool2d(x, (3, 5))),
    "adaptive_avg_pool (None, 2)": one(lambda x: F.adaptive_avg_pool2d(x, (None, 2))),
    "adaptive_max_pool 1": one(lambda x: F.adaptive_max_pool2d(x, 1)),
    "adaptive_max_pool (4, 6)": one(lambda x: F.adaptive_max_pool2d(x.relu(), (4, 6))),
    # normalization
    "batch_norm": Case(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), whole=((4,), (4,))),
    "batch_norm without affine": one(lambda x: F.batch_norm(x, None, None, None, None, True)),
    "batch_norm eval": Case(
        lambda x, w: F.batch_norm(x, torch.ones(4).double(), torch.ones(4).double(), w), whole=((4,),)
    ),
    "instance_norm": Case(lambda x, w, b: F.instance_norm(x, None, None, w, b), whole=((4,), (4,))),
    "group_norm": Case(lambda x, w, b: F.group_norm(x, 2, w, b), whole=((4,), (4,))),
    "layer_norm channels last": Case(
        lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w, b), whole=((4,), (4,))
    ),
    "layer_norm over the image": one(lambda x: F.layer_norm(x, x.shape[1:])),
    "rms_norm over the image": one(lambda x: F.rms_norm(x, x.shape[2:])),
    # resampling
    "interpolate nearest x2": one(lambda x: F.interpolate(x, scale_factor=2)),
    "interpolate bilinear x2": one(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "interpolate bilinear x4": one(lambda x: F.interpolate(x, scale_factor=4, mode="bilinear")),
    "interpolate bicubic x2": one(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    "interpolate bilinear to a size": one(lambda x: F.interpolate(x, (23, 71), mode="bilinear")),
    "interpolate align_corners": one(lambda x: F.interpolate(x, (23, 71), mode="bilinear", align_corners=True)),
    "interpolate align_corners x2": one(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    ),
    "interpolate x0.5": one(lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear")),
    "interpolate x0.3 nearest": one(lambda x: F.interpolate(x, scale_factor=0.3)),
    "interpolate x1.7 recomputed": one(
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True)
    ),
    "interpolate x1.7": one(lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear")),
    "interpolate nearest to a size": one(lambda x: F.interpolate(x, (29, 90))),
    "interpolate nearest-exact": one(lambda x: F.interpolate(x, (29, 30), mode="nearest-exact")),
    "interpolate bicubic to a size": one(lambda x: F.interpolate(x, (29, 30), mode="bicubic")),
    "interpolate area": one(lambda x: F.interpolate(x, (5, 30), mode="area")),
    "interpolate antialias": one(lambda x: F.interpolate(x, (9, 20), mode="bilinear", antialias=True)),
    "interpolate one dim only": one(lambda x: F.interpolate(x, (x.shape[2], 90), mode="bilinear")),
    "interpolate mixed scales": one(lambda x: F.interpolate(x, scale_factor=(2, 1.3), mode="bilinear")),
    "interpolate trilinear": Case(
        lambda x: F.interpolate(x, scale_factor=(2, 2, 1.5), mode="trilinear"), ((1, 2, 3),)
    ),
    "interpolate to few rows": one(lambda x: F.interpolate(x, (2, 2), mode="bilinear")),
    # padding
    "pad constant": one(lambda x: F.pad(x, (1, 2, 3, 4), value=1.5)),
    "pad crop": one(lambda x: F.pad(x, (-3, 2, 1, -2))),
    "pad channels": one(lambda x: F.pad(x, (0, 0, 0, 0, 1, 2))),
    "pad reflect": one(lambda x: F.pad(x, (3, 2, 1, 4), mode="reflect")),
    "pad replicate": one(lambda x: F.pad(x, (3, 2, 1, 4), mode="replicate")),
    "pad reflect unbatched": Case(lambda x: F.pad(x, (3, 2, 1, 4), mode="reflect"), ((4,),)),
    "pad replicate 3d": Case(lambda x: F.pad(x, (3, 2, 1, 4, 1, 1), mode="replicate"), ((1, 2, 3),)),
    "pad circular": one(lambda x: F.pad(x, (3, 2, 1, 4), mode="circular")),
    # pointwise, joining, shape
    "squeeze-excite": Case(squeeze_excite, whole=((4, 4, 1, 1), (4,))),
    "full-size whole operand": Case(lambda x, y: x * y[: x.shape[2], : x.shape[3]], whole=((80, 80),)),
    "whole operand on the left": Case(lambda x, y: 1 - y[:, None, None] * x / (2 + x.abs()), whole=((4,),)),
    "shifted difference": one(lambda x: (x[..., 1:] - x[..., :-1]).abs()),
    "shifted twice": one(lambda x: x[:, :, 2:, :-3] * x[:, :, :-2, 3:]),
    "where": one(lambda x: torch.where(x > 0, x, x.mean())),
    "in place": one(lambda x: (x * 1).add_(1).mul_(2).clamp_(-1, 1)),
    "in place with a shifted map": one(lambda x: (x[..., 1:] * 1).add_(x[..., :-1])),
    "clamp, lerp, addcmul": one(lambda x: torch.addcmul(x.clamp(-1, 1), x, x).lerp(x, 0.3)),
    "relu in place": one(lambda x: F.relu(x * 1, inplace=True)),
    "cat channels, other boundaries": one(lambda x: torch.cat([x[..., 1:], x[..., :-1], x[..., 1:]], 1)),
    "cat with a whole tensor": Case(lambda x, y: torch.cat([x, y.expand(2, 3, *x.shape[2:])], 1), whole=((1, 1),)),
    "cat along the split dims": one(lambda x: torch.cat([torch.cat([x, x * 2], 3), torch.cat([x, x], 3)], 2)),
    "cat an odd strip": one(lambda x: torch.cat([x[:, :, :, :3], x, x[:, :, :, -1:]], 3)),
    "stack": one(lambda x: torch.stack([x, x * 2, x + 1], 2)),
    "slice every third": one(lambda x: x[:, 1:, 2:-1:3, 1::2]),
    "slice a few columns": one(lambda x: x[..., :2] * 3),
    "select a column": one(lambda x: x[..., 5] + x[..., -1]),
    "index channels": one(lambda x: x[:, [2, 0]] + x[:, torch.tensor([1, 1])]),
    "split and chunk": one(lambda x: [t.sin() for t in (*x.chunk(2, 1), *x.split(7, 3))]),
    "flip": one(lambda x: x.flip(2, 3) - x),
    "unsqueeze, expand": one(lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1, -1).sum(1).unsqueeze(-1).squeeze(-1)),
    "tokens and back": Case(
        lambda x, w: (F.linear(x.flatten(2).transpose(1, 2), w).transpose(1, 2).reshape(2, 5, *x.shape[2:])),
        whole=((5, 4),),
    ),
    "camera batch": Case(lambda x: x.view(6, 4, *x.shape[3:]).view(2, 3, *x.shape[1:2], -1)[..., :1] if x.dim() == 4
                         else x.flatten(0, 1).unflatten(0, (2, 3)).sum(1), ((2, 3, 4),)),
    "einsum channels": Case(lambda x, w: torch.einsum("nchw,cd->nhwd", x, w), whole=((4, 3),)),
    "einsum over pixels": one(lambda x: torch.einsum("nchw,ndhw->ncd", x, x.sin())),
    "matmul of rows": Case(lambda x, w: x.permute(0, 2, 3, 1) @ w, whole=((4, 3),)),
    "gram matrix": one(lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2)),
    "linear over a split dim": Case(lambda x, w: F.linear(x, w[:, : x.shape[3]]), whole=((3, 64),)),
    "attention by hand": Case(attention_by_hand, whole=((4, 4),)),
    "scaled_dot_product_attention": one(
        lambda x: F.scaled_dot_product_attention(*(x.flatten(2).transpose(1, 2)[:, None] * s for s in (1, 2, 3)))
    ),
    "pixel_shuffle": one(lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": one(lambda x: F.pixel_unshuffle(x[:, :, : x.shape[2] // 3 * 3, : x.shape[3] // 3 * 3], 3)),
    "channel_shuffle": one(lambda x: F.channel_shuffle(x, 2)),
    "roll": one(lambda x: x.roll((3, -2), (2, 3)) + x.roll(1, 1)),
    "windows and back": one(windows_and_back),
    "shifted windows": one(lambda x: windows_and_back(x.roll((-2, -2), (2, 3))).roll((2, 2), (2, 3))),
    "class token": Case(class_token, whole=((1, 1, 4),)),
    "unfold": one(lambda x: F.unfold(x, 3, padding=1)),
    "unfold with stride": one(lambda x: F.unfold(x, (2, 3), (1, 2), (0, 1), (2, 1))),
    "fold of unfold": one(lambda x: F.fold(F.unfold(x, 3, padding=1, stride=2).sin(), x.shape[2:], 3, 1, 1, 2)),
    "Tensor.unfold": one(lambda x: x.unfold(3, 5, 2).sin().sum(-1)),
    "grid_sample": one(lambda x: F.grid_sample(x, x[:, :2].tanh().permute(0, 2, 3, 1), align_corners=False)),
    "cumsum": one(lambda x: [x.cumsum(3), x.cumsum(2), x.cumsum(1)]),
    "max along a split dim": one(lambda x: [*x.max(3), *x.min(2, keepdim=True), *x.relu().max(3), x.argmin(2)]),
    "argmax of all": one(lambda x: [x.argmax(), x.flatten(1).argmax(1)]),
    "multi-head attention": Case(multi_head, whole=((12, 4), (12,), (4, 4))),
    # reductions
    "sum": one(lambda x: [x.sum(), x.sum((0, 2)), x.sum(-1, keepdim=True), x.sum(1)]),
    "mean": one(lambda x: [x.mean(), x.mean((2, 3)), x.mean(-1), x.mean(1, keepdim=True)]),
    "amax, amin": one(lambda x: [x.amax((2, 3)), x.amin(-1, True), x.max(), x.relu().amax((1, 2, 3)), x.amax(1)]),
    "max over channels": one(lambda x: x.max(1).values + x.min(1).values),
    "var, std": one(
        lambda x: [x.var(), x.std((2, 3)), x.var(1, correction=0), *torch.var_mean(x, (1, 2), keepdim=True)]
    ),
    "norms": one(lambda x: [x.norm(), x.norm(p=1, dim=2), x.norm(dim=1), torch.linalg.vector_norm(x, 3, (2, 3))]),
    "logsumexp": one(lambda x: [x.logsumexp((2, 3)), x.logsumexp(1)]),
    "softmax over channels": one(lambda x: [x.softmax(1), F.log_softmax(x, 1)]),
    "softmax over pixels": one(lambda x: [x.softmax(3), F.log_softmax(x, 2), x.flatten(2).softmax(-1)]),
    "any, all": one(lambda x: [(x > 1).any(), (x > -9).all(3), x.argmax(1), torch.count_nonzero(x > 0)]),
    "normalize": one(lambda x: [F.normalize(x), F.normalize(x, dim=3)]),
    "prod, nansum, nanmean": one(
        lambda x: [x.prod(3), x.prod(1), x.nansum((2, 3)), x.nanmean(2), x.tanh().exp().prod()]
    ),
    "aminmax, equal, allclose": one(lambda x: [*x.aminmax(), x * torch.equal(x, x), x * (not torch.allclose(x, -x))]),
    "diff, dist": one(lambda x: [x.diff(), x.diff(n=2, dim=2), x.dist(x.sin()), x.diff(dim=1)]),
    "sort, topk over channels": one(lambda x: [*x.sort(1), *x.topk(2, 1), x.argsort(1)]),
    "repeat_interleave": one(lambda x: [x.repeat_interleave(2, 3), x.repeat_interleave(3, 1)]),
    "lp_pool": one(lambda x: F.lp_pool2d(x.abs(), 3, 2, 1)),
    "write into slices": Case(written, whole=((3, 1), (5,))),
    "operands split along different dims": one(lambda x: x[..., : x.shape[2]] * x[..., : x.shape[2]].transpose(2, 3)),
    "labels split along another dim": one(
        lambda x: F.cross_entropy(x[..., : x.shape[2]], labels(x[..., : x.shape[2]].transpose(2, 3)))
    ),
    "1x1 convolution on tokens": Case(lambda x, w: F.conv1d(x.flatten(2), w), whole=((3, 4, 1),)),
    "keywords": one(
        lambda x: [torch.sum(input=x, dim=1), torch.gather(x, dim=1, index=x.argmax(dim=1, keepdim=True)),
                   torch.flip(x, dims=[3]), torch.matmul(x, other=x.transpose(2, 3)), x.new_zeros((2, 2))]
    ),
    "whole tensors meet split ones": Case(
        lambda x, y: [y.expand_as(x) + x, y.to(x), y.type_as(x) * 2, x.to(y)], whole=((1, 1, 1, 1),)
    ),
    "special functions": one(lambda x: [torch.special.entr(x.abs()), torch.polygamma(1, x.abs() + 1), torch.gcd(
        (x * 9).long(), torch.tensor(6)), torch.special.xlog1py(x, x.abs())]),
    # losses
    "cross_entropy": one(lambda x: F.cross_entropy(x, labels(x))),
    "cross_entropy ignore_index": one(lambda x: F.cross_entropy(x, labels(x, True))),
    "cross_entropy weights": Case(lambda x, w: F.cross_entropy(x, labels(x, True), w.abs().detach()), whole=((4,),)),
    "cross_entropy smoothing": one(lambda x: F.cross_entropy(x, labels(x, True), label_smoothing=0.1)),
    "cross_entropy none, sum": one(
        lambda x: [F.cross_entropy(x, labels(x), reduction="none"), F.cross_entropy(x, labels(x), reduction="sum")]
    ),
    "cross_entropy probabilities": one(lambda x: F.cross_entropy(x, x.detach().sin().softmax(1))),
    "nll_loss": one(lambda x: F.nll_loss(F.log_softmax(x, 1), labels(x, True))),
    "mse_loss": one(lambda x: F.mse_loss(x, x.detach().sin())),
    "l1, smooth_l1, huber": one(
        lambda x: [f(x, x.detach().sin()) for f in (F.l1_loss, F.smooth_l1_loss, F.huber_loss)]
    ),
    "bce": one(lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0).double(), reduction="sum")),
    "bce with logits": Case(
        lambda x, w: F.binary_cross_entropy_with_logits(x, (x > 0).double(), pos_weight=w.detach()[:, None, None] ** 2),
        whole=((4,),),
    ),
    "margin losses": one(
        lambda x: [
            F.hinge_embedding_loss(x, x.detach().sign()),
            F.margin_ranking_loss(x, x.sin(), x.detach().sign(), 0.1),
            F.multilabel_soft_margin_loss(x.permute(0, 2, 3, 1), (x.detach() > 0).double().permute(0, 2, 3, 1)),
            F.gaussian_nll_loss(x, x.detach().sin(), x.detach().abs() + 0.1),
            F.poisson_nll_loss(x, x.detach().abs()),
        ]
    ),
    "kl_div": one(lambda x: F.kl_div(x.log_softmax(1), x.detach().sin().softmax(1), reduction="batchmean")),
    "mse with a whole target": Case(lambda x, y: F.mse_loss(x, y.expand(x.shape)), whole=((1, 4, 1, 1),)),
}  # fmt: skip


def _differences(name: str, meshes: list[tuple[int, int]]) -> list[tuple[str, float]]:
    case, found = CASES[name], []
    for size in SIZES:
        generator = torch.Generator().manual_seed(1)
        split = [torch.randn((*lead, *size), generator=generator, dtype=torch.float64) for lead in case.split]
        whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in case.whole]
        for height, width in meshes:
            for what, error in differences(case.op, split, whole, height, width).items():
                found.append((f"{what} at {size} on {height}x{width}", error))
    return found


@pytest.mark.parametrize("name", CASES)
def test_op_is_exact(name: str) -> None:
    for world in sorted({height * width for height, width in MESHES}):
        meshes = [(h, w) for h, w in MESHES if h * w == world]
        for answers in rank_group(world).run(_differences, name, meshes):
            wrong = {what: error for what, error in answers if not error <= TOLERANCE}
            assert not wrong, f"{name}: {wrong}"
            assert any(what.startswith("output") for what, _ in answers)
