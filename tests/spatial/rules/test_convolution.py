"""Convolution: every stride, padding, dilation, group; halos wider than a shard; infinities, dtypes, memory formats."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fullframe as ff
from fullframe.geometry.window import Window
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.rules.convolution import JOINED_BYTES
from tests.exactness import mesh
from tests.spatial.cases import Case, as_in_one_process, one
from tests.spatial.corners import F32, F64, Corners, corners_as_in_torch, last, merged, noise, of_complex
from tests.spatial.windows import geometries, require_exact, windowed, windows


def conv(kernel: int, stride: int = 1, padding: Any = 0, dilation: int = 1, groups: int = 1) -> Case:
    return Case(
        lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups),
        whole=((8, 4 // groups, kernel, kernel), (8,)),
    )


def by_its_own(x: Tensor) -> Tensor:
    """As dynamic filters and correlations do it: a kernel of each sample and channel, made of the image."""
    kernel = F.adaptive_avg_pool2d(x.sin(), 5).view(8, 1, 5, 5)
    return F.conv2d(F.pad(x, (2, 2, 2, 2)).view(1, 8, x.shape[2] + 4, -1), kernel, groups=8)


def at_two_pixels(x: Tensor) -> Tensor:
    """The channels at two places of (N, C, H, W), as a mask picks them: (2, C), of which split ranks have parts."""
    mask = torch.zeros_like(x[:, 0]) > 1
    mask[0, x.shape[2] // 2, 0] = mask[-1, 0, -1] = True
    return x.sin().permute(0, 2, 3, 1)[mask]


def by_instances(x: Tensor) -> Tensor:
    """As instance segmentation has it: kernels and biases from the image at two places (CondInst, SOLOv2)."""
    kernels = at_two_pixels(x)
    three = kernels[:, :, None, None].expand(-1, -1, 3, 3)
    return F.conv2d(x, kernels[:, :, None, None], kernels[:, 0]) + F.conv2d(x, three, kernels[:, 1], padding=1)


CASES: dict[str, Case] = {
    "conv by what a mask picks": Case(by_instances),
    "conv by a kernel made of the image": Case(by_its_own),
    "conv 3/1/1": conv(3, 1, 1),
    "conv 5/1/2": conv(5, 1, 2),
    "conv 7/1/3 depthwise": conv(7, 1, 3, groups=4),
    "conv 7/2/3": conv(7, 2, 3),
    "conv 3/2/1": conv(3, 2, 1),
    "conv 4/4/0": conv(4, 4, 0),
    "conv 2/2/0": conv(2, 2, 0),
    "conv 3 dilation 2": conv(3, 1, 2, 2),
    "conv 3 dilation 5": conv(3, 1, 5, 5),
    "conv 1/1/0": conv(1),
    "conv 1/2/0": conv(1, 2),
    "conv 3/1/0": conv(3),
    "conv 1/1/2": conv(1, 1, 2),
    "conv 6/3/1 groups": conv(6, 3, 1, groups=2),
    "conv 4 same": conv(4, 1, "same"),
    "conv 5 same dilation 2": conv(5, 1, "same", 2),
    "conv 3 valid": conv(3, 2, "valid"),
    "conv oblong": Case(lambda x, w: F.conv2d(x, w, None, (2, 1), (0, 3), (1, 2)), whole=((3, 4, 2, 5),)),
    "conv 11/1/5, halo wider than a shard": Case(
        lambda x, w: F.conv2d(F.conv2d(x, w, None, 4, 5), w, None, 1, 5), whole=((4, 4, 11, 11),)
    ),
    "conv 3d": Case(lambda x, w, b: F.conv3d(x, w, b, (1, 2, 2), 1), ((2, 3, 5),), ((4, 3, 3, 3, 3), (4,))),
    "conv whose border sees padding alone": one(
        lambda x: F.conv2d(x[:, :, :2, :5], x.new_ones(4, 1, 2, 2), None, 2, (3, 2), (2, 1), 4)
    ),
    "conv unbatched": Case(lambda x, w: F.conv2d(x, w, None, 2, 1), ((4,),), ((5, 4, 3, 3),)),
    "conv of lines, written to": Case(
        lambda x, w: F.relu_(F.conv1d(x.transpose(1, 2).flatten(0, 1), w, None, 1, 1)), whole=((3, 4, 3),)
    ),
    "1x1 convolution on tokens": Case(lambda x, w: F.conv1d(x.flatten(2), w), whole=((3, 4, 1),)),
    "split channels": Case(lambda x, w, v: [
        F.conv1d(x.flatten(2).mT[..., :5], w[: x.shape[2] * x.shape[3]].T[:, :, None]),
        F.conv2d(x.transpose(1, 2), v[:, : x.shape[2]]), F.conv2d(x.transpose(1, 3), v[:, : x.shape[3]])],
        whole=((16 * 64, 6), (3, 64, 1, 2))),
}  # fmt: skip
CORNERS = Corners()


def convolving() -> None:
    k = noise(4, 3, 3, 3)
    for name, (op, weight) in {
        "convolution": (partial(F.conv2d, padding=1), k),
        "strided": (partial(F.conv2d, padding=1, stride=2), k),
        "wide": (partial(F.conv2d, padding=6, dilation=6), k),
        "patches": (partial(F.conv2d, stride=2), k[..., :2, :2]),
        "single": (F.conv2d, k[..., :1, :1]),
    }.items():
        for dtype in (F32, F64):
            x = last(noise(2, 3, 23, 22, dtype=dtype))
            CORNERS.add(f"{name} channels last {dtype}", op, [x], [weight.to(dtype)])
        CORNERS.add(f"{name} empty", op, [noise(0, 3, 23, 22)], [weight])
        CORNERS.add(f"{name} few", op, [noise(1, 3, 3, 4)], [weight])
        CORNERS.add(f"{name} complex", of_complex(op), [noise(1, 3, 7, 8)], [weight])
        CORNERS.add(f"{name} merged", merged(op), [noise(1, 2, 3, 6, 8)], [weight])
    volume, w = last(noise(2, 3, 9, 23, 22, dtype=F32)), noise(4, 3, 3, 3, 3, dtype=F32)
    CORNERS.add("3d channels last", partial(F.conv3d, padding=1), [volume], [w])
    CORNERS.add("wide 3d channels last", partial(F.conv3d, padding=6, dilation=6), [volume], [w])


convolving()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)


def _convolution(g: dict[str, Any]) -> dict[str, float]:
    op = lambda x, w: F.conv2d(x, w, None, g["stride"], g["padding"], g["dilation"], g["groups"])  # noqa: E731
    return windowed(op, g, (4, 4 // g["groups"], *g["kernel"]))


@settings(max_examples=150)
@given(geometries)
def test_any_window(g: dict[str, Any]) -> None:
    assume(all(w.output_size(n) >= 1 for w, n in zip(windows(Window, g), g["size"], strict=True)))
    require_exact(_convolution, g)


class _Convolutions(TorchDispatchMode):
    """Counts them, forward and backward."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::convolution", "aten::convolution_backward")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("limit", "channels", "calls"), [(1, 1, 6), (1, 2, 2), (0, 2, 6), (1024, 1, 2)])
def test_a_map_is_joined_where_it_or_its_weight_makes_that_cheaper(
    monkeypatch: pytest.MonkeyPatch, limit: int, channels: int, calls: int
) -> None:
    """An inner rank's part has 1,024 bytes, a weight 144 for each channel of the result."""
    monkeypatch.setitem(JOINED_BYTES, "cpu", limit)
    with fake_job(1, 4):
        x = ff.shard(noise(1, 2, 32, 8), mesh(4, 1), check=False)
        weight = noise(channels, 2, 3, 3).requires_grad_()
        with _Convolutions() as found:
            made = F.conv2d(x, weight, padding=1)
            torch.autograd.grad(made.local, weight, torch.ones_like(made.local))  # type: ignore[attr-defined]
    assert found.count == calls
