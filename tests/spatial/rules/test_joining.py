"""cat, stack and roll."""

import torch

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, one

CASES: dict[str, Case] = {
    "cat channels, other boundaries": one(lambda x: torch.cat([x[..., 1:], x[..., :-1], x[..., 1:]], 1)),
    "cat with a whole tensor": Case(lambda x, y: torch.cat([x, y.expand(2, 3, *x.shape[2:])], 1), whole=((1, 1),)),
    "cat of rows and columns": one(lambda x: torch.cat([x.mean(3), x.mean(2)], 2)),  # coordinate attention
    "cat along the split dims": one(lambda x: torch.cat([torch.cat([x, x * 2], 3), torch.cat([x, x], 3)], 2)),
    "cat an odd strip": one(lambda x: torch.cat([x[:, :, :, :3], x, x[:, :, :, -1:]], 3)),
    "stack": one(lambda x: torch.stack([x, x * 2, x + 1], 2)),
    **{f"roll of all by {n}": one(lambda x, n=n: x.roll(n) * x) for n in (1, -3, 64, 5000)},
    "roll of nothing": one(lambda x: x.roll(0) * x),
    "halves that change places": one(lambda x: torch.cat([x[..., x.shape[3] // 2 :], x[..., : x.shape[3] // 2]], 3)),
    "roll by a half and back": one(lambda x: torch.fft.ifftshift(torch.fft.fftshift(x) * x, (2, 3)) * x.cos()),
    "roll": one(lambda x: x.roll((3, -2), (2, 3)) + x.roll(1, 1)),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)


def columns_of_a_rank() -> list[int]:
    x = ff.shard(torch.randn(1, 2, 6, 20), mesh(1, 2))
    halves = torch.cat([x[..., 10:], x[..., :10]], 3)
    joined = [halves, torch.fft.fftshift(x), x.roll(7, 3), x.roll(2, 3), torch.cat([x[..., -1:], x, x[..., :1]], 3)]
    return [part.local.shape[3] for part in joined]  # type: ignore[attr-defined]


def test_no_rank_holds_much_more_than_its_share() -> None:
    """Shifts by a few columns and circular padding leave the others where they are."""
    assert rank_group(2).run(columns_of_a_rank) == [[10, 10, 10, 12, 11], [10, 10, 10, 8, 11]]
