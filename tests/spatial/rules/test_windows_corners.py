"""Corners of what slides, resizes and normalizes: infinities, dtypes, memory formats, maps too small for the ranks."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rank_group import rank_group
from tests.spatial.corners import Case, faults

MESHES = [(1, 2), (2, 1), (2, 2), (1, 3)]
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ODD = (1, 2, 13, 11)
CASES: dict[str, dict[str, Case]] = {}  # by family

Op = Callable[..., Any]
resize = partial(partial, F.interpolate)


def add(family: str, name: str, op: Op, split: Sequence[Tensor], whole: Sequence[Tensor] = ()) -> None:
    cases = CASES.setdefault(family, {})
    assert name not in cases, name
    cases[name] = Case(op, split, whole)


def noise(*shape: int, dtype: torch.dtype = F64, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(shape, generator=generator, dtype=F64) * scale).to(dtype)


def spoiled(*shape: int, value: float) -> Tensor:
    """Noise with `value` in one pixel of the first channel and one of the last."""
    x = noise(*shape)
    flat = x.view(-1, *shape[-2:])
    flat[0, shape[-2] // 3, shape[-1] // 2] = value
    flat[-1, shape[-2] - 1, 1] = value
    return x


def eight_bit(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def last(x: Tensor) -> Tensor:
    """`x` in channels-last memory."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def autocast(op: Op) -> Op:
    def inside(*tensors: Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return op(*tensors)

    return inside


def merged(op: Op) -> Op:
    """`op` on (N, C, H, K * W), of a split (N, K, C, H, W)."""
    return lambda x, *rest: op(x.permute(0, 2, 3, 1, 4).flatten(3), *rest)


def deep(op: Op) -> Op:
    """`op` on (N, 1, C, H, W), of (N, C, H, W)."""
    return lambda x, *rest: op(x[:, None], *rest)


def flat(op: Op) -> Op:
    """`op` on the first row of each image."""
    return lambda x, *rest: op(x[:, :, 0], *rest)


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
            add("resizing infinities", f"{mode} {name} {value}", op, [spoiled(*ODD, value=value)])
    for value in (math.inf, math.nan):
        for name, options in {
            "size": {"size": (7, 13, 12)},
            "corners": {"size": (7, 13, 12), "align_corners": True},
            "x2": {"scale_factor": 2},
            "depth": {"scale_factor": (2, 1, 1)},
        }.items():
            volume = spoiled(1, 2, 5, 9, 11, value=value)
            add("resizing infinities", f"trilinear {name} {value}", resize(mode="trilinear", **options), [volume])
        x = spoiled(*ODD, value=value)
        add("resizing infinities", f"area {value}", resize(size=(5, 7), mode="area"), [x])
        add("resizing infinities", f"linear {value}", flat(resize(size=17, mode="linear")), [x])
        recomputed = resize(scale_factor=1.7, mode="bilinear", recompute_scale_factor=True)
        add("resizing infinities", f"recomputed {value}", recomputed, [x])
        for sizes in ((5, 7), (1, 7), (2, 1), (1, 1), (13, 4), (9, 9)):
            for pool in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
                op = partial(pool, output_size=sizes)
                add("resizing infinities", f"{pool.__name__} {sizes} {value}", op, [x])


def resizing() -> None:
    for mode in ("bilinear", "bicubic"):
        for name, options in {"size": {"size": (9, 17)}, "x2": {"scale_factor": 2}}.items():
            op = resize(mode=mode, **options)
            add("resizing", f"{mode} {name} 8 bit", op, [eight_bit(1, 3, 13, 11)])
            add("resizing", f"{mode} {name} 8 bit channels last", op, [last(eight_bit(1, 3, 13, 11))])
            for channels in (3, 5):
                add("resizing", f"{mode} {name} channels last {channels}", op, [last(noise(2, channels, 13, 11))])
            for dtype in (BF16, F16):
                add("resizing", f"{mode} {name} {dtype}", op, [noise(*ODD, dtype=dtype, scale=50)])
            for dtype in (BF16, F32):
                add("resizing", f"{mode} {name} autocast {dtype}", autocast(op), [noise(*ODD, dtype=dtype)])
            add("resizing", f"{mode} {name} merged", merged(op), [noise(1, 3, 2, 6, 8)])
            add("resizing", f"{mode} {name} empty", op, [noise(0, 2, 13, 11)])
        smaller = resize(size=(5, 7), mode=mode, antialias=True)
        add("resizing", f"{mode} antialias 8 bit", smaller, [eight_bit(1, 3, 13, 11)])
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        for size, factor in (((13, 3), 0.5), ((25, 7), 0.5), ((7, 25), 0.3), ((13, 4), 0.7)):
            add("resizing", f"{mode} {size} by {factor}", resize(scale_factor=factor, mode=mode), [noise(1, 2, *size)])
        add("resizing", f"{mode} x41", resize(scale_factor=41, mode=mode), [noise(1, 1, 5, 6, dtype=F32)])
    for mode, pixels in product(("nearest", "nearest-exact"), (2, 5)):
        add(
            "resizing",
            f"{mode} x{pixels} merged",
            merged(resize(scale_factor=pixels, mode=mode)),
            [noise(1, 3, 2, 6, 8)],
        )
    add("resizing", "nearest channels last", resize(size=(17, 20)), [last(noise(2, 5, 13, 11))])
    add("resizing", "nearest 8 bit", resize(size=(17, 20)), [eight_bit(1, 3, 13, 11)])
    for mode in ("nearest", "trilinear"):
        add("resizing", f"{mode} 3d", resize(size=(9, 17, 20), mode=mode), [last(noise(2, 5, 4, 13, 11))])
    for columns in (3, 1):
        op = resize(size=(4, columns), mode="bilinear", antialias=True)
        add("resizing", f"antialias, columns left to a rank: {columns}", op, [noise(1, 2, 8, 3)])


def pooling() -> None:
    numbers = (noise(*ODD) * 50 - 100).to(torch.int32)
    window = {"kernel_size": 3, "stride": 2, "padding": 1}
    plane = {"kernel_size": (1, 3, 3), "stride": 2, "padding": (0, 1, 1)}
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.int8):
        add("pooling", f"max of {dtype}", partial(F.max_pool2d, **window), [numbers.to(dtype)])
        add("pooling", f"max 3d of {dtype}", deep(partial(F.max_pool3d, **plane)), [numbers.to(dtype)])
    for value in (math.inf, -math.inf, math.nan):
        for name, op in {
            "max": partial(F.max_pool2d, **window),
            "max 1d": flat(partial(F.max_pool1d, **window)),
            "max 3d": deep(partial(F.max_pool3d, **plane)),
            "average": partial(F.avg_pool2d, **window),
            "average 1d": flat(partial(F.avg_pool1d, **window, count_include_pad=False)),
            "uncounted": partial(F.avg_pool2d, **window, count_include_pad=False, ceil_mode=True),
            "over 3": partial(F.avg_pool2d, **window, divisor_override=3),
            "lp": partial(F.lp_pool2d, norm_type=2, kernel_size=3, stride=2),
        }.items():
            add("pooling", f"{name} {value}", op, [spoiled(*ODD, value=value)])
    low = torch.full(ODD, -math.inf, dtype=F64)
    low[..., 9:, 9:] = 1
    for dilation in (1, 2):
        add("pooling", f"max of -inf {dilation}", partial(F.max_pool2d, **window, dilation=dilation), [low])
        op = deep(partial(F.max_pool3d, kernel_size=3, stride=2, padding=1, dilation=dilation))
        add("pooling", f"max 3d of -inf {dilation}", op, [noise(1, 4, 13, 11).clamp(max=0) * math.inf])
    add("pooling", "ties", partial(F.max_pool2d, kernel_size=3, stride=1, padding=1), [noise(*ODD).round()])
    add("pooling", "ties apart", partial(F.max_pool2d, kernel_size=2), [noise(*ODD).round()])
    for name, options in {"uncounted": {"count_include_pad": False}, "over 4": {"divisor_override": 4}}.items():
        add("pooling", f"integers {name}", partial(F.avg_pool2d, **window, **options), [numbers.long()])
    for dtype in (BF16, F16):
        x = noise(*ODD, dtype=dtype, scale=300)
        uncounted = partial(F.avg_pool2d, kernel_size=5, stride=2, padding=2, ceil_mode=True, count_include_pad=False)
        add("pooling", f"average {dtype}", uncounted, [x])
        add("pooling", f"adaptive {dtype}", partial(F.adaptive_avg_pool2d, output_size=(5, 6)), [x])
        add("pooling", f"lp {dtype}", partial(F.lp_pool2d, norm_type=2, kernel_size=2), [x.abs() / 30])
    x = noise(*ODD, dtype=BF16)
    add("pooling", "average autocast", autocast(partial(F.avg_pool2d, **window)), [x])
    add("pooling", "average 3d autocast", autocast(deep(partial(F.avg_pool3d, **plane))), [x])
    adaptive = deep(partial(F.adaptive_avg_pool3d, output_size=(1, 5, 4)))
    add("pooling", "adaptive 3d autocast", autocast(adaptive), [x])


