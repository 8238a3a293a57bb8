"""A part and its borrowed strips by global rows."""

import torch

import fullframe as ff
from fullframe.geometry.extents import Extents
from fullframe.ranks.mesh import spatial_of
from fullframe.spatial.halo import Cut, Halo, Piece, put_together
from tests.rank_group import rank_group
from tests.spatial.fake import spatial

WHOLE = torch.arange(48.0).view(6, 8)
#   rows 0 1 2 3 | 4 5,  columns 0 1 2 | 3 .. 7; each rank wants one row and two columns of its neighbours
ROWS, COLUMNS = Extents((0, 4, 6)), Extents((0, 3, 8))
WANTED_ROWS, WANTED_COLUMNS = (range(0, 5), range(3, 6)), (range(0, 5), range(1, 8))


def _halo() -> tuple[bool, bool, float]:
    on = spatial_of(ff.init_mesh(2, 2))
    cuts = Cut(0, ROWS, WANTED_ROWS, on.axis("height")), Cut(1, COLUMNS, WANTED_COLUMNS, on.axis("width"))
    rows, columns = cuts[0].own, cuts[1].own
    local = WHOLE[rows.start : rows.stop, columns.start : columns.stop].clone()
    halo = Halo(local, cuts).wait()
    wanted = tuple(cut.rows for cut in cuts)
    inside = WHOLE[wanted[0].start : wanted[0].stop, wanted[1].start : wanted[1].stop]
    around = halo.region((range(-1, 7), range(-2, 9)), fill=-1.0)  # of the whole image, and more
    # Each piece's gradient is 1: the local part gets 1 for itself and 1 for every rank that borrowed the row.
    ones = [torch.ones_like(piece.tensor) for piece in halo.pieces]
    back = halo.start_return(ones).add_to(ones[0])
    readers = torch.zeros(6, 8)
    for r in WANTED_ROWS:
        for c in WANTED_COLUMNS:
            readers[r.start : r.stop, c.start : c.stop] += 1
    apart = (back - readers[rows.start : rows.stop, columns.start : columns.stop]).abs().max()
    return torch.equal(halo.region(wanted), inside), bool((around[0] == -1).all()), float(apart)


def test_strips_hold_their_corners_and_give_their_gradients_back() -> None:
    assert rank_group(4).run(_halo) == [(True, True, 0.0)] * 4


def test_pieces_are_assembled_and_what_nobody_holds_is_filled() -> None:
    with spatial(1, 2) as on:
        cuts = (Cut(1, COLUMNS, WANTED_COLUMNS, on.axis("width")),)
        pieces = [Piece(WHOLE[:, :3], (range(0, 3),)), Piece(WHOLE[:, 5:6], (range(5, 6),))]
        joined = put_together(pieces, cuts, (range(2, 7),), [6, 5], fill=-1.0)
        assert joined[0].tolist() == [2, -1, -1, 5, -1]
        view = put_together(pieces, cuts, (range(1, 3),), [6, 2])
        assert view.data_ptr() == WHOLE[:, 1:].data_ptr()  # one piece covers it: no copy
