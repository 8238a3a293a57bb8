"""`autograd.Function.apply` and functions of TorchScript on split tensors."""

from typing import Any

import numpy._core._multiarray_umath as kernels
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fullframe as ff
from fullframe.errors import UnsupportedOp
from fullframe.spatial.function_guard import apply_function
from fullframe.spatial.spec import spec_of
from fullframe.spatial.tensor import wrap
from tests.rank_group import rank_group


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3


def test_plain_tensors_pass_and_torch_s_own_is_behind_it() -> None:
    x = torch.ones(2, requires_grad=True)
    Triple.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3]
    assert torch.autograd.Function.apply.__func__ is not apply_function


def _keeper() -> Any:
    """What `torch.utils.checkpoint` up to torch 2.12 keeps a block's inputs with, but for tensors at other places."""

    def forward(*args: Any) -> Tensor:
        return torch.empty(0)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(each for each in inputs if isinstance(each, Tensor)))
        ctx.get_args = lambda saved: [*saved[1:], inputs[-1]]

    body = {"forward": staticmethod(forward), "setup_context": staticmethod(setup_context)}
    return type("_NoopSaveInputs", (torch.autograd.Function,), {**body, "__module__": "torch.utils.checkpoint"})


def _kept() -> list[Any]:
    x = ff.shard(torch.arange(6.0).view(1, 6), ff.init_mesh(width=2))
    result = _keeper().apply(torch.empty(0, requires_grad=True), x, torch.ones(2), "a")
    split, plain, text = result.grad_fn.get_args(result.grad_fn.saved_tensors)
    with torch.no_grad():
        assert _keeper().apply(torch.empty(0, requires_grad=True), x, "a").grad_fn is None
    return [type(split) is ff.SpatialTensor, split.full().tolist(), type(plain) is Tensor, plain.tolist(), text]


def test_what_older_checkpoints_keep_of_a_split_input_is_its_local_part() -> None:
    for found in rank_group(2).run(_kept):
        assert found == [True, [[0, 1, 2, 3, 4, 5]], True, [1, 1], "a"]


def _checkpointed(x: Tensor, weight: Tensor) -> tuple[Tensor, list[tuple[int, ...]]]:
    """A checkpoint within a checkpoint, within hooks on saved tensors; the shapes that these get."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    def outer(x: Tensor) -> Tensor:
        inner = checkpoint(lambda y: F.conv2d(y.sin(), weight, padding=1), x * 2, use_reentrant=False)
        return inner.tanh()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        result: Tensor = checkpoint(outer, x * 1, use_reentrant=False)
    return result, shapes


def _checkpoints(width: int) -> tuple[list[Tensor], list[tuple[int, ...]], str]:
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    split = ff.shard(whole, ff.init_mesh(width=width)) if width > 1 else whole
    result, shapes = _checkpointed(split, weight)
    result.square().sum().backward()
    x = split * 1
    again = checkpoint(torch.sin, x, use_reentrant=False)
    x.add_(1)
    with pytest.raises(RuntimeError) as refused:
        again.sum().backward()
    return [whole.grad, weight.grad], shapes, str(refused.value)  # type: ignore[list-item]


def test_checkpoints_keep_local_tensors_of_split_inputs_with_their_versions() -> None:
    expected, _, _ = _checkpoints(1)
    for found, shapes, refused in rank_group(2).run(_checkpoints, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert set(shapes) == {(1, 2, 5, 4)}
        assert "modified by an inplace operation" in refused


class InPlace(Triple):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)


class OfMemory(Triple):
    """As a kernel of C++ reads its operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            assert x.data_ptr()
        return x * 3


class Compiled(Triple):
    """Of an extension module, as far as its code tells: it is not called here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3 if kernels else x


class Unseen(Triple):
    """Of an op that has no rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x.expand(4, 4) * 0) + x * 3


SAID = {
    InPlace: "InPlace.apply: an autograd.Function that writes to its input would lose its gradient",
    OfMemory: "OfMemory.apply: its own kernel reads memory, which a split tensor has in parts alone",
    Compiled: "Compiled.apply: its own kernel reads memory",
    Unseen: "linalg.eigvalsh: ",
}


