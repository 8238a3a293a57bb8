"""Linear, matmul, einsum."""

import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from benchmarks.communication.traffic import by_process_groups
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, one
from tests.spatial.rules.test_convolution import at_two_pixels


def ones(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.uint8)


def by_its_own(x: Tensor) -> Tensor:
    """Weights and a bias from the image at two places."""
    weight = at_two_pixels(x)
    return F.linear(x.permute(0, 2, 3, 1), weight, weight[:, 0])


def coefficients(x: Tensor) -> Tensor:
    """Of the positions that a mask picks, a number a channel, as a detector has them for its masks: (n, C)."""
    rows = x[0].flatten(1).T
    return rows[rows[:, 0].detach() > 1.5]


def masks_of(x: Tensor) -> Tensor:
    """The maps of which the picked positions have the coefficients, as YOLO's segmentation makes them: (n, H, W)."""
    return torch.einsum("in,nhw->ihw", coefficients(x), x[0].sin())


def weighed(x: Tensor) -> Tensor:
    """The sum of those maps, weighed by a number for each."""
    return torch.einsum("i,ihw->hw", coefficients(x)[:, 1], masks_of(x))


def attended(x: Tensor) -> Tensor:
    """Values before the transposed attention of all positions to all, as SAGAN, DANet and latent diffusion have it."""
    tokens = x.flatten(2)
    return tokens @ (tokens.mT @ tokens).softmax(-1).mT


def along_columns(x: Tensor) -> Tensor:
    """Each position attends to its column, the values before the attention: half of CCNet's criss-cross."""
    return torch.einsum("bciw,bhwi->bchw", x, torch.einsum("bchw,bciw->bhwi", x, x).softmax(-1))


CASES: dict[str, Case] = {
    "einsum channels": Case(lambda x, w: torch.einsum("nchw,cd->nhwd", x, w), whole=((4, 3),)),
    "einsum over pixels": one(lambda x: torch.einsum("nchw,ndhw->ncd", x, x.sin())),
    "einsum of short integers": one(
        lambda x: [torch.einsum(f"c{a}{b},d->{a}d", ones(x[0, :1, :h, :w]), ones(x[0, 0, 0, :3])) * x.sum()
                   for a, b, h, w in (("h", "w", 2, 3), ("w", "h", 3, 2))]),
    "values before transposed attention": one(attended),
    "values before attention to a column": one(along_columns),
    "many values before few sums": one(lambda x: x[0, :, :1].repeat(40, 1, 1)[:, 0] @ (x[0, 0, :1].T + x[0, 0, :1])),
    "maps of what a mask picked": one(masks_of),
    "the same, the map first": one(lambda x: torch.einsum("nhw,in->hiw", x[0], coefficients(x))),
    "maps weighed by what a mask picked": one(weighed),
    "what a mask picked, by all": one(lambda x: coefficients(x) @ x[0].flatten(1)),
    "of what a mask picked, over positions": one(
        lambda x: torch.einsum("in,nhw->in", coefficients(x), x[0])),
    "linear by what a mask picks": Case(by_its_own),
    "matmul of rows": Case(lambda x, w: x.permute(0, 2, 3, 1) @ w, whole=((4, 3),)),
    "bilinear": Case(
        lambda x, y, w, b: F.bilinear(x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1), w, b),
        split=((2, 4), (2, 3)), whole=((5, 4, 3), (5,))),
    "bilinear by split weights": Case(lambda x, y, z: F.bilinear(y, z, x[0, :, :3, :4]), whole=((5, 3), (5, 4))),
    "bilinear of split channels": Case(lambda x, y, w: F.bilinear(x[..., :11], y[..., :9], w),
        split=((2, 4), (2, 4)), whole=((5, 11, 9),)),
    "gram matrix": one(lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2)),
    "linear over a split dim": Case(lambda x, w: F.linear(x, w[:, : x.shape[3]]), whole=((3, 64),)),
    "a matrix of no rows": one(lambda x: torch.zeros(0, x.shape[2], dtype=x.dtype) @ x[0, 0] * 2),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)


def _where_attention_lies() -> tuple[list[int], int]:
    """The dims that its output is split on, and the bytes that its second product sends, of values of 640."""
    x = ff.shard(torch.randn(1, 4, 2, 20, generator=torch.Generator().manual_seed(0)), mesh(1, 2))
    weights = (x.flatten(2).mT @ x.flatten(2)).softmax(-1).mT
    with by_process_groups() as sent:
        y = x.flatten(2) @ weights
    assert isinstance(y, ff.SpatialTensor)
    return [p.dim for p in y.spec.placements], sent.total()


def test_attention_stays_split_behind_its_values() -> None:
    """The values are gathered, half of which each rank has, and not the weights of all positions to all."""
    assert rank_group(2).run(_where_attention_lies) == [([2], 320)] * 2


def _where_masks_lie() -> list[list[int]]:
    """The dims that the masks of picked positions are split on, without a word about a gathered operand."""
    x = ff.shard(torch.randn(1, 4, 12, 20, generator=torch.Generator().manual_seed(0)), mesh(1, 2))
    picked, masks, sums = coefficients(x), masks_of(x), weighed(x)
    assert all(isinstance(t, ff.SpatialTensor) for t in (picked, masks, sums))
    loss = F.binary_cross_entropy_with_logits(masks, (x[0, :1] > 0).to(x.dtype).expand(masks.shape))
    assert loss.dim() == 0
    return [[p.dim for p in t.spec.placements] for t in (picked, masks, sums)]


def test_a_map_stays_split_beside_what_a_mask_picked() -> None:
    """As the larger of the two: a detector's masks are split as its image is, and not by whose objects they are."""
    assert rank_group(2).run(_where_masks_lie) == [[[0], [2], [1]]] * 2
