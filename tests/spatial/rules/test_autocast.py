"""What autocast would do to the inputs of a kernel that is called past it."""

import torch

from fullframe.spatial.rules.autocast import autocast_inputs


def test_inputs_are_cast_as_autocast_casts_them() -> None:
    single, double, half, none = torch.ones(2), torch.ones(2).double(), torch.ones(2).half(), None
    assert autocast_inputs(single, none) == (single, none)
    with torch.autocast("cpu", torch.bfloat16):
        found = autocast_inputs(single, double, half, none)
        product = torch.nn.functional.linear(single[None], single[None])
    assert [None if t is None else t.dtype for t in found] == [product.dtype, torch.float64, torch.bfloat16, None]
    with torch.autocast("cuda", torch.float16, enabled=False):
        assert autocast_inputs(single) == (single,)