def _applied(function: Any) -> tuple[str, list[float], list[float]]:
    mesh = ff.init_mesh(width=2)
    whole = torch.arange(4.0).view(1, 4).requires_grad_()
    with pytest.raises(ff.UnsupportedOp) as refused:
        function.apply(ff.shard(whole, mesh) * 1)
    x = ff.shard(whole, mesh) * 1
    spec = x.spec
    loose = wrap(x.local, spec_of(spec.spatial, spec.shape, spec.placements, True, None))
    got = function.apply(loose)
    (got * torch.arange(4.0)).sum().backward()
    assert whole.grad is not None
    return str(refused.value), got.flatten().tolist(), whole.grad.flatten().tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", SAID)
def test_what_cannot_run_on_split_tensors_is_refused_or_gathered_and_no_gradient_is_lost(function: Any) -> None:
    for said, values, gradient in rank_group(2).run(_applied, function):
        assert SAID[function] in said
        assert values == [0, 3, 6, 9] and gradient == [0, 3, 6, 9]


class Second(torch.autograd.Function):
    """Writes into what it is given beside a map, as statistics are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor) -> Tensor:
        beside.add_(x.detach())
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3, None


class Both(Second):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        beside.add_(x.detach())
        return x.mul_(3)


def _column(function: Any, width: int) -> Any:
    """A column of a split tensor, which lies whole on all ranks: what the functions write reaches the base."""
    whole = torch.arange(8.0).view(2, 4).requires_grad_()
    sides = torch.ones(2, 4)
    x, beside = (ff.shard(each, ff.init_mesh(width=width)) if width > 1 else each for each in (whole, sides))
    x, beside = x * 1, beside * 1
    result = function.apply(x[..., 1], *([beside[..., 2]] if issubclass(function, Second) else []))
    (result.square().sum() + x.sum()).backward()
    return [(each.full() if width > 1 else each).tolist() for each in (x, beside)], result.tolist(), whole.grad.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("function", [Triple, InPlace, OfMemory, Second])
def test_a_function_on_a_column_of_a_split_tensor_is_one_process_s(function: Any) -> None:
    expected = _column(function, 1)
    assert rank_group(2).run(_column, function, 2) == [expected] * 2


def _beside(width: int) -> Any:
    """What is written into a column beside a split map, and what the map's gradient is."""
    whole = torch.arange(8.0).view(2, 4).requires_grad_()
    sides = torch.ones(2, 4)
    x, beside = (ff.shard(each, ff.init_mesh(width=width)) if width > 1 else each for each in (whole, sides))
    beside = beside * 1
    Written.apply(x * 1, beside[..., 2]).square().sum().backward()
    assert whole.grad is not None
    return (beside.full() if width > 1 else beside).tolist(), whole.grad.tolist()


class Written(Second):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor) -> Tensor:
        beside.add_(1.0)
        return x * 3


def test_what_a_function_of_a_split_map_writes_into_a_column_reaches_its_base() -> None:
    assert rank_group(2).run(_beside, 2) == [_beside(1)] * 2


def _both() -> str:
    with pytest.raises(UnsupportedOp) as refused:
        _column(Both, 2)
    return str(refused.value)


def test_a_function_that_writes_into_two_columns_is_refused() -> None:
    for refused in rank_group(2).run(_both):
        assert "Both.apply: it writes into several tensors" in refused


@torch.jit.script
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@torch.jit.script
def focal(logits: Tensor, maps: list[Tensor], gamma: float = 2.0) -> Tensor:
    bare = F.binary_cross_entropy_with_logits(swish(logits), maps[0], reduction="none")
    return (bare * (1 - torch.exp(-bare)) ** gamma).mean()


