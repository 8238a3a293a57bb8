"""Padding of every mode."""

import torch.nn.functional as F

from tests.spatial.cases import Case, Op, as_in_one_process, one
from tests.spatial.corners import F32, F64, Corners, corners_as_in_torch, last, noise

CASES: dict[str, Case] = {
    "pad constant": one(lambda x: F.pad(x, (1, 2, 3, 4), value=1.5)),
    "pad crop": one(lambda x: F.pad(x, (-3, 2, 1, -2))),
    "pad channels": one(lambda x: F.pad(x, (0, 0, 0, 0, 1, 2))),
    "pad reflect": one(lambda x: F.pad(x, (3, 2, 1, 4), mode="reflect")),
    "pad replicate": one(lambda x: F.pad(x, (3, 2, 1, 4), mode="replicate")),
    "pad reflect unbatched": Case(lambda x: F.pad(x, (3, 2, 1, 4), mode="reflect"), ((4,),)),
    "pad replicate 3d": Case(lambda x: F.pad(x, (3, 2, 1, 4, 1, 1), mode="replicate"), ((1, 2, 3),)),
    "pad circular": one(lambda x: F.pad(x, (3, 2, 1, 4), mode="circular")),
}  # fmt: skip
CORNERS = Corners()


def padded(mode: str) -> Op:
    return lambda x, w: F.pad(x, (1, 1) * (x.dim() - 2), mode) * w.flatten()[0]


def padding() -> None:
    weight = noise(4, 3, 3, 3)
    for name, mode in {"circular": "circular", "reflected": "reflect", "padded": "constant"}.items():
        op = padded(mode)
        for dtype in (F32, F64):
            x = last(noise(2, 3, 23, 22, dtype=dtype))
            CORNERS.add(f"{name} channels last {dtype}", op, [x], [weight.to(dtype)])
        CORNERS.add(f"{name} empty", op, [noise(0, 3, 23, 22)], [weight])
        CORNERS.add(f"{name} few", op, [noise(1, 3, 3, 4)], [weight])
    volume, w = last(noise(2, 3, 9, 23, 22, dtype=F32)), noise(4, 3, 3, 3, 3, dtype=F32)
    CORNERS.add("circular 3d channels last", padded("circular"), [volume], [w])


padding()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)
