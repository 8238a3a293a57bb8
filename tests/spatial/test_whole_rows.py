"""Whole rows and back: every element once, the rows shared out, dims merged from two split ones in their order."""

import torch

import fullframe as ff
from fullframe.spatial.tensor import local_of
from fullframe.spatial.whole_rows import everywhere, held_numbers, sent_home, sizes_held, whole_rows
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import MESHES


def _there_and_back(height: int, width: int) -> list[str]:
    whole = torch.arange(2 * 3 * 7 * 5, dtype=torch.float64).view(2, 3, 7, 5)
    split = ff.shard(whole, mesh(height, width))
    wrong = []
    for name, x, dim, full in (
        ("width", split, 3, whole),
        ("height", split, -2, whole),
        ("both", split.flatten(2), 2, whole.flatten(2)),
        ("one row", split[0, 0].flatten(), 0, whole[0, 0].flatten()),
    ):
        local, spec = local_of(x).clone().requires_grad_(), x.spec
        rows = whole_rows(local, spec, dim)
        flat = full.movedim(dim, -1).flatten(0, -2) if full.dim() > 1 else full[None]
        if not all(any(torch.equal(row, one) for one in flat) for row in rows):
            wrong.append(f"{name}: rows that are none of the whole tensor")
        home = sent_home(rows, spec, dim)
        (gradient,) = torch.autograd.grad((home * local.detach()).sum(), local)
        if not torch.equal(home, local) or not torch.equal(gradient, local):
            wrong.append(f"{name}: they came back otherwise")
        if not torch.equal(everywhere(rows.sum(1), spec, dim), x.sum(dim).local if _split(x, dim) else x.sum(dim)):
            wrong.append(f"{name}: not what was found in them")
        mine = full.index_select(dim, held_numbers(spec, dim, local.device))
        if mine.shape[dim] != local.shape[dim] or local.shape[dim] not in sizes_held(spec, dim):
            wrong.append(f"{name}: other numbers")
    return wrong


def _split(x: ff.SpatialTensor, dim: int) -> bool:
    return any(p.dim != dim % x.dim() for p in x.spec.placements)


def test_rows_come_whole_and_go_home() -> None:
    for height, width in MESHES:
        assert rank_group(height * width).run(_there_and_back, height, width) == [[]] * (height * width)