def pooling_shapes() -> None:
    for name, op in {
        "max": partial(F.max_pool2d, kernel_size=3, stride=1, padding=1),
        "max apart": partial(F.max_pool2d, kernel_size=2),
        "max strided": partial(F.max_pool2d, kernel_size=3, stride=2, padding=1),
        "average": partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1),
        "uncounted": partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False),
        "adaptive": partial(F.adaptive_avg_pool2d, output_size=(19, 17)),
        "adaptive max": partial(F.adaptive_max_pool2d, output_size=(19, 17)),
        "lp": partial(F.lp_pool2d, norm_type=2, kernel_size=2),
    }.items():
        add("pooling shapes", f"{name} channels last", op, [last(noise(2, 3, 23, 22).abs())])
        add("pooling shapes", f"{name} empty", op, [noise(0, 3, 23, 22)])
        add("pooling shapes", f"{name} merged", merged(op), [noise(1, 3, 2, 6, 8).abs()])
        add("pooling shapes", f"{name} few", op, [noise(1, 2, 3, 4).abs()])
    for name, op in {
        "max": partial(F.max_pool3d, kernel_size=3, stride=1, padding=1),
        "average": partial(F.avg_pool3d, kernel_size=3, stride=1, padding=1),
        "adaptive": partial(F.adaptive_avg_pool3d, output_size=(5, 19, 17)),
        "adaptive max": partial(F.adaptive_max_pool3d, output_size=(5, 19, 17)),
    }.items():
        add("pooling shapes", f"{name} 3d channels last", op, [last(noise(2, 3, 9, 23, 22))])


