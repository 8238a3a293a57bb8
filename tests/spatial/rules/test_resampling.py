"""interpolate: every mode, size and scale; infinities, dtypes, memory formats, few rows."""

import math
from functools import partial
from itertools import product

import torch.nn.functional as F

from tests.spatial.cases import Case, as_in_one_process, one
from tests.spatial.corners import (
    BF16,
    F16,
    F32,
    ODD,
    Corners,
    autocast,
    corners_as_in_torch,
    eight_bit,
    flat,
    last,
    merged,
    noise,
    spoiled,
)

CASES: dict[str, Case] = {
    "interpolate nearest x2": one(lambda x: F.interpolate(x, scale_factor=2)),
    "interpolate bilinear x2": one(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "interpolate bilinear x4": one(lambda x: F.interpolate(x, scale_factor=4, mode="bilinear")),
    "interpolate bicubic x2": one(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    "interpolate bilinear to a size": one(lambda x: F.interpolate(x, (23, 71), mode="bilinear")),
    "interpolate align_corners": one(lambda x: F.interpolate(x, (23, 71), mode="bilinear", align_corners=True)),
    "interpolate align_corners x2": one(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    ),
    "interpolate x0.5": one(lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear")),
    "interpolate x0.3 nearest": one(lambda x: F.interpolate(x, scale_factor=0.3)),
    "interpolate x1.7 recomputed": one(
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True)
    ),
    "interpolate x1.7": one(lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear")),
    "interpolate nearest to a size": one(lambda x: F.interpolate(x, (29, 90))),
    "nearest where planes round otherwise": Case(  # in lines and volumes torch's gradient is not that of its rows
        lambda x: [F.interpolate(x, (46, 22)), F.interpolate(x, (23, 11), mode="nearest-exact")], sizes=((14, 26),)),
    "interpolate nearest-exact": one(lambda x: F.interpolate(x, (29, 30), mode="nearest-exact")),
    "interpolate bicubic to a size": one(lambda x: F.interpolate(x, (29, 30), mode="bicubic")),
    "interpolate area": one(lambda x: F.interpolate(x, (5, 30), mode="area")),
    "interpolate antialias": one(lambda x: F.interpolate(x, (9, 20), mode="bilinear", antialias=True)),
    "interpolate one dim only": one(lambda x: F.interpolate(x, (x.shape[2], 90), mode="bilinear")),
    "interpolate mixed scales": one(lambda x: F.interpolate(x, scale_factor=(2, 1.3), mode="bilinear")),
    "interpolate trilinear": Case(
        lambda x: F.interpolate(x, scale_factor=(2, 2, 1.5), mode="trilinear"), ((1, 2, 3),)
    ),
    "interpolate to few rows": one(lambda x: F.interpolate(x, (2, 2), mode="bilinear")),
}  # fmt: skip
CORNERS = Corners()
resize = partial(partial, F.interpolate)


def resizing_infinities() -> None:
    for mode, value in product(("bilinear", "bicubic"), (math.inf, math.nan)):
        for name, op in {
            "to a size": resize(size=(9, 17), mode=mode),
            "corners": resize(size=(25, 21), mode=mode, align_corners=True),
            "x2": resize(scale_factor=2, mode=mode),
            "x3": resize(scale_factor=3, mode=mode),
            "x2 x1": resize(scale_factor=(2, 1), mode=mode),
            "x1 x1.5": resize(scale_factor=(1, 1.5), mode=mode),
            "same": resize(size=(13, 11), mode=mode),
            "antialias": resize(size=(6, 5), mode=mode, antialias=True),
            "to few": resize(size=(2, 1), mode=mode),
            "one to few": resize(size=(20, 1), mode=mode),
        }.items():
            CORNERS.add(f"{mode} {name} {value}", op, [spoiled(*ODD, value=value)])
    for value in (math.inf, math.nan):
        for name, options in {
            "size": {"size": (7, 13, 12)},
            "corners": {"size": (7, 13, 12), "align_corners": True},
            "x2": {"scale_factor": 2},
            "depth": {"scale_factor": (2, 1, 1)},
        }.items():
            volume = spoiled(1, 2, 5, 9, 11, value=value)
            CORNERS.add(f"trilinear {name} {value}", resize(mode="trilinear", **options), [volume])
        x = spoiled(*ODD, value=value)
        CORNERS.add(f"area {value}", resize(size=(5, 7), mode="area"), [x])
        CORNERS.add(f"linear {value}", flat(resize(size=17, mode="linear")), [x])
        recomputed = resize(scale_factor=1.7, mode="bilinear", recompute_scale_factor=True)
        CORNERS.add(f"recomputed {value}", recomputed, [x])


def resizing() -> None:
    for mode in ("bilinear", "bicubic"):
        for name, options in {"size": {"size": (9, 17)}, "x2": {"scale_factor": 2}}.items():
            op = resize(mode=mode, **options)
            CORNERS.add(f"{mode} {name} 8 bit", op, [eight_bit(1, 3, 13, 11)])
            CORNERS.add(f"{mode} {name} 8 bit channels last", op, [last(eight_bit(1, 3, 13, 11))])
            for channels in (3, 5):
                CORNERS.add(f"{mode} {name} channels last {channels}", op, [last(noise(2, channels, 13, 11))])
            for dtype in (BF16, F16):
                CORNERS.add(f"{mode} {name} {dtype}", op, [noise(*ODD, dtype=dtype, scale=50)])
            for dtype in (BF16, F32):
                CORNERS.add(f"{mode} {name} autocast {dtype}", autocast(op), [noise(*ODD, dtype=dtype)])
            CORNERS.add(f"{mode} {name} merged", merged(op), [noise(1, 3, 2, 6, 8)])
            CORNERS.add(f"{mode} {name} empty", op, [noise(0, 2, 13, 11)])
        smaller = resize(size=(5, 7), mode=mode, antialias=True)
        CORNERS.add(f"{mode} antialias 8 bit", smaller, [eight_bit(1, 3, 13, 11)])
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        for size, factor in (((13, 3), 0.5), ((25, 7), 0.5), ((7, 25), 0.3), ((13, 4), 0.7)):
            CORNERS.add(f"{mode} {size} by {factor}", resize(scale_factor=factor, mode=mode), [noise(1, 2, *size)])
        CORNERS.add(f"{mode} x41", resize(scale_factor=41, mode=mode), [noise(1, 1, 5, 6, dtype=F32)])
    for mode, pixels in product(("nearest", "nearest-exact"), (2, 5)):
        CORNERS.add(
            f"{mode} x{pixels} merged",
            merged(resize(scale_factor=pixels, mode=mode)),
            [noise(1, 3, 2, 6, 8)],
        )
    CORNERS.add("nearest channels last", resize(size=(17, 20)), [last(noise(2, 5, 13, 11))])
    for mode in ("nearest", "nearest-exact", "bilinear"):
        CORNERS.add(f"{mode} of no samples", resize(size=(17, 20), mode=mode), [noise(0, 3, 13, 11)])
    CORNERS.add("nearest 8 bit", resize(size=(17, 20)), [eight_bit(1, 3, 13, 11)])
    for mode in ("nearest", "trilinear"):
        CORNERS.add(f"{mode} 3d", resize(size=(9, 17, 20), mode=mode), [last(noise(2, 5, 4, 13, 11))])
    for columns in (3, 1):
        op = resize(size=(4, columns), mode="bilinear", antialias=True)
        CORNERS.add(f"antialias, columns left to a rank: {columns}", op, [noise(1, 2, 8, 3)])


resizing_infinities()
resizing()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)
