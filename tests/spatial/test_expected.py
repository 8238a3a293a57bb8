"""What torch would do with the whole tensors, without their numbers."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.errors import ShapeError
from fullframe.spatial.expected import Expected, expected_of, facts_of, forget_expected
from fullframe.spatial.tensor import wrap
from tests.spatial.fake import on_width, spatial, spec


def asked(func: Any, *args: Any, **kwargs: Any) -> Expected:
    key = facts_of(func, args, kwargs, [])
    assert key is not None
    found = expected_of(key, func, args, kwargs)
    assert found is not None and found is expected_of(key, func, args, kwargs)
    return found


def test_shapes_dtypes_strides_and_aliases_of_the_whole_result() -> None:
    with spatial(1, 2) as on:
        x = wrap(torch.zeros(2, 3, 4), spec(on, (2, 3, 8), on_width((0, 4, 8), 2)))
        (sum_,) = asked(torch.sum, x, 2).leaves
        assert (sum_.shape, sum_.dtype, sum_.alias) == ((2, 3), torch.float32, None)
        (turned,) = asked(Tensor.transpose, x, 1, 2).leaves
        assert (turned.shape, turned.strides, turned.alias) == ((2, 8, 3), (24, 1, 8), 0)
        (added,) = asked(torch.add, torch.zeros(3, 8), x, alpha=2).leaves
        assert added.shape == (2, 3, 8) and added.alias is None
        values, places = asked(torch.max, x, 2).leaves
        assert (values.dtype, places.dtype) == (torch.float32, torch.int64)


def test_what_torch_refuses_is_torch_s_own_exception() -> None:
    with spatial(1, 2) as on:
        x = wrap(torch.zeros(2, 3, 4), spec(on, (2, 3, 8), on_width((0, 4, 8), 2)))
        refused = asked(torch.add, x, torch.zeros(4))  # which fits the local part, not the whole
        assert isinstance(refused.error, RuntimeError) and "broadcast" in str(refused.error)
        assert isinstance(asked(torch.sum, x, 3).error, IndexError)


@pytest.mark.parametrize("autocast", [False, True])
def test_channels_that_come_last_are_named(autocast: bool) -> None:
    with spatial(1, 2) as on, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        x = wrap(torch.zeros(2, 10, 6, 3), spec(on, (2, 10, 12, 3), on_width((0, 6, 12), 2)))
        refused = asked(torch.conv2d, x, torch.zeros(16, 3, 3, 3)).error
        assert isinstance(refused, RuntimeError) and "channel" in str(refused).partition(";")[0], "torch's own first"
        assert "(2, 10, 12, 3) seems to have its channels last" in str(refused) and ".movedim(-1, 0)" in str(refused)
        other = asked(torch.conv2d, x, torch.zeros(16, 5, 3, 3)).error
        assert isinstance(other, RuntimeError) and "seems" not in str(other)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.zeros(2, 10, 12), "labels of torch.float32 are no classes: give labels.long()"),
        (torch.zeros(2, 10, 12, dtype=torch.uint8), "labels of torch.uint8 are no classes"),
        (torch.zeros(2, 1, 10, 12, dtype=torch.int64), r"\(2, 1, 10, 12\) have a dim of channels: give labels.squeeze"),
    ],
)
def test_labels_that_are_no_classes_are_named(labels: Tensor, said: str) -> None:
    with spatial(1, 2) as on:
        x = wrap(torch.zeros(2, 3, 10, 6), spec(on, (2, 3, 10, 12), on_width((0, 6, 12), 3)))
        with pytest.raises(RuntimeError, match=said):
            raise asked(F.cross_entropy, x, labels).error or AssertionError("it was taken")


def test_labels_of_another_size_are_named() -> None:
    with spatial(1, 2) as on:
        x = wrap(torch.zeros(2, 3, 10, 6), spec(on, (2, 3, 10, 12), on_width((0, 6, 12), 3)))
        with pytest.raises(ShapeError, match=r"labels of shape \(2, 5, 6\) do not .* which take \(2, 10, 12\): resize"):
            F.cross_entropy(x, torch.zeros(2, 5, 6, dtype=torch.int64))


def test_the_dtype_by_default_may_change() -> None:
    numbers = torch.zeros(2, 3, dtype=torch.int64)
    assert asked(torch.div, numbers, 2).leaves[0].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert asked(torch.div, numbers, 2).leaves[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_calls_differ_by_shape_dtype_option_and_type() -> None:
    x = torch.zeros(2, 3)
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((x,), {}), ((x.double(),), {}), ((x.t(),), {}), ((x, 1), {}), ((x, 1.0), {}), ((x, True), {}),
        ((x, [1]), {}), ((x, (1,)), {}), ((x,), {"dim": 1}), ((x, slice(1, 2)), {}), ((x, slice(1)), {}),
    ]  # fmt: skip
    keys = [facts_of(torch.sum, args, kwargs, []) for args, kwargs in calls]
    assert len(set(keys)) == len(calls)
    operands: list[Tensor] = []
    assert facts_of(torch.sum, (x, object()), {}, operands) is None and not operands


def test_a_slice_is_told_by_its_bounds_whatever_holds_them() -> None:
    x = torch.zeros(9, 3)
    rows = [asked(Tensor.__getitem__, x, slice(None, torch.tensor(stop))).leaves[0].shape[0] for stop in (4, 7)]
    assert rows == [4, 7]
    assert asked(Tensor.__getitem__, x, slice(np.int64(2), 9, torch.tensor(2))).leaves[0].shape == (4, 3)


def test_operands_are_listed_in_order() -> None:
    x, y, operands = torch.zeros(1), torch.ones(1), list[Tensor]()
    facts_of(torch.cat, ([x, y],), {"out": x}, operands)
    assert [t is other for t, other in zip(operands, (x, y, x), strict=True)] == [True] * 3


def test_a_function_that_reads_values_cannot_be_told() -> None:
    x = torch.zeros(3)
    key = facts_of(torch.nonzero, (x,), {}, [])
    assert expected_of(key, torch.nonzero, (x,), {}) is None


def test_autocast_is_asked_again() -> None:
    x = torch.zeros(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert asked(torch.mm, x, x).leaves[0].dtype is torch.bfloat16
    assert asked(torch.mm, x, x).leaves[0].dtype is torch.float32
    forget_expected()
    assert asked(torch.mm, x, x).leaves[0].dtype is torch.float32


@pytest.mark.parametrize("func", [torch.mm, torch.add])
def test_nothing_real_is_computed(func: Any) -> None:
    large = torch.zeros(1).expand(10**6, 10**6)  # no result of this shape would fit
    assert asked(func, large, large).leaves[0].shape == (10**6, 10**6)


SIZED = {
    "line": (torch.randn(2, 3, 9), {"size": 5, "mode": "linear"}),
    **{
        f"{mode} {name}": (image, {"size": (5, 11), "mode": mode})
        for mode in ("nearest", "bilinear", "bicubic", "area")
        for name, image in {
            "rows": torch.randn(2, 3, 7, 9), "turned": torch.randn(2, 3, 9, 7).mT,
            "channels last": torch.randn(2, 3, 7, 9).contiguous(memory_format=torch.channels_last),
            "bytes": torch.randint(0, 256, (1, 3, 7, 9), dtype=torch.uint8),
        }.items()
        if (mode, name) != ("area", "bytes")
    },
    "no samples": (torch.randn(0, 3, 7, 9), {"size": (5, 11)}),
    "by scale, rounded": (torch.randn(1, 2, 7, 9), {"scale_factor": 1.3, "mode": "bilinear", "antialias": True}),
    "by scale": (torch.randn(1, 2, 7, 9), {"scale_factor": (2, 0.5), "mode": "bicubic", "align_corners": True}),
    "volume": (
        torch.randn(2, 3, 4, 7, 9).contiguous(memory_format=torch.channels_last_3d),
        {"size": (5, 3, 4), "mode": "trilinear"},
    ),
}  # fmt: skip


def require_told(func: Any, *args: Any, **kwargs: Any) -> None:
    (leaf,), real = asked(func, *args, **kwargs).leaves, func(*args, **kwargs)
    strides = None if real.is_contiguous() else real.stride()
    assert (leaf.shape, leaf.strides, leaf.dtype) == (real.shape, strides, real.dtype)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", SIZED)
def test_a_resized_map_is_told_by_its_sizes(name: str, autocast: bool) -> None:
    image, options = SIZED[name]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        require_told(F.interpolate, image, **options)


IMAGE = torch.randn(2, 3, 7, 9)
REFUSED = {
    "to nothing": (F.interpolate, (IMAGE, (0, 4), None, "bicubic"), "greater than 0"),
    "from nothing": (F.interpolate, (IMAGE[:, :, :0], (4, 4), None, "bilinear"), "greater than 0"),
    "no channels": (F.interpolate, (IMAGE[:, :0], (4, 4), None, "bilinear"), "Non-empty 4D data tensor"),
    "another batch": (F.grid_sample, (IMAGE, torch.rand(3, 4, 5, 2)), "same batch size"),
    "three coordinates": (F.grid_sample, (IMAGE, torch.rand(2, 4, 5, 3)), "size 2 in last dimension"),
    "points": (F.grid_sample, (IMAGE, torch.rand(2, 5, 2)), "same number of dimensions"),
    "of nothing": (F.grid_sample, (IMAGE[..., :0], torch.rand(2, 4, 5, 2)), "non-empty spatial dimensions"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_resized_or_sampled_is_refused_as_in_torch(name: str) -> None:
    func, args, why = REFUSED[name]
    with pytest.raises(RuntimeError, match=why):
        func(*args)
    refused = asked(func, *args).error
    assert type(refused) is RuntimeError and why in str(refused)


def test_shapes_are_told_where_torch_refuses_without_a_number() -> None:
    refused = asked(F.conv2d, IMAGE, torch.rand(4, IMAGE.shape[1] + 1, 3, 3)).error
    assert f"the operands have the shapes {tuple(IMAGE.shape)}, (4, {IMAGE.shape[1] + 1}, 3, 3)" in str(refused)
    refused = asked(torch.add, torch.rand(2), torch.rand(3)).error  # which torch says itself
    assert "the operands" not in str(refused)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_sampled_map_is_told_by_its_sizes(mode: str) -> None:
    for x in (IMAGE, IMAGE.mT, IMAGE.contiguous(memory_format=torch.channels_last)):
        require_told(F.grid_sample, x, torch.rand(2, 4, 5, 2), mode=mode, align_corners=False)
