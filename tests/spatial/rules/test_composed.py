"""Functions that stand for others."""

import torch
from torch.nn.utils.rnn import pad_sequence

from tests.spatial.cases import Case, as_in_one_process, small

CASES: dict[str, Case] = {
    "pad_sequence": small(lambda x: [
        pad_sequence([x[0, 0], x[1, 2, :4]], padding_value=2.0),
        pad_sequence([x[0, 0], x[1, 2, :4]], batch_first=True, padding_side="left"),
        pad_sequence([x[0].flatten(1).T, x[1, :, 1:5].flatten(1).T, x[1, :, :, 2].T], batch_first=True)]),
    "hsplit": small(lambda x: torch.hsplit(x, 2)),
    "vsplit": small(lambda x: x.vsplit(2)),
    "dsplit": small(lambda x: torch.dsplit(x, [2, 5])),
    "vstack": small(lambda x: torch.vstack([x, x.sin()])),
    "hstack": small(lambda x: torch.hstack([x, x[:, :1]])),
    "dstack": small(lambda x: torch.dstack([x[0, 0], x[0, 1]])),
    "column_stack": small(lambda x: torch.column_stack([x[0, 0], x[0, 1]])),
    "atleast_3d": small(lambda x: torch.atleast_3d(x[0, 0] * 2)),
    "broadcast_tensors": small(lambda x: torch.broadcast_tensors(x, x[:1, :, :1])),
    "sum_to_size": small(lambda x: x.sum_to_size(4, x.shape[2], 1) * 2),
    "rot90": small(lambda x: torch.rot90(x, -1, (2, 3))),
    "rot90 thrice": small(lambda x: x.rot90(3, (-1, -2))),
    "tril": small(lambda x: torch.tril(x, -1)),
    "triu in place": small(lambda x: (x * 2).triu_(3)),
    "cross": small(lambda x: torch.cross(x[:, :3], x[:, 1:].sin(), dim=1)),
    "linalg.cross": small(lambda x: torch.linalg.cross(x[:1, :3], x[:, 1:], dim=1)),
    **{f"cross of split vectors {n}": small(lambda x, n=n: torch.linalg.cross(x[:, :, :3, :3], x[:, :, :3, 4:7], dim=n))
       for n in (2, 3)},
    "view_as_complex of split parts": small(lambda x: torch.view_as_complex(x[..., :2].contiguous()).abs()),
    "cdouble": small(lambda x: torch.view_as_real(x.cdouble() * x)),
    "slice_copy": small(lambda x: torch.slice_copy(x, 3, 1, -2, 3)),
    "unfold_copy": small(lambda x: torch.unfold_copy(x, 3, 3, 2)),
    "slice_scatter": small(lambda x: torch.slice_scatter(x, x[:, :, :, :3].sin(), 3, 2, 8, 2)),
    "slice_scatter of a whole one": Case(lambda x, w: x.slice_scatter(w, 2, 1, 6), whole=((2, 4, 5, 11),),
        sizes=((7, 11),)),
    "select_scatter": small(lambda x: x.select_scatter(x[:, :, 3].cos(), 2, -1)),
    "constant_pad_nd": small(lambda x: torch.constant_pad_nd(x, [1, 2, 0, 3], 4)),
    "fill": Case(lambda x, w: torch.fill(x, w[0]) * x, whole=((1,),), sizes=((7, 11),)),
    "zero_": small(lambda x: torch.zero_(x * 2) + x),
    "complex": small(lambda x: torch.view_as_real(torch.complex(x, x.cos()))),
    "polar": small(lambda x: torch.view_as_real(torch.polar(x.abs() + 1, x))),
    "view_as_complex": small(lambda x: torch.view_as_complex(torch.stack([x, x.cos()], -1)).abs()),
    "frexp": small(lambda x: torch.frexp(x)[0]),
    "isin": small(lambda x: torch.isin((x * 3).round(), torch.tensor([1.0, -2.0], dtype=x.dtype))),
    "bucketize": small(lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=x.dtype), right=True)),
    "unravel_index": small(lambda x: [
        *torch.unravel_index(x.detach().argmax(1) * 7 - 3, (2, 3, 5)),
        *torch.unravel_index(x.detach().argmax(1).int(), 3)]),
    "permute_copy": small(lambda x: torch.permute_copy(x, (0, 2, 3, 1))),
    "unbind_copy": small(lambda x: torch.unbind_copy(x, 1)),
    "unsafe_chunk": small(lambda x: torch.unsafe_chunk(x, 3, 3)),
    "vander": small(lambda x: [t * x.mean() for t in (  # of which torch has no gradient
        torch.vander(x[0, 0, 0].detach(), 4), torch.vander(x[0, 0, :, 0].detach(), increasing=True),
        torch.linalg.vander(x.detach(), N=3))]),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