def _scripted() -> float:
    mesh, found = ff.init_mesh(width=3), []
    image = torch.randn(1, 2, 5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for split in (False, True):
        leaf = image.clone().requires_grad_()
        x = ff.shard(leaf, mesh) if split else leaf
        loss = focal(x, [(x > 0).double()], gamma=1.5)
        loss.backward()
        assert leaf.grad is not None
        found.append((loss.detach(), leaf.grad))
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def test_a_scripted_function_is_one_process_s() -> None:
    assert max(rank_group(3).run(_scripted)) < 1e-15


def _variables() -> list[Any]:
    x = ff.shard(torch.arange(6.0).view(1, 6), ff.init_mesh(width=2))
    torch.autograd.Variable(x).add_(1)  # of the same memory
    leaf = torch.autograd.Variable(data=x, requires_grad=True)
    (leaf * leaf).sum().backward()
    bare = torch.autograd.Variable(leaf * 2)
    assert leaf.grad is not None
    with pytest.raises(ValueError, match="volatile and require_grad"), pytest.warns(UserWarning, match="no_grad"):
        torch.autograd.Variable(x, requires_grad=True, volatile=True)
    return [x.full().tolist(), leaf.grad.full().tolist(), leaf.is_leaf, bare.requires_grad, bare.is_leaf]


def test_a_variable_of_a_split_tensor_is_the_same_memory_without_its_graph() -> None:
    whole = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
    for found in rank_group(2).run(_variables):
        assert found == [whole, [[2.0, 4.0, 6.0, 8.0, 10.0, 12.0]], True, False, True]


class Reentrant(nn.Module):
    """Blocks that older checkpoints, torch's default until now, run again; `where` says what they are given."""

    def __init__(self, where: str):
        super().__init__()
        self.where, self.stem, self.head = where, nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 1)
        self.inner, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def block(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(F.dropout2d(self.inner(x).relu(), 0.4) * scale)  # type: ignore[no-any-return]

    def forward(self, image: Tensor) -> Tensor:
        if self.where == "first":  # which wants no gradient, so the stem gets none
            x: Any = checkpoint(self.stem, image, use_reentrant=True)
        else:
            x = self.stem(image)
        if self.where == "within":
            x = checkpoint(lambda y: checkpoint(self.block, y, use_reentrant=True).sin(), x, use_reentrant=True)
        elif self.where == "two":
            x = sum(checkpoint(lambda y, z, scale: (self.block(y, scale), z.sin(), None)[:2], x, x * 2, 0.5,
                               use_reentrant=True))  # fmt: skip
        elif self.where == "in a row":
            x = checkpoint_sequential(nn.Sequential(self.inner, self.last, nn.Tanh()), 2, x, use_reentrant=True)
        elif self.where == "held":
            scale = self.head.weight.mean()
            x = checkpoint(lambda scale: x * scale, scale, use_reentrant=True)
        return self.head(x)  # type: ignore[no-any-return]


def _reentrant(where: str, width: int) -> list[Any]:
    torch.manual_seed(0)
    net = Reentrant(where).double()
    image = torch.randn(2, 2, 5, 9, dtype=torch.float64)
    model: Any = net
    if width > 1:
        mesh = ff.init_mesh(width=width)
        model, image = ff.parallelize(net, mesh, find_unused_parameters=True), ff.shard(image, mesh)
    for _ in range(2):  # with the statistics that a second run leaves too
        model(image).square().sum().backward()
    return [*(p.grad for p in net.parameters()), *net.buffers()]


@pytest.mark.parametrize("where", ["first", "within", "two", "in a row"])
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_reentrant_checkpoint_is_one_process_s(where: str) -> None:
    expected = _reentrant(where, 1)
    for found in rank_group(2).run(_reentrant, where, 2):
        for ours, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


def _held() -> str:
    with pytest.raises(UnsupportedOp) as refused:
        _reentrant("held", 2)
    return str(refused.value)


def test_a_reentrant_checkpoint_of_split_tensors_that_it_is_not_given_is_refused() -> None:
    for refused in rank_group(2).run(_held):
        assert "CheckpointFunctionBackward" in refused and "use_reentrant=False" in refused
