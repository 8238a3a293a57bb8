"""Every way torch lets a function be called works on split tensors, and what torch refuses is refused on all ranks."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.errors import UnsupportedOp
from fullframe.spatial.rules.registry import RULES
from tests.exactness import mesh, relative
from tests.rank_group import rank_group

MESHES = [(1, 2), (2, 1), (1, 3), (2, 2)]
SHAPE = (2, 4, 7, 13)
I1, I2, I3 = np.int64(1), np.int32(2), np.int64(3)

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "numpy's names": lambda x: [
        x.sum(axis=3), x.mean(axis=(2, 3), keepdims=True), torch.amax(x, axis=2, keepdims=True), x.cumsum(axis=1),
        torch.stack([x, x], axis=1), torch.cat([x, x], axis=1), x.unsqueeze(dim=0), torch.softmax(x, axis=1),
        torch.std(x, axis=3, keepdims=True), torch.flip(x, dims=(3,)), torch.sum(x, axis=-1),
    ],
    "numpy's numbers": lambda x: [
        x.sum(I3), x.mean((I2, I3)), x[:, I1], x[..., I1:I3], x.narrow(I3, I1, I2), x.roll(I2, I3),
        x.unfold(I3, I3, I1),
        F.max_pool2d(x, I2), F.avg_pool2d(x, (I2, I3), I1), F.pad(x, (I1, I2)), x.view(I2, -1, 7, 13), x.flip(I3),
        x.permute(0, I2, I3, 1), F.interpolate(x, (np.int64(9), 15)), x.unsqueeze(I1), x.select(I3, I2),
        F.conv2d(x, x.new_ones(3, 4, 3, 3), None, I2, I1), x.chunk(I2, I3), x.repeat_interleave(I2, 1),
    ],
    "torch's names": lambda x: [
        x.view(size=(2, 4, 91)), x.expand(size=(2, 4, 7, 13)), x[:, :1].expand(size=(2, 3, 7, 13)), x.tile(dims=(1, 1)),
        x.repeat(repeats=(2, 1, 1, 1)), torch.tensor_split(x, sections=3, dim=3), x.tensor_split(indices=(2, 5), dim=3),
        torch.split_with_sizes(x, split_sizes=[4, 9], dim=3), torch.where(condition=x > 0, input=x, other=-x),
        torch.split(x, split_size_or_sections=5, dim=2), torch.sort(x, dim=1, descending=True, stable=True),
        x.sort(dim=1, stable=True), torch.topk(input=x, k=2, dim=1), x.transpose(dim0=2, dim1=3), x.squeeze(dim=1),
        torch.reshape(input=x, shape=(2, 28, 13)), x.flatten(start_dim=2, end_dim=-1), x.unflatten(dim=1, sizes=(2, 2)),
        torch.tensor_split(x, torch.tensor([2, 6]), 3), x.argmax(dim=3, keepdim=True), x.argmax(keepdim=True),
        x.movedim(source=1, destination=3), torch.masked_fill(input=x, mask=x > 0, value=1.0), x.clamp(min=0, max=1),
        torch.add(input=x, other=x, alpha=2), torch.gather(x, dim=1, index=x.argmax(dim=1, keepdim=True)),
    ],
    "views of shapes": lambda x: [
        torch.ones(2, 4, 91).double().view_as(x) * x, x.view_as(torch.ones(2, 4, 7, 13)), x.reshape_as(x.flatten(2)),
        torch.ones(2 * 4 * 7 * 13).double().reshape_as(x) + x,
    ],
    "beyond the rows": lambda x: [
        x[..., -99:99], x[..., 5:2], x.tensor_split((-5, -2), 3), x.tensor_split((2, 99), 3), x[..., 12:],
    ],
    "forms that few use": lambda x: [
        torch.atleast_2d(x[0, 0, 0]), torch.atleast_3d(x[0, 0], x[0, 0, 0]), torch.vstack([x[0, 0, 0], x[0, 0, 1]]),
        x.rot90(4, (2, 3)), torch.max(x, x.sin()), torch.min(x, x.sin()), torch.fft.fftn(x, dim=[]).real,
        torch.stack(list(x.permute(3, 0, 1, 2))), x[0, 0].fliplr(), x[0, 0].flipud(), torch.ravel(x),
        torch.einsum("nchw,wd", x, torch.ones(13, 3).double()), torch.einsum("...w,wd", x, torch.ones(13, 3).double()),
        x.__rmatmul__(torch.ones(5, 7).double()), (x * 1).detach_(), F.prelu(x, torch.arange(4).double()),
        torch.linalg.multi_dot([x[0, 0, :, :7], x[0, 1, :, :7], x[1, 0, :, :7]]), F.upsample_bilinear(x, (9, 15)),
        torch.quantile(x, x[0, 0, 0].sigmoid(), dim=3), torch.softmax(x, 3, torch.float64), next(iter(reversed(x))),
        F.cross_entropy(torch.ones(SHAPE).double(), x.softmax(1)), x * float(x.flatten()[3] in x), x * len(f"{x}"[:1]),
        x * torch._shape_as_tensor(x).sum(),
    ],
    "one row or none": lambda x: [
        torch.unique_consecutive(x[0, 0, 0, :1]), torch.unique(x[:1, :1, :1], dim=3), torch.trapezoid(x[:, :0], dim=1),
        F.fold(x[0, 0, :4, :1].expand(4, 4)[None], (4, 4), 2, stride=2), x * x[:, :0].roll(3).numel(),
        F.grid_sample(x[:, :, :1], torch.ones(2, 3, 13, 2).double() / 3, padding_mode="reflection", align_corners=True),
    ],
    "lists of tensors": lambda x: [*torch.atleast_1d([x, torch.tensor(1.0)]), *torch.atleast_3d([x[0, 0], x[0, 0, 0]])],
    "cat with an empty start": lambda x: torch.cat([torch.empty(0, dtype=x.dtype), x, x], 1),
    "compared with nothing": lambda x: [x * (x == None), x * (x != None), x * (x == "a"), x * (x != "a")],  # noqa: E711
    "operands that know what to do": lambda x: [x ** Twice(), x // Twice(), x == Twice(), x < Twice()],
    "as_tensor": lambda x: [x * torch.as_tensor(x.detach(), dtype=torch.float32), x * torch.asarray(x.detach().long())],
    "facts": lambda x: [
        x * x.is_contiguous(), x * x.transpose(2, 3).is_contiguous().__int__(), x * x[..., 1:].is_contiguous(),
        x * sum(x[..., 1:].stride()), x * sum(x.permute(0, 2, 3, 1).stride()), x * x.numel(),
        x * x.to(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last),
        x * sum((x[..., 2:].permute(0, 2, 3, 1) * 2).stride()), x * sum(x[..., 2:].contiguous().stride()),
        x * sum(x.contiguous(memory_format=torch.channels_last).relu().stride()),
    ],
    "out= of split tensors": lambda x: [
        torch.sum(x, 1, out=torch.zeros_like(x[:, 0])), torch.add(x, 1, out=torch.zeros_like(x)),
        torch.amax(x, 1, out=torch.zeros_like(x[:, 0])), torch.softmax(x, -1, out=torch.zeros_like(x)),
        torch.cumsum(x, 1, out=torch.zeros_like(x)), *torch.max(x, 1, out=(x[:, 0] * 1, (x[:, 0] * 0).long())),
    ],
    "out= of whole tensors": lambda x: [
        torch.sum(x, (0, 2, 3), out=x.new_zeros(4)), torch.mean(x, (2, 3), out=x.new_zeros(2, 4)),
    ],
}  # fmt: skip


class Twice:
    """What torch's operators do not know, and leave to it."""

    def _twice(self, x: Tensor) -> Tensor:
        return 2 * x

    __rpow__ = __rfloordiv__ = __gt__ = __eq__ = _twice  # type: ignore[assignment]


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "an index past the end": lambda x: x[..., 99],
    "a row past the end": lambda x: x.select(3, 13),
    "a write past the end": lambda x: x.__setitem__((..., 99), 5.0),
    "a write of another size": lambda x: x.__setitem__((..., slice(0, 4)), x.new_ones(3)),
    "a dim that is not there": lambda x: x.sum(4),
    "a dim twice": lambda x: x.flip(3, 3),
    "a slice backwards": lambda x: x[..., ::-1],
    "rows that are not there": lambda x: x.narrow(3, 10, 9),
    "labels of another size": lambda x: F.cross_entropy(x, torch.zeros(2, 9, 15).long()),
    "split labels of another size": lambda x: F.cross_entropy(x, (F.pad(x, (1, 1))[:, 0] * 0).long()),
    "skip connections off by one": lambda x: torch.cat([x, F.pad(x, (0, 1))], 1),
    "stacked off by one": lambda x: torch.stack([x, F.pad(x, (0, 1))]),
    "a sum off by one": lambda x: x + F.pad(x, (0, 1)),
    "a sum of another size": lambda x: x + torch.ones(7, 12).double(),
    "bce without the channel": lambda x: F.binary_cross_entropy_with_logits(x, x[:, :1].sigmoid()),
    "a contracted dim": lambda x: x @ torch.ones(12, 3).double(),
    "a longer contracted dim": lambda x: x @ torch.ones(14, 3).double(),
    "features of a linear": lambda x: F.linear(x, torch.ones(3, 12).double()),
    "letters of an einsum": lambda x: torch.einsum("nchw,dw->nchd", x, torch.ones(3, 12).double()),
    "a normalized shape": lambda x: F.layer_norm(x, (12,)),
    "a reduction": lambda x: F.mse_loss(x, x * 2, reduction="avg"),
    "size and scale": lambda x: F.interpolate(x, size=(9, 9), scale_factor=2),
    "same with a stride": lambda x: F.conv2d(x, x.new_ones(3, 4, 3, 3), None, 2, "same"),
    "an attention mask": lambda x: F.scaled_dot_product_attention(x, x, x, torch.zeros(7, 5).double()),
    "a view of another count": lambda x: x.view(2, 4, 90),
    "a view of a transpose": lambda x: x.transpose(1, 3).view(2, -1),
    "channels of a convolution": lambda x: F.conv2d(x, x.new_ones(3, 5, 3, 3)),
    "sizes that do not add up": lambda x: x.split([3, 4], 3),
    "an unknown option": lambda x: torch.sum(x, colour=3),
    "too much padding": lambda x: F.pad(x, (14, 0, 0, 0), mode="reflect"),
    "a kernel too large": lambda x: F.max_pool2d(x, 20),
    "an operand on the left": lambda x: torch.ones(7, 12).double() * x,
    "in place, of another size": lambda x: (x * 1).add_(torch.ones(5, 2, 4, 7, 13).double()),
    "the power of nothing": lambda x: x**None,
    "a division by nothing": lambda x: x // None,
    "a list less a tensor": lambda x: [1.0] - x,
    "out= of another kind": lambda x: torch.add(x, 1, out=torch.zeros(SHAPE).long()),
}