def padded(mode: str) -> Op:
    return lambda x, w: F.pad(x, (1, 1) * (x.dim() - 2), mode) * w.flatten()[0]


def convolving() -> None:
    k, t = noise(4, 3, 3, 3), noise(3, 4, 3, 3)
    for name, (op, weight) in {
        "convolution": (partial(F.conv2d, padding=1), k),
        "strided": (partial(F.conv2d, padding=1, stride=2), k),
        "wide": (partial(F.conv2d, padding=6, dilation=6), k),
        "patches": (partial(F.conv2d, stride=2), k[..., :2, :2]),
        "single": (F.conv2d, k[..., :1, :1]),
        "transposed": (partial(F.conv_transpose2d, padding=1, stride=2, output_padding=1), t),
        "transposed apart": (partial(F.conv_transpose2d, stride=2), t[..., :2, :2]),
        "circular": (padded("circular"), k),
        "reflected": (padded("reflect"), k),
        "padded": (padded("constant"), k),
    }.items():
        for dtype in (F32, F64):
            x, w = last(noise(2, 3, 23, 22, dtype=dtype)), weight.to(dtype)
            add("convolving", f"{name} channels last {dtype}", op, [x], [w])
        add("convolving", f"{name} empty", op, [noise(0, 3, 23, 22)], [weight])
        add("convolving", f"{name} few", op, [noise(1, 3, 3, 4)], [weight])
        if name not in ("circular", "reflected", "padded"):
            add("convolving", f"{name} merged", merged(op), [noise(1, 2, 3, 6, 8)], [weight])
    volume = last(noise(2, 3, 9, 23, 22, dtype=F32))
    w, t3 = noise(4, 3, 3, 3, 3, dtype=F32), noise(3, 4, 2, 2, 2, dtype=F32)
    add("convolving", "3d channels last", partial(F.conv3d, padding=1), [volume], [w])
    add("convolving", "wide 3d channels last", partial(F.conv3d, padding=6, dilation=6), [volume], [w])
    add("convolving", "transposed 3d channels last", partial(F.conv_transpose3d, stride=2), [volume], [t3])
    add("convolving", "circular 3d channels last", padded("circular"), [volume], [w])
    for padding, extra, stride, dilation in ((0, 1, 2, 1), (1, 1, 2, 1), (2, 0, 1, 2), (1, 2, 3, 1), (0, 4, 5, 1)):
        options = {"padding": padding, "output_padding": extra, "stride": stride, "dilation": dilation}
        for value in (math.inf, math.nan):
            add("convolving", f"{options} times {value}", times(partial(F.conv_transpose2d, **options), value),
                [noise(1, 3, 7, 8)], [t])  # fmt: skip
            for column in range(8):
                x = noise(1, 3, 7, 8)
                x[0, 1, 3, column] = value
                add("convolving", f"{options} of {value} at {column}", partial(F.conv_transpose2d, **options), [x], [t])


