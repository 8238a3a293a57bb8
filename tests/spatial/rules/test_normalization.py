"""Batch, instance, group, layer and rms norm: statistics of the whole image, dtypes, memory formats."""

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.exactness import differences_from, one_process
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process, one
from tests.spatial.corners import BF16, F16, F32, Corners, autocast, corners_as_in_torch, last, noise, spoiled

CASES: dict[str, Case] = {
    "batch_norm": Case(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), whole=((4,), (4,))),
    "batch_norm without affine": one(lambda x: F.batch_norm(x, None, None, None, None, True)),
    "batch_norm eval": Case(
        lambda x, w: F.batch_norm(x, torch.ones(4).double(), torch.ones(4).double(), w), whole=((4,),)
    ),
    "weights with gaps": Case(
        lambda x, w: [F.batch_norm(x, None, None, w[:, 0], w[:, 1], True), F.group_norm(x, 2, w[:, 2], w[:, 0])],
        whole=((4, 3),),
    ),
    "instance_norm": Case(lambda x, w, b: F.instance_norm(x, None, None, w, b), whole=((4,), (4,))),
    "instance_norm eval, its gradient columns first": Case(  # of one row on each rank
        lambda x, w: (
            F.instance_norm(x[:, :, :2], *torch.ones(2, 4, dtype=x.dtype), w[0], None, False)
            .permute(3, 0, 2, 1) @ w.mT
        ).cos(),
        whole=((2, 4),),
    ),
    "group_norm": Case(lambda x, w, b: F.group_norm(x, 2, w, b), whole=((4,), (4,))),
    "rows and columns are samples": Case(
        lambda x, w, b: [F.group_norm(x.transpose(1, 2).flatten(0, 1), 2, w, b),
                         F.instance_norm(x.permute(0, 3, 1, 2).flatten(0, 1), None, None, w, b)],
        whole=((4,), (4,)),
    ),
    "pixels are samples": Case(
        lambda x, w, b: F.group_norm(x.permute(2, 3, 0, 1).flatten(0, 2), 2, w, b), whole=((4,), (4,))
    ),
    "layer_norm channels last": Case(
        lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w, b), whole=((4,), (4,))
    ),
    "layer_norm over the image": one(lambda x: F.layer_norm(x, x.shape[1:])),
    "layer_norm along a row": one(lambda x: F.layer_norm(x, x.shape[3:])),
    "rms_norm over the image": one(lambda x: F.rms_norm(x, x.shape[2:])),
    "split channels": one(lambda x: [
        F.batch_norm(x.transpose(1, 2), None, None, training=True), F.group_norm(x.transpose(1, 3), 1),
        F.instance_norm(x.transpose(1, 2)), F.batch_norm(x.flatten(2).mT, None, None, training=True)]),
}  # fmt: skip
CORNERS = Corners()


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
            CORNERS.add(f"batch {momentum} {value}", op, [x], buffers)
            op = with_buffers(partial(F.instance_norm, momentum=momentum))
            CORNERS.add(f"instance {momentum} {value}", op, [x], buffers)
        CORNERS.add(f"group {value}", groups, [x], buffers[:2])
        CORNERS.add(f"layer {value}", partial(F.layer_norm, normalized_shape=(13, 11)), [x])
        CORNERS.add(f"rms {value}", partial(F.rms_norm, normalized_shape=(13, 11)), [x])
    weights = [noise(13, 11), noise(13, 11)]
    for name, op in NORMS.items():
        for samples in (1, 2):
            CORNERS.add(f"{name} channels last {samples}", op, [last(noise(samples, 4, 13, 11))], weights)
        if name != "instance":
            CORNERS.add(f"{name} empty", op, [noise(0, 4, 13, 11)], weights)
    frames = last(noise(2, 3, 4, 13, 11))
    CORNERS.add(
        "batch of frames",
        partial(F.batch_norm, running_mean=None, running_var=None, training=True),
        [frames],
    )
    CORNERS.add("group of frames", partial(F.group_norm, num_groups=3), [frames])
    CORNERS.add("rms of little", partial(F.rms_norm, normalized_shape=(13, 11)), [noise(2, 4, 13, 11) * 1e-8])


def normalizing_dtypes() -> None:
    for dtype, kind, (name, op) in product((F32, BF16, F16), (BF16, F16, F32), NORMS.items()):
        if kind not in (dtype, F32):
            continue
        if name == "instance" and kind is BF16:
            continue  # a rank's share of a gradient that cancels is rounded, as of any parameter in 16 bit
        x = noise(2, 4, 13, 11, dtype=dtype, scale=20) + (400 if dtype == F16 else 0)
        weights = [noise(13, 11, dtype=kind), noise(13, 11, dtype=kind)]
        if not (name.startswith("layer") and kind != dtype and dtype == F16):  # which torch refuses
            CORNERS.add(f"dtypes, {name} {dtype} {kind}", op, [x], weights)
        if dtype is not F16:
            CORNERS.add(f"dtypes, {name} autocast {dtype} {kind}", autocast(op), [x], weights)
    little = noise(2, 4, 13, 11, dtype=BF16, scale=1e-3)
    CORNERS.add("dtypes, rms of little", partial(F.rms_norm, normalized_shape=(13, 11)), [little])