def _tensors(results: Any) -> list[Tensor]:
    leaves = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
    return [(t.full() if isinstance(t, ff.SpatialTensor) else t).detach() for t in leaves]


def _given() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _called(height: int, width: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, call in CALLS.items():
        here, there = _tensors(call(_given())), _tensors(call(ff.shard(_given(), mesh(height, width))))
        assert len(here) == len(there), name
        found[name] = [relative(a, b) for a, b in zip(here, there, strict=True)]
    return found


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_every_form_of_a_call(height: int, width: int) -> None:
    for found in rank_group(height * width).run(_called, height, width):
        wrong = {name: errors for name, errors in found.items() if not max(errors) <= 1e-12}
        assert not wrong, wrong


def _error(call: Callable[[Tensor], Any], x: Tensor) -> tuple[type[BaseException] | None, str]:
    try:
        call(x)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def _refusals(height: int, width: int) -> dict[str, tuple[str, str, str]]:
    found = {}
    for name, call in REFUSED.items():
        here, _ = _error(call, _given())
        assert here is not None, name
        there, message = _error(call, ff.shard(_given(), mesh(height, width)))
        fits = there is here or there is UnsupportedOp
        found[name] = (here.__name__, there.__name__ if there else "nothing", "" if fits else message)
        if not fits:
            break  # the ranks may have run apart
    return found


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_what_torch_refuses_is_refused_on_all_ranks(height: int, width: int) -> None:
    answers = rank_group(height * width).run(_refusals, height, width)
    for found in answers:
        wrong = {name: said for name, said in found.items() if said[1] not in (said[0], "UnsupportedOp")}
        assert not wrong, wrong
    assert all(found == answers[0] for found in answers)
    named = [name for name, said in answers[0].items() if said[1] == "UnsupportedOp"]
    assert len(named) <= 3, named  # nearly all with torch's own exception


def _let_go() -> bool:
    """Whether the operand of a call that raises, as one like it before did not, is freed at once."""
    x = ff.shard(torch.arange(32.0).view(1, 2, 4, 4), mesh(1, 2))
    F.batch_norm(x, None, None, training=True)
    rule, local = RULES[F.batch_norm], weakref.ref(x.local)

    def raising(func: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError

    RULES[F.batch_norm] = raising
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            F.batch_norm(x, None, None, training=True)
        del x
        return local() is None
    finally:
        RULES[F.batch_norm] = rule
        gc.enable()


def test_an_error_keeps_no_operand() -> None:
    assert rank_group(2).run(_let_go) == [True, True]
