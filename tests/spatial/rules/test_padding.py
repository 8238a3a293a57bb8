"""Padding of every mode."""

import pytest
import torch.nn.functional as F

from tests.spatial.cases import MESHES, Case, Op, one, require_the_numbers_of_one_process
from tests.spatial.corners import F32, F64, Corners, last, noise, require_no_faults

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


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    require_the_numbers_of_one_process(__name__, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_corners(mesh: tuple[int, int]) -> None:
    require_no_faults(__name__, *mesh)