def normalizing_split() -> None:
    """Weights that are split, with an input that is or is not."""
    x, w = noise(2, 4, 13, 11), noise(13, 11)
    for name, op in NORMS.items():
        if name not in ("layer", "rms", "layer 3", "rms 3"):  # of which the weights are no split rows
            CORNERS.add(f"split, {name}", lambda x, w, op=op: op(x, w, w), [x, w])
            CORNERS.add(f"split, {name} whole", lambda w, x, op=op: op(x, w, w), [w], [x])
    CORNERS.add("split, rms 2", lambda x, w: F.rms_norm(x, (13, 11), w), [x, w])
    CORNERS.add("split, rms 2 whole", lambda w, x: F.rms_norm(x, (13, 11), w), [w], [x])


normalizing()
normalizing_dtypes()
normalizing_split()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)


def _of_one_sample(height: int, width: int) -> list[float]:
    """Norms of one sample whose gradient lies channels last, against their formulas: torch's CPU kernel is wrong."""
    x, w, mix = noise(1, 3, 6, 9), noise(3), noise(3, 2)
    mean, var = noise(3, 1, 1), noise(3, 1, 1).square() + 0.5
    given = mean.flatten(), var.flatten()

    def standard(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return (x - mean) * (var + 1e-5).rsqrt()

    def of_image(x: Tensor) -> Tensor:
        return standard(x, x.mean((2, 3), True), x.var((2, 3), correction=0, keepdim=True))

    norms: list[tuple[Op, Op]] = [
        (lambda x, w: F.batch_norm(x, *given, w), lambda x, w: standard(x, mean, var) * w[:, None, None]),
        (
            lambda x, w: F.instance_norm(x, *given, w, None, False),
            lambda x, w: standard(x, mean, var) * w[:, None, None],
        ),
        (lambda x, w: F.batch_norm(x, None, None, w, None, True), lambda x, w: of_image(x) * w[:, None, None]),
        (lambda x, w: F.instance_norm(x, None, None, w), lambda x, w: of_image(x) * w[:, None, None]),
    ]
    found = []
    for norm, formula in norms:
        for tokens in (lambda y: (y.flatten(2).mT @ mix).sin(), lambda y: (y.permute(0, 2, 3, 1) @ mix).sin()):
            here = one_process(lambda x, w, f=formula, g=tokens: g(f(x, w)), [x], [w])
            split = lambda x, w, f=norm, g=tokens: g(f(x, w))  # noqa: E731
            found += differences_from(here, split, [x], [w], height, width).values()
    return found


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)], ids=str)
def test_gradients_of_one_sample_laid_channels_last(mesh: tuple[int, int]) -> None:
    for found in rank_group(2).run(_of_one_sample, *mesh):
        assert len(found) == 24 and max(found) < 1e-11, found


def _after_a_call(first: str) -> dict[str, float]:
    """A batch norm called first on a whole map, or in evaluation, then on a split one in training; one graph."""

    def op(x: Tensor, template: Tensor) -> tuple[Tensor, ...]:
        norm = torch.nn.BatchNorm2d(3, dtype=torch.float64).train(first == "whole")
        before = norm(template if first == "whole" else x * 2)
        return before, norm.train()(x), *norm.buffers()

    given = [noise(2, 3, 7, 9)], [noise(2, 3, 5, 4)]
    return differences_from(one_process(op, *given), op, *given, 1, 2)


@pytest.mark.parametrize("first", ["whole", "evaluation"])
def test_running_statistics_that_a_call_before_keeps(first: str) -> None:
    for found in rank_group(2).run(_after_a_call, first):
        assert found and max(found.values()) < 1e-11, found


def _recomputed(kind: type[torch.nn.Module]) -> dict[str, float]:
    """A norm that ends a block which is recomputed: torch stops at what is last kept, before it updates some."""

    def op(x: Tensor) -> tuple[Tensor, ...]:
        norm = kind(3, track_running_stats=True, affine=True, dtype=torch.float64)
        made = checkpoint(norm, x * 2, use_reentrant=False)
        torch.autograd.grad(made.sin().sum(), x, retain_graph=True)
        return made, *(buffer.clone() for buffer in norm.buffers())

    given = [noise(2, 3, 7, 9)], []
    return differences_from(one_process(op, *given), op, *given, 1, 2)


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm2d, torch.nn.InstanceNorm2d])
def test_running_statistics_of_what_is_recomputed(kind: type[torch.nn.Module]) -> None:
    for found in rank_group(2).run(_recomputed, kind):
        assert found and max(found.values()) < 1e-11, found
