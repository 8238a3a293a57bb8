"""View, flatten, permute, shuffles, windows and tokens."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, one, small
from tests.spatial.corners import Case as Corner
from tests.spatial.corners import Corners, corners_as_in_torch, noise


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


def turned(x: Tensor) -> Tensor:
    """(N, C, H, W) read as (N, C, W, H)."""
    return x.view(*x.shape[:2], -1, x.shape[2])


def written(x: Tensor) -> list[Tensor]:
    """Writes to a view reach its base, and the other way round."""
    view = turned(x)
    view[:, :, 1:5] *= 3
    x[..., 2:4] *= 5
    return [x, view]


def shaped_in_place(x: Tensor) -> list[Tensor]:
    """Other shapes in place, and writes beside them."""
    x = x * 1
    x.unsqueeze_(1).mul_(2)
    x.transpose_(3, 4)
    rows = x * 5
    x.squeeze_(1).swapaxes_(0, 1)
    x[..., 2:4] *= 3
    ones = (x[:1] > 0).squeeze_(0).unsqueeze_(-1)
    return [x, rows, x[0, 1] * 1, ones * x[0].unsqueeze(-1), x.detach().clone().transpose_(2, 3)[..., 1:]]


def asked_of_what_changed_shape(x: Tensor) -> list[Tensor]:
    """A map whose shape was changed in place is the base of its views: its gradient has that of one written to."""
    x = x * 1
    x.transpose_(2, 3).unsqueeze_(0)
    x.squeeze_(0).swapdims_(0, 1)
    part = x[:2]
    part.mul_(3)
    loss = x.square().sum() + part.square().sum()
    return [x, part, *torch.autograd.grad(loss, (x, part), retain_graph=True)]


CASES: dict[str, Case] = {
    "unsqueeze, expand": one(lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1, -1).sum(1).unsqueeze(-1).squeeze(-1)),
    "tokens and back": Case(
        lambda x, w: (F.linear(x.flatten(2).transpose(1, 2), w).transpose(1, 2).reshape(2, 5, *x.shape[2:])),
        whole=((5, 4),),
    ),
    "camera batch": Case(lambda x: x.view(6, 4, *x.shape[3:]).view(2, 3, *x.shape[1:2], -1)[..., :1] if x.dim() == 4
                         else x.flatten(0, 1).unflatten(0, (2, 3)).sum(1), ((2, 3, 4),)),
    "pixel_shuffle": one(lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": one(lambda x: F.pixel_unshuffle(x[:, :, : x.shape[2] // 3 * 3, : x.shape[3] // 3 * 3], 3)),
    "channel_shuffle": one(lambda x: F.channel_shuffle(x, 2)),
    "windows and back": one(windows_and_back),
    "shifted windows": one(lambda x: windows_and_back(x.roll((-2, -2), (2, 3))).roll((2, 2), (2, 3))),
    "rows and columns in the other's place": one(lambda x: [
        turned(x) * 2, x.flatten(2).view(*x.shape[:2], *x.shape[:1:-1]).mT, x.permute(0, 2, 3, 1).reshape(2, 4, -1)]),
    "a write into them": one(lambda x: written(x * 2)),
    "shapes in place": one(shaped_in_place),
    "a gradient of what changed shape": small(asked_of_what_changed_shape),
    "repeat of split dims": one(lambda x: [x.repeat(1, 2, 3, 2), x.repeat(2, 1, 1, 1, 2), x.tile(2), x.tile(2, 1)]),
    "repeat_interleave": one(lambda x: [x.repeat_interleave(2, 3), x.repeat_interleave(3, 1)]),
    "repeat_interleave by a tensor": one(lambda x: [
        x.repeat_interleave(torch.arange(x.shape[3]) % 3, 3), x.repeat_interleave(x[0, 0, :, 0].gt(0).long() * 2, 2)]),
    "repeat_interleave of all elements": one(lambda x: [
        x.repeat_interleave(3), torch.repeat_interleave(x[:, 0, 0], 2)]),
}  # fmt: skip


CORNERS = Corners()
for kind in (torch.int64, torch.int32, torch.complex128, torch.int8):
    CORNERS[f"view of {kind}"] = Corner(lambda x, k=kind: _parts(x.view(k)), [noise(1, 2, 3, 12)], grad=False)
    there_and_back = Corner(lambda x, k=kind: x.view(k).view(x.dtype) * 2, [noise(1, 2, 5, 14)], grad=False)
    CORNERS[f"view of {kind} and back"] = there_and_back
CORNERS.add("no samples", lambda x: x.flatten(1).unflatten(1, (3, 35)), [noise(0, 3, 5, 7)])


def _parts(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


test_corners = corners_as_in_torch(__name__)
test_as_in_one_process = as_in_one_process(__name__, CASES)


def _said(change: Callable[[Tensor, Tensor], object], leaf: bool = False) -> str:
    """The error that a change of shape ends in, of a base and a view of it that is a copy."""
    base = ff.shard(torch.randn(1, 4, 7, 11), mesh(1, 2)).requires_grad_(leaf)
    view = base.narrow(3, 7, 4)  # from the second rank to both
    try:
        change(base, view)
    except (ff.UnsupportedOp, RuntimeError) as error:
        return str(error)
    return ""


def _refused() -> list[str]:
    changes = [lambda _, view: view.unsqueeze_(0), lambda base, view: (base.unsqueeze_(0), view + 1)]
    without_graph = torch.no_grad()(changes[1])
    return [*map(_said, changes), _said(changes[1], leaf=True), _said(without_graph, leaf=True)]


def test_a_shape_in_place_is_refused_where_views_would_go_wrong() -> None:
    for copy, base, leaf, without_graph in rank_group(2).run(_refused):
        assert "it changes the shape of a view that is a copy in place" in copy
        assert "the tensor that it is a view of was given another shape in place" in base
        assert "a leaf Variable that requires grad" in leaf
        assert "it changes the shape of what has a gradient in place, under no_grad" in without_graph


def _untouched() -> list[float]:
    """Torch copies in these functions: a write to the result does not reach the argument."""
    found = []
    shuffles = [lambda x: torch.pixel_shuffle(x, 3), lambda x: torch.channel_shuffle(x, 3)]
    for shuffle in [*shuffles, lambda x: x.repeat_interleave(2, dim=1)]:
        x = torch.randn(1, 9, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        shell = ff.shard(x, mesh(1, 2))
        shuffle(shell).zero_()
        found.append(float((shell.full() - x).abs().max()))
    return found


def test_a_write_to_a_copy_does_not_reach_the_argument() -> None:
    for found in rank_group(2).run(_untouched):
        assert found == [0.0, 0.0, 0.0]
