"""Random programs of a few ops on volumes (N, C, D, H, W) whose depth is split, against one process.

`pytest tests/whole/test_volume_fuzz.py --seed N` draws other programs, `--programs N` a tenth as many.
"""

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.errors import UnsupportedOp
from tests.exactness import differences_from, one_process
from tests.rank_group import rank_group
from tests.spatial.cases import VOLUME_MESHES

TOLERANCE, FLOOR = 1e-9, 1e-4  # as for programs on images
MOST = 60_000  # elements that a program may grow to

Op = Callable[[Tensor], Tensor]


class Outcome(NamedTuple):
    seed: int
    mesh: tuple[int, int, int]
    program: str
    verdict: str  # exact, refused, or what is wrong


def _weight(*shape: int) -> Tensor:
    """The same on all ranks, and far from symmetric."""
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).mul(7).sin().view(shape)


def _windows(r: random.Random, x: Tensor) -> dict[str, Op]:
    channels = x.shape[1]
    kernel, stride, padding, dilation = (_three(r, *ends) for ends in ((1, 3), (1, 2), (0, 2), (1, 2)))
    half = tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))
    less = tuple(min(p, k - 1) for p, k in zip(padding, kernel, strict=True))
    groups, counted = r.choice([1, channels]), r.random() < 0.5
    return {
        f"conv3d {kernel} {stride} {padding} {dilation} {groups}": lambda x: F.conv3d(
            x, _weight(channels, channels // groups, *kernel), None, stride, padding, dilation, groups
        ),
        f"conv_transpose3d {kernel} {stride} {less}": lambda x: F.conv_transpose3d(
            x, _weight(channels, 2, *kernel), None, stride, less
        ),
        f"max_pool3d {kernel} {stride} {half}": lambda x: F.max_pool3d(x, kernel, stride, half, 1, True),
        f"avg_pool3d {kernel} {stride} {half} {counted}": lambda x: F.avg_pool3d(
            x, kernel, stride, half, False, counted
        ),
    }


def _sizes(r: random.Random, x: Tensor) -> dict[str, Op]:
    size, corners, dim, pads = _three(r, 1, 9), r.random() < 0.5, r.randint(2, 4), [r.randint(-1, 2) for _ in range(6)]
    rows = [slice(r.randint(0, n // 2), r.randint(n // 2 + 1, n), r.randint(1, 2)) for n in x.shape[2:]]
    middle = x.shape[2] // 2
    return {
        f"adaptive {size}": lambda x: F.adaptive_avg_pool3d(x, size),
        f"trilinear {size} {corners}": lambda x: F.interpolate(x, size, mode="trilinear", align_corners=corners),
        "nearest twice": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        f"slices {rows}": lambda x: x[:, :, rows[0], rows[1], rows[2]],
        f"pad {pads}": lambda x: F.pad(x, pads),
        f"cat {dim}": lambda x: torch.cat([x, x.flip([dim])], dim),
        f"diff {dim}": lambda x: x.diff(dim=dim),
        "first and last column": lambda x: x[..., [0, -1]],
        "the slice in the middle": lambda x: x - x[:, :, middle : middle + 1],
    }


def _orders(r: random.Random, x: Tensor) -> dict[str, Op]:
    dim, order, shifts = r.randint(2, 4), r.sample([2, 3, 4], 3), _three(r, -3, 3)
    return {
        f"permute {order}": lambda x: x.permute(0, 1, *order).contiguous(),
        f"transpose {dim}": lambda x: x.transpose(dim, 2 + (dim - 1) % 3),
        f"flip {dim}": lambda x: x.flip([dim]),
        f"roll {shifts}": lambda x: x.roll(shifts, (2, 3, 4)),
        f"sort {dim}": lambda x: x.sort(dim)[0],
        f"cumsum {dim}": lambda x: x.cumsum(dim),
        "slices and rows merged": lambda x: x.flatten(2, 3).relu().unflatten(2, x.shape[2:4]),
        "rows and columns merged": lambda x: (x.flatten(3) * 2).view(x.shape),
    }


def _values(r: random.Random, x: Tensor) -> dict[str, Op]:
    dims, dim, channels = r.sample(range(5), r.randint(1, 3)), r.randint(2, 4), x.shape[1]
    return {
        "batch norm": lambda x: F.batch_norm(x, None, None, None, None, True),
        "instance norm": lambda x: F.instance_norm(x),
        "group norm": lambda x: F.group_norm(x, 1),
        "layer norm of tokens": lambda x: F.layer_norm(x.flatten(2).mT, (channels,)).mT.reshape(x.shape),
        f"softmax {dim}": lambda x: x.softmax(dim),
        "softmax of voxels": lambda x: x.flatten(2).softmax(-1).view(x.shape) * 9,
        f"off the mean {dims}": lambda x: x - x.mean(dims, keepdim=True),
        f"by the largest {dims}": lambda x: x * x.amax(dims, keepdim=True),
        "where": lambda x: torch.where(x > 0.2, x, x.mean()),
        "by a mask": lambda x: x + x[x > 0].sum(),
        "channels mixed": lambda x: (x.movedim(1, -1) @ _weight(channels, channels)).movedim(-1, 1),
        "gelu": F.gelu,
    }


def _three(r: random.Random, least: int, most: int) -> tuple[int, int, int]:
    return r.randint(least, most), r.randint(least, most), r.randint(least, most)


def drawn(seed: int) -> tuple[Tensor, str, Op]:
    """The volume, the program's words, and the program."""
    r = random.Random(seed)
    # Two samples: of one whose gradient lies channels last, torch's own batch norm on the CPU gives a wrong gradient.
    shape = 2, r.randint(1, 3), r.randint(1, 9), r.randint(1, 10), r.randint(2, 11)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ops: list[tuple[str, Op]] = []
    y = x
    for _ in range(r.randint(2, 5)):
        choices = r.choice([_windows, _windows, _sizes, _orders, _values])(r, y)
        name = r.choice(sorted(choices))
        try:
            z = choices[name](y)
        except RuntimeError:  # torch refuses it
            continue
        if 0 < z.numel() <= MOST and z.isfinite().all() and z.abs().max() < 1e6:
            ops.append((name, choices[name]))
            y = z

    def run(x: Tensor) -> Tensor:
        for _, op in ops:
            x = op(x)
        return x

    return x, f"{shape}: {', '.join(name for name, _ in ops)}", run


def _outcomes(seeds: list[int], meshes: list[tuple[int, int, int]]) -> list[Outcome]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            x, words, run = drawn(seed)
            here: Any = one_process(run, [x], [])
            for on in meshes:
                try:
                    apart = differences_from(here, run, [x], [], *on[:2], floor=FLOOR, depth=on[2])
                    wrong = {name: error for name, error in apart.items() if not error <= TOLERANCE}
                    found.append(Outcome(seed, on, words, f"wrong: {wrong}" if wrong else "exact"))
                except UnsupportedOp as error:
                    found.append(Outcome(seed, on, words, f"refused: {error}"))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_programs_on_volumes_are_exact(ranks: int, seed: int, programs: int) -> None:
    meshes = [on for on in VOLUME_MESHES if on[0] * on[1] * on[2] == ranks]
    seeds = [1000 * seed + number for number in range(max(programs // 10 // 3, 1))]
    for found in rank_group(ranks).run(_outcomes, seeds, meshes, timeout_seconds=600):
        assert len(found) == len(seeds) * len(meshes)
        assert not [outcome for outcome in found if outcome.verdict != "exact"]
