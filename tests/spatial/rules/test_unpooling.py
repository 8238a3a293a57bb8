"""Max pooling with indices and its partial inverse: whole-image indices, ties, strays, a small SegNet."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fullframe as ff
from fullframe.spatial.tensor import wrap
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process, one
from tests.spatial.corners import (
    F16,
    F32,
    F64,
    ODD,
    Corners,
    corners_as_in_torch,
    deep,
    flat,
    last,
    merged,
    noise,
    spoiled,
)
from tests.spatial.fake import spatial
from tests.spatial.sent import elements_sent


def pooled(*options: Any, **named: Any) -> Op:
    return lambda x: F.max_pool2d(x, *options, return_indices=True, **named)


def there_and_back(kernel: int, stride: int, padding: int = 0, dilation: int = 1, scale: float = 1.0) -> Op:
    """Pooled, scaled, and put back where it came from: values of one place differ by where they were pooled."""

    def op(x: Tensor) -> Tensor:
        y, places = F.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)
        ramp = torch.linspace(1, 1 + scale, y.shape[-1], dtype=y.dtype)
        return F.max_unpool2d(y * ramp, places, kernel, stride, padding, x.shape[-2:]) * x

    return op


def back(pool: Any, unpool: Any) -> Op:
    return lambda x: unpool(*pool(x, 2, return_indices=True), 2, output_size=x.size())


def segnet(x: Tensor, *weights: Tensor) -> Tensor:
    """Two levels down and up again, by indices; the sizes are odd on the way."""
    places, sizes = [], []
    for weight in weights[:2]:
        x, sizes = F.conv2d(x, weight, padding=1).relu(), [*sizes, x.shape[-2:]]
        x, index = F.max_pool2d(x, 2, return_indices=True)
        places.append(index)
    for weight, index, size in zip(weights[2:], reversed(places), reversed(sizes), strict=True):
        x = F.conv2d(F.max_unpool2d(x, index, 2, output_size=size), weight, padding=1).tanh()
    return x


def strays(x: Tensor) -> Tensor:
    """Every element goes to the opposite corner of the image, and neighbours of a row change places."""
    y, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, x.shape[-1] * x.shape[-2] - 1 - places, 2, output_size=x.shape[-2:])


def elsewhere(x: Tensor) -> Tensor:
    """Put back as by other windows than those that it was pooled by, into a wider image."""
    y, places = F.max_pool2d(x, 3, 1, 1, 2, return_indices=True)
    return F.max_unpool2d(y * y, places, 3, 1, 0)


def of_whole_values(pool: Any, unpool: Any) -> Op:
    """Of a map that has become too small to be split, by the indices of one that was."""

    def op(x: Tensor) -> Tensor:
        y, places = pool(x, 2, return_indices=True)
        y = y.full() if isinstance(y, ff.SpatialTensor) else y
        return unpool(y * y, places, 2, output_size=x.size())  # type: ignore[no-any-return]

    return op


CASES: dict[str, Case] = {
    "max_pool 2/2": one(pooled(2)),
    "max_pool 3/2/1": one(pooled(3, 2, 1)),
    "max_pool 3/1/1 dilation 2, ceil": one(pooled(3, 2, 1, 2, True)),
    "max_pool 3d": Case(lambda x: F.max_pool3d(x, 3, 2, 1, return_indices=True), ((1, 2, 6),)),
    "max_pool 1d": one(flat(lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True))),
    "adaptive_max_pool (4, 6)": one(lambda x: F.adaptive_max_pool2d(x.relu(), (4, 6), True)),
    "adaptive_max_pool 1": one(lambda x: F.adaptive_max_pool2d(x, 1, True)),
    "adaptive_max_pool 3d": Case(lambda x: F.adaptive_max_pool3d(x, (2, 5, 7), True), ((1, 2, 6),)),
    "back 2/2": one(there_and_back(2, 2)),
    "back 3/3": one(there_and_back(3, 3)),
    "back 3/2/1, several at one place": one(there_and_back(3, 2, 1)),
    "back 3/1/1, several at one place": one(there_and_back(3, 1, 1)),
    "back 3/1/1 of windows elsewhere": one(elsewhere),
    "back 3d": Case(back(F.max_pool3d, F.max_unpool3d), ((1, 2, 6),)),
    "back 1d": one(flat(back(F.max_pool1d, F.max_unpool1d))),
    "back from everywhere": one(strays),
    "whole values": one(of_whole_values(F.max_pool2d, F.max_unpool2d)),
    "whole values 1d": one(flat(of_whole_values(F.max_pool1d, F.max_unpool1d))),
    "whole values 3d": Case(of_whole_values(F.max_pool3d, F.max_unpool3d), ((1, 2, 6),)),
    "a small SegNet": Case(segnet, ((2, 3),), ((6, 3, 3, 3), (8, 6, 3, 3), (6, 8, 3, 3), (2, 6, 3, 3))),
}  # fmt: skip
CORNERS = Corners()


def corners() -> None:
    for value in (math.inf, -math.inf, math.nan):
        x = spoiled(*ODD, value=value)
        CORNERS.add(f"pooled {value}", pooled(3, 2, 1), [x])
        CORNERS.add(f"back {value}", there_and_back(2, 2), [x])
        CORNERS.add(f"adaptive {value}", lambda x: F.adaptive_max_pool2d(x, (5, 4), True), [x])
    low = torch.full(ODD, -math.inf, dtype=F64)
    low[..., 9:, 9:] = 1
    for dilation in (1, 2):
        CORNERS.add(f"of -inf {dilation}", pooled(3, 2, 1, dilation), [low])
        op = deep(lambda x, d=dilation: F.max_pool3d(x, 3, 2, 1, d, return_indices=True))
        CORNERS.add(f"3d of -inf {dilation}", op, [noise(1, 4, 13, 11).clamp(max=0) * math.inf])
    CORNERS.add("adaptive of -inf", lambda x: F.adaptive_max_pool2d(x, (4, 5), True), [low])
    CORNERS.add("ties", pooled(3, 1, 1), [noise(*ODD).round()])
    CORNERS.add("adaptive ties", lambda x: F.adaptive_max_pool2d(x, (4, 5), True), [noise(*ODD).round()])
    for name, x in {
        "few": noise(1, 2, 3, 4),
        "one row": noise(1, 2, 2, 3),
        "empty": noise(0, 3, 23, 22),
        "unbatched": noise(3, 23, 22),
        "channels last": last(noise(2, 3, 23, 22)),
        "fp32": noise(*ODD, dtype=F32),
        "fp16": noise(*ODD, dtype=F16),
    }.items():
        CORNERS.add(f"pooled {name}", pooled(2, 2), [x])
        CORNERS.add(f"back {name}", there_and_back(2, 2), [x])
    CORNERS.add("back merged", merged(there_and_back(2, 2)), [noise(1, 3, 2, 6, 8)])
    places = F.max_pool2d(noise(*ODD), 2, return_indices=True)[1]
    CORNERS.add("whole places", lambda x, p: F.max_unpool2d(x, p, 2, output_size=ODD), [noise(1, 2, 6, 5)], [places])
    CORNERS.add("module", nn.MaxPool2d(3, 2, 1, return_indices=True), [noise(*ODD)])


corners()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)


def _sent(height: int, width: int) -> dict[str, int]:
    x = ff.shard(noise(1, 2, 24, 24), mesh(height, width))
    y, places = F.max_pool2d(x, 2, return_indices=True)
    wide, places_of_wide = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    return {
        "2/2": elements_sent(partial(F.max_unpool2d, y, places, 2)),
        "3/2/1": elements_sent(partial(F.max_unpool2d, wide, places_of_wide, 3, 2, 1, (24, 24))),
        "strays": elements_sent(partial(F.max_unpool2d, y, 575 - places, 2)),
    }


def test_windows_that_do_not_overlap_send_nothing_and_others_a_row() -> None:
    for sent in rank_group(2).run(_sent, 2, 1):
        assert sent["2/2"] == 0
        assert sent["3/2/1"] <= 2 * 2 * 12  # values and places of a row of 12 in 2 channels
        assert sent["strays"] == 2 * 2 * 6 * 12


def _refused(height: int, width: int) -> str:
    y, places = F.max_pool2d(noise(1, 2, 12, 12), 2, return_indices=True)
    places[0, 0, 0, 0] = 144  # on the first rank alone
    on = mesh(height, width)
    with pytest.raises(RuntimeError, match="Found an invalid max index") as raised:
        F.max_unpool2d(ff.shard(y, on), ff.shard(places, on), 2)
    return type(raised.value).__name__


def _integers(height: int, width: int) -> None:
    y, places = F.max_pool2d(noise(1, 2, 12, 12).long(), 2, return_indices=True)
    on = mesh(height, width)
    with pytest.raises(NotImplementedError):  # as by torch
        F.max_unpool2d(ff.shard(y, on), ff.shard(places, on), 2)


def test_integers_are_refused_as_by_torch() -> None:
    rank_group(2).run(_integers, 1, 2)


def test_a_place_outside_the_image_is_refused_on_all_ranks() -> None:
    assert rank_group(2).run(_refused, 1, 2) == ["RuntimeError"] * 2


def test_a_simulation_takes_places_for_those_of_the_windows() -> None:
    with spatial(2, 1):
        real = ff.shard(torch.empty(1, 2, 13, 11), mesh(2, 1))
        with FakeTensorMode():
            x = wrap(torch.empty(real.local.shape, requires_grad=True), real.spec)
            y = F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[2:])
            y.sum().backward()
    assert y.shape == x.shape
