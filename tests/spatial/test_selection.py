"""Which elements a mask picks on which rank, and where they stand in torch's order."""

import pytest
import torch
from torch import Tensor

import fullframe as ff
from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement
from fullframe.spatial.selection import Selection, numbers_held, picked, selected
from fullframe.spatial.tensor import SpatialTensor, local_of
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.fake import spatial, spec_of

MASK = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]], dtype=torch.bool)[None]


def test_numbers_that_a_rank_holds_of_a_merged_dim() -> None:
    with spatial(2, 2) as there:
        height = Placement("height", 1, Extents((0, 1, 3)), inner=4)
        width = Placement("width", 1, Extents((0, 3, 4)), outer=3)
        spec = spec_of(there, (2, 12), (height, width), False, None)  # (N, H * W) of 3 rows and 4 columns
        assert numbers_held(spec, 0, {}).tolist() == [0, 1]
        assert numbers_held(spec, 1, {"height": 0, "width": 0}).tolist() == [0, 1, 2]
        assert numbers_held(spec, 1, {"height": 1, "width": 0}).tolist() == [4, 5, 6, 8, 9, 10]
        assert numbers_held(spec, 1, {"height": 1, "width": 1}).tolist() == [7, 11]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_picked_elements_and_their_gradient(order: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64).permute(order).requires_grad_()
    mask = torch.rand(x.shape[1:3]) > 0.4
    cells = mask.flatten().nonzero().squeeze(1)
    assert torch.equal(picked(x, 1, 2, cells), x[:, mask])
    assert torch.autograd.gradcheck(lambda x: picked(x, 1, 2, cells), x)
    assert torch.autograd.gradgradcheck(lambda x: picked(x, 1, 2, cells), x)


def _selection(mask: Tensor, height: int, width: int) -> Selection:
    shell = ff.shard(mask, mesh(height, width))
    assert isinstance(shell, SpatialTensor)
    return selected(local_of(shell), shell.spec)[0]


def _told(height: int, width: int) -> tuple[tuple[int, ...], list[int], list[int]]:
    found = _selection(MASK, height, width)
    return found.extents.bounds, found.of_all.tolist(), found.own.tolist()


def test_the_drawing() -> None:
    """Columns: a d on rank 0, b c e on rank 1, and torch's order is a b c d e."""
    assert rank_group(2).run(_told, 1, 2) == [
        ((0, 2, 5), [0, 2, 3, 1, 4], [0, 3]),
        ((0, 2, 5), [0, 2, 3, 1, 4], [1, 2, 4]),
    ]
    assert rank_group(2).run(_told, 2, 1) == [
        ((0, 3, 5), [0, 1, 2, 3, 4], [0, 1, 2]),
        ((0, 3, 5), [0, 1, 2, 3, 4], [3, 4]),
    ]


def _in_torchs_order(height: int, width: int) -> list[bool]:
    on, right = mesh(height, width), []
    for shape in ((5, 7), (2, 3, 5, 7), (1, 6, 4), (3, 2, 4)):
        x = torch.arange(torch.Size(shape).numel()).view(shape)
        for mask in (x % 3 == 1, x >= 0, x == 4, x < 0, x % shape[-1] < 2, x < x.numel() // 4):
            for turned in (lambda t: t, lambda t: t.mT, lambda t: t.flatten(-2), lambda t: t.mT.flatten(-2)):
                got = turned(ff.shard(x, on))[turned(ff.shard(mask, on))]
                got = got.full() if isinstance(got, SpatialTensor) else got
                right.append(torch.equal(got, turned(x)[turned(mask)]))
    return right


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2)])
def test_torchs_order(height: int, width: int) -> None:
    for answers in rank_group(height * width).run(_in_torchs_order, height, width):
        assert all(answers)


def _of_a_mask_that_is_written_to() -> list[bool]:
    """Equal masks share a selection; one that was written past torch's count of versions is another mask."""
    x, mask = torch.arange(35.0).view(5, 7), torch.arange(35).view(5, 7) % 3 == 1
    split, over = ff.shard(x, mesh(1, 2)), ff.shard(mask, mesh(1, 2))
    assert isinstance(over, SpatialTensor)
    kept, _ = selected(local_of(over), over.spec)
    same = selected(local_of(over).clone(), over.spec)[0] is kept
    before = split[over]
    local_of(over).data.logical_not_()
    other = selected(local_of(over), over.spec)[0] is not kept
    return [same, other, torch.equal(before.full(), x[mask]), torch.equal(split[over].full(), x[~mask])]  # type: ignore[attr-defined]


def test_a_mask_is_known_again_by_its_contents() -> None:
    assert rank_group(2).run(_of_a_mask_that_is_written_to) == [[True] * 4] * 2


def _of_masks_that_are_alike_in_part() -> list[bool]:
    """Another on the second rank alone; of another shape, at the same cells of each rank's part."""
    x, mask, on = torch.arange(24.0).view(4, 6), torch.arange(24).view(4, 6) % 3 == 0, mesh(1, 2)
    more = mask.clone()
    more[0, 5] = True
    wider = torch.cat([half.reshape(2, 6) for half in mask.chunk(2, 1)], 1)
    kept = [ff.shard(x, on)[ff.shard(mask, on)]]  # in use
    right = []
    for one in (more, wider, mask):
        kept.append(ff.shard(x.view(one.shape), on)[ff.shard(one, on)])
        right.append(torch.equal(kept[-1].full(), x.view(one.shape)[one]))  # type: ignore[attr-defined]
    return right


def test_masks_that_are_alike_in_part_are_others() -> None:
    assert rank_group(2).run(_of_masks_that_are_alike_in_part) == [[True] * 3] * 2
