"""The median of all elements, and along whole dims: ties, NaN, infinities, integers, and what is sent."""

from unittest import mock

import pytest
import torch
from torch import Tensor

import fullframe as ff
from benchmarks.communication.traffic import counted
from fullframe.ranks import collectives
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import MESHES, Case, Op, one, require_the_numbers_of_one_process
from tests.spatial.corners import Corners, noise, require_no_faults
from tests.spatial.values import HALF_KINDS, INTEGER_KINDS, floats, halves, integers, on_all_meshes


def scaled(pred: Tensor, target: Tensor) -> Tensor:
    """Predicted depth brought to the scale of the measured one by their medians over valid pixels."""
    mask = target.detach() > 0.1
    shift, scale = pred[mask].median(), (pred[mask] - pred[mask].median()).abs().mean()
    return ((pred[mask] - shift) / scale - target[mask] / target[mask].median()).abs().mean()


CASES: dict[str, Case] = {
    "of all": one(lambda x: [x.median(), torch.median(x.relu()), x[..., 1:].nanmedian(), x.flatten(1).median()]),
    "along whole dims": one(lambda x: [*x.median(1), *torch.median(x, 0, True), *x.nanmedian(-3)]),
    "of what a mask picked": Case(scaled, ((2, 4), (2, 4))),
}
OVER_FLOATS: dict[str, Op] = {"median": lambda x: [x.median(), x.nanmedian(), (x - x).median(), (x - x).nanmedian()]}
HALVES: dict[str, Op] = {"median": lambda x: [x.median(), x.nanmedian(), *x.median(1)]}
INTEGERS: dict[str, Op] = {"median": lambda x: [x.median(), x.nanmedian()] if x.dtype != torch.bool else []}
X = noise(1, 2, 13, 11)
CORNERS = Corners()
CORNERS.add("all NaN", lambda x: [(x / 0 * 0).median(), (x / 0 * 0).nanmedian()], [X])
CORNERS.add("float32", lambda x: [x.median(), (x * 1e-38).median(), (x * 1e38 * 9).nanmedian()], [X.float()])
CORNERS.add("int64", lambda x: [x.median(), (-x).median(), (x // 9).median()], [(X * 2**60).long()])
CORNERS.add("one rank has none", lambda x: [x[x > x.median()].median(), x[x >= x.max()].median()], [X.sort(-1).values])


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    require_the_numbers_of_one_process(__name__, name)


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_corners(height: int, width: int) -> None:
    require_no_faults(__name__, height, width)


def test_infinities_nan_ties_and_zeros_go_through_as_in_torch() -> None:
    assert not on_all_meshes(floats, __name__, "median")


@pytest.mark.parametrize("kind", HALF_KINDS)
def test_short_floats(kind: str) -> None:
    assert not on_all_meshes(halves, __name__, "median", kind)


@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_integers(kind: str) -> None:
    assert not on_all_meshes(integers, __name__, "median", kind)


def _refusals() -> list[str]:
    x, found = ff.shard(X, mesh(1, 2)), []
    for call in (lambda: x.median(3), lambda: (x > 0).median(), lambda: x.median(7)):
        try:
            call()
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_a_split_dim_and_what_torch_refuses() -> None:
    for found in rank_group(2).run(_refusals):
        assert found[0] == "UnsupportedOp" and found[2] == "IndexError"
        assert found[1] in ("RuntimeError", "NotImplementedError")


def _sent() -> int:
    x = ff.shard(noise(1, 1, 256, 512), mesh(1, 2)).detach().requires_grad_()
    with mock.patch.object(collectives, "fits", lambda tensor: False):
        return counted(lambda: x.median().backward()).total()


def test_counts_are_sent_and_no_elements() -> None:
    assert all(sent < 20_000 for sent in rank_group(2).run(_sent)), "half of the map has 524288 bytes"