def times(op: Op, value: float) -> Op:
    """`op` whose gradient is nothing but `value`."""
    return lambda *tensors: op(*tensors) * value


def with_buffers(op: Op) -> Op:
    """Statistics of `op` are an output too: they are what training leaves behind."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
        kept = [t.detach().clone() for t in buffers]
        return op(x, *kept, weight, bias), *kept

    return run


def first(op: Op) -> Op:
    """`op` with the first four of its weights as one a channel."""
    return lambda x, w, b: op(x, w[0, :4], b[0, :4])


def groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 2, weight, bias)


def batch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, True)


def instance(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, None, None, weight, bias)


NORMS: dict[str, Op] = {
    "layer": lambda x, w, b: F.layer_norm(x, (11,), w[0], b[0]),
    "layer 2": lambda x, w, b: F.layer_norm(x, (13, 11), w, b),
    "layer 3": lambda x, w, b: F.layer_norm(x, (4, 13, 11)) * w * b,
    "rms": lambda x, w, b: F.rms_norm(x, (11,), w[0]),
    "rms 3": lambda x, w, b: F.rms_norm(x, (4, 13, 11)) * w,
    "group": first(groups),
    "batch": first(batch),
    "instance": first(instance),
}


def normalizing() -> None:
    buffers = [noise(4), noise(4) + 1, noise(4), noise(4).abs()]
    for value in (math.inf, -math.inf, math.nan, 0.0):
        x = spoiled(2, 4, 13, 11, value=value)
        for momentum in (0.1, 1.0, 0.0):
            op = with_buffers(partial(F.batch_norm, training=True, momentum=momentum))
            add("normalizing", f"batch {momentum} {value}", op, [x], buffers)
            op = with_buffers(partial(F.instance_norm, momentum=momentum))
            add("normalizing", f"instance {momentum} {value}", op, [x], buffers)
        add("normalizing", f"group {value}", groups, [x], buffers[:2])
        add("normalizing", f"layer {value}", partial(F.layer_norm, normalized_shape=(13, 11)), [x])
        add("normalizing", f"rms {value}", partial(F.rms_norm, normalized_shape=(13, 11)), [x])
    weights = [noise(13, 11), noise(13, 11)]
    for name, op in NORMS.items():
        for samples in (1, 2):
            add("normalizing", f"{name} channels last {samples}", op, [last(noise(samples, 4, 13, 11))], weights)
        if name != "instance":
            add("normalizing", f"{name} empty", op, [noise(0, 4, 13, 11)], weights)
    frames = last(noise(2, 3, 4, 13, 11))
    add(
        "normalizing",
        "batch of frames",
        partial(F.batch_norm, running_mean=None, running_var=None, training=True),
        [frames],
    )
    add("normalizing", "group of frames", partial(F.group_norm, num_groups=3), [frames])
    add("normalizing", "rms of little", partial(F.rms_norm, normalized_shape=(13, 11)), [noise(2, 4, 13, 11) * 1e-8])


def normalizing_dtypes() -> None:
    for dtype, kind, (name, op) in product((F32, BF16, F16), (BF16, F16, F32), NORMS.items()):
        if kind not in (dtype, F32):
            continue
        if name == "instance" and kind is BF16:
            continue  # a rank's share of a gradient that cancels is rounded, as of any parameter in 16 bit
        x = noise(2, 4, 13, 11, dtype=dtype, scale=20) + (400 if dtype == F16 else 0)
        weights = [noise(13, 11, dtype=kind), noise(13, 11, dtype=kind)]
        if not (name.startswith("layer") and kind != dtype and dtype == F16):  # which torch refuses
            add("normalizing dtypes", f"{name} {dtype} {kind}", op, [x], weights)
        if dtype is not F16:
            add("normalizing dtypes", f"{name} autocast {dtype} {kind}", autocast(op), [x], weights)
    little = noise(2, 4, 13, 11, dtype=BF16, scale=1e-3)
    add("normalizing dtypes", "rms of little", partial(F.rms_norm, normalized_shape=(13, 11)), [little])


def normalizing_split() -> None:
    """Weights that are split, with an input that is or is not."""
    x, w = noise(2, 4, 13, 11), noise(13, 11)
    for name, op in NORMS.items():
        if name not in ("layer", "rms", "layer 3", "rms 3"):  # of which the weights are no split rows
            add("normalizing split", f"{name}", lambda x, w, op=op: op(x, w, w), [x, w])
            add("normalizing split", f"{name} whole", lambda w, x, op=op: op(x, w, w), [w], [x])
    add("normalizing split", "rms 2", lambda x, w: F.rms_norm(x, (13, 11), w), [x, w])
    add("normalizing split", "rms 2 whole", lambda w, x: F.rms_norm(x, (13, 11), w), [w], [x])


def sample(image: Tensor, grid: Tensor, **options: Any) -> Tensor:
    """A grid (N, 2, H, W) or (N, 3, D, H, W), so that it is split over the image."""
    return F.grid_sample(image, grid.movedim(1, -1), **options)


def sampling() -> None:
    """Where torch's own CPU kernels do not read wild memory: bilinear and nearest do at NaN and by reflection."""
    image, grid = noise(2, 3, 13, 11), noise(2, 2, 13, 11)
    for mode, value, padding in (
        *product(("bilinear", "nearest"), (math.inf,), ("zeros", "border")),
        *product(("bicubic",), (math.inf, math.nan), ("zeros", "border", "reflection")),
    ):
        places = grid.clone()
        places[0, 0, 3, 4] = places[1, 1, 12, 1] = value
        op = partial(sample, mode=mode, padding_mode=padding, align_corners=False)
        add("sampling", f"{mode} {padding} {value}", op, [image, places])
        add("sampling", f"{mode} {padding} {value} whole grid", op, [image], [places])
        add("sampling", f"{mode} {padding} {value} whole image", swapped(op), [places], [image])
    op = partial(sample, align_corners=True)
    add("sampling", "channels last", op, [last(image), grid])
    add("sampling", "autocast", autocast(op), [image.bfloat16(), grid.float()])
    add("sampling", "a volume", op, [noise(1, 2, 4, 13, 11), noise(1, 3, 3, 12, 9)])


def swapped(op: Op) -> Op:
    return lambda a, b: op(b, a)


for fill in (resizing_infinities, resizing, pooling, pooling_shapes, convolving, normalizing, normalizing_dtypes,
             normalizing_split, sampling):  # fmt: skip
    fill()


def _faults(family: str, height: int, width: int) -> dict[str, list[str]]:
    found = {name: faults(case, height, width) for name, case in CASES[family].items()}
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", CASES)
def test_corners(family: str, mesh: tuple[int, int]) -> None:
    for found in rank_group(mesh[0] * mesh[1]).run(_faults, family, *mesh):
        assert not found, found
