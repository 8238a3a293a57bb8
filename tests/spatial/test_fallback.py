"""What is not exact is refused on every rank alike, quickly, by name; and bad input gets a clear error."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import MeshError, ShapeError, UnsupportedOp
from fullframe.spatial.spec import spec_of
from fullframe.spatial.tensor import SpatialTensor, wrap
from tests.exactness import mesh, relative
from tests.rank_group import RankFailure, rank_group


class Spectral(nn.Module):
    """A block with an op that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(self.mix(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 3, padding=1)
        self.blocks = nn.Sequential(nn.ReLU(), Spectral())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x)).mean()


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _image() -> Tensor:
    return torch.randn(2, 3, 10, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _refused() -> tuple[str, str, tuple[str, ...], str]:
    model = ff.parallelize(_net(), mesh(1, 2))
    x = ff.shard(_image(), mesh(1, 2))
    with pytest.raises(UnsupportedOp) as caught:
        model(x)
    error = caught.value
    return error.function, error.module, error.placements, str(error)


def test_an_unknown_op_is_refused_on_all_ranks_by_name() -> None:
    for function, module, placements, message in rank_group(2).run(_refused):
        assert function == "torch.linalg.svdvals"
        assert module == "blocks.1 (Spectral)"
        assert "dim 3 over width at (0, 7, 13)" in placements[0]
        assert "unsupported='gather'" in message


def _gathered() -> tuple[float, float, list[str]]:
    whole = _net()
    expected = whole(_image())
    expected.backward()
    model = ff.parallelize(_net(), mesh(1, 2), unsupported="gather")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            loss = model(ff.shard(_image(), mesh(1, 2)))
            loss.backward()
    errors = [relative(p.grad, q.grad) for p, q in zip(whole.parameters(), model.parameters(), strict=True)]  # type: ignore[arg-type]
    return relative(expected.detach(), loss.detach()), max(errors), [f"{w.filename}: {w.message}" for w in said]


def test_gather_trains_it_exactly_and_says_so_once() -> None:
    answers = rank_group(2).run(_gathered)
    for loss_error, gradient_error, _ in answers:
        assert loss_error < 1e-12
        assert gradient_error < 1e-12
    (said,) = answers[0][2]
    assert said.startswith(f"{__file__}: torch.linalg.svdvals (blocks.1 (Spectral)) runs on the gathered")
    assert re.search(r"; at spatial/test_fallback.py:\d+, linalg_svdvals of ", said), said
    assert answers[1][2] == []


class Masking(nn.Module):
    """Writes at a boolean mask, which has no rule: the write must reach the split tensor all the same."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y[y > 0.5] = 0.25
        y.cumprod_(3)
        return (y * x * nn.init.constant_(torch.zeros_like(x), 2.0)).sum()


class Clamped(torch.autograd.Function):
    """Writes to its input, and returns it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x > 0)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (passed,) = ctx.saved_tensors
        return gradient * passed


@torch.library.custom_op("fullframe_tests::tripled_", mutates_args={"x"})
def _tripled_(x: Tensor) -> None:
    x.mul_(3)


class Writing(nn.Module):
    """By functions of which nobody knows that they write; to a part too, and where they return what they wrote to."""

    def forward(self, x: Tensor) -> Tensor:
        y, z = x * 1, (x * 2).detach()
        returned = Clamped.apply(y)
        _tripled_(z[..., 1:, :])
        torch._foreach_mul_([z], 2.0)  # type: ignore[attr-defined]
        torch._foreach_add_([z], [z])  # type: ignore[attr-defined]  # what is written to is given twice
        assert z.resize_as_(x.detach()) is z  # where nothing is to be written
        return (y * z * returned.sin()).sum()


class Strided(nn.Module):
    """By a view that no rule can give: what is written to it and to its base afterwards reaches both."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        view = torch.as_strided(y, (3, 4), (7, 2), 5)
        named = torch.as_strided(size=(2, 3), stride=(9, 3), input=y)
        view.mul_(2)
        y.add_(x.sin())
        return (view * view).sum() * y.cos().sum() + named.square().sum()


class InRuns(nn.Module):
    """By a view of a dim that was merged, whose base is written to before it is read."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        view = y.flatten(2)[..., 5:90]
        y.mul_(x.cos())
        return (view * view).sum()


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("kind", [Writing, Masking, Strided, InRuns])
def test_gathered_functions_write_to_the_split_tensor(kind: type[nn.Module], width: int) -> None:
    assert max(rank_group(width).run(_written_to, kind, width)) < 1e-12


def _written_to(kind: type[nn.Module], width: int) -> float:
    whole, there = _image().requires_grad_(), _image().requires_grad_()
    kind()(whole).backward()
    model = ff.parallelize(kind(), mesh(1, width), unsupported="gather")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(ff.shard(there, mesh(1, width))).backward()
    assert whole.grad is not None and there.grad is not None
    torch.distributed.all_reduce(there.grad)
    return relative(whole.grad, there.grad / width)


class HalfUsed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x)  # type: ignore[no-any-return]


def _unused() -> float:
    whole, split = HalfUsed().double(), HalfUsed().double()
    split.load_state_dict(whole.state_dict())
    for parameter in whole.parameters():
        torch.distributed.broadcast(parameter.detach(), 0)
    model = ff.parallelize(split, mesh(1, 2), unsupported="gather")
    model(ff.shard(_image(), mesh(1, 2))).square().mean().backward()
    whole(_image()).square().mean().backward()
    return relative(whole.stem.weight.grad, split.stem.weight.grad)  # type: ignore[arg-type]


def test_a_parameter_without_a_gradient_has_none() -> None:
    assert max(rank_group(2).run(_unused)) < 1e-12


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Energy(torch.autograd.Function):
    """Its result is a whole tensor, so nothing downstream would meet the shell again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@torch.library.custom_op("fullframe_tests::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return x * 3


def _sin_twice(x: Tensor) -> Tensor:
    return x.sin().sin()


def _bypass(what: str) -> str:
    x = ff.shard(_image().requires_grad_(), mesh(1, 2))
    with pytest.raises(UnsupportedOp) as caught:
        if what == "custom_op":
            triple(x)
        elif what == "aten op":
            torch.ops.aten._softmax.default(x, 1, False)
        elif what == "C++ kernel":
            with torch._C.DisableTorchFunctionSubclass():  # as a compiled extension calls it
                torch.sin(x)
        elif what == "old hook of a module's backward":
            module = nn.Conv2d(3, 3, 1).double()
            module.register_backward_hook(lambda module, before, after: None)  # type: ignore[arg-type, return-value]
            module(x)
        elif what == "traced function":
            torch.jit.trace(_sin_twice, (_image(),))(x)
        elif what == "scripted module":
            torch.jit.script(nn.Conv2d(3, 3, 1).double())(x)
        elif what == "forward mode":
            with torch.autograd.forward_ad.dual_level():
                torch.autograd.forward_ad.make_dual(x, x)
        elif what == "hook of a node":
            node: Any = (x * 1).grad_fn
            assert node.name() == "MulBackward0" and node in {node.next_functions[0][0], node}
            node.register_prehook(print)
    return str(caught.value)


def _memory_of_a_shell() -> None:
    x = ff.shard(_image(), mesh(1, 2))
    plain = torch.zeros(x.shape, dtype=x.dtype)
    plain.data = x  # which C++ alone sees
    for read in (plain.numpy, plain.zero_, lambda: torch.utils.dlpack.to_dlpack(x)):
        with pytest.raises(RuntimeError, match="data pointer"):
            read()


def test_a_shell_has_no_memory_to_read() -> None:
    rank_group(2).run(_memory_of_a_shell)


BYPASSES = {
    "custom_op": "fullframe_tests.triple",
    "aten op": "aten._softmax",
    "C++ kernel": "aten.sin",
    "old hook of a module's backward": "Use register_full_backward_hook",
    "traced function": "Call the function that torch.jit.trace was given",
    "scripted module": "Give parallelize the module that torch.jit was given",
    "forward mode": "autograd.grad is exact",
    "hook of a node": "grad_fn.register_prehook",
}


@pytest.mark.parametrize("what", BYPASSES)
def test_what_bypasses_the_rules_is_refused_by_name(what: str) -> None:
    for message in rank_group(2).run(_bypass, what):
        assert BYPASSES[what] in message


class WithFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return Energy.apply(triple_gradient(Doubled.apply(self.mix(x))))  # type: ignore[no-any-return]


def triple_gradient(x: Tensor) -> Tensor:
    return x * 3


def _functions_in_a_model() -> float:
    torch.manual_seed(0)
    whole = WithFunctions().double()
    whole(_image()).backward()
    torch.manual_seed(0)
    model = ff.parallelize(WithFunctions().double(), mesh(1, 2))
    model(ff.shard(_image(), mesh(1, 2))).backward()
    pairs = zip(whole.parameters(), model.parameters(), strict=True)
    return max(relative(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]


def test_no_gradient_of_a_model_s_own_functions_is_dropped() -> None:
    assert max(rank_group(2).run(_functions_in_a_model)) < 1e-12


def _shell_with_a_graph() -> str:
    """The last net: a shell that has got a graph of its own, however it came by it."""
    x = ff.shard(_image().requires_grad_(), mesh(1, 2))
    from fullframe.spatial.function_guard import apply_function as _apply_function

    doubled = _apply_function(Doubled, x)
    with pytest.raises(UnsupportedOp) as caught:
        doubled.sum()
    return str(caught.value)


def test_a_shell_with_a_graph_of_its_own_is_refused() -> None:
    for message in rank_group(2).run(_shell_with_a_graph):
        assert "DoubledBackward" in message


def _bad(what: str) -> None:
    rank = torch.distributed.get_rank()
    if what == "mesh":
        ff.init_mesh(height=3)
    elif what == "sizes":
        ff.shard(torch.zeros(1, 3, 8, 8 + rank), mesh(1, 2))
    elif what == "dims":
        ff.shard(torch.zeros((8, 8) if rank else (1, 8, 8)), mesh(1, 2))
    elif what == "twice":
        ff.shard(ff.shard(torch.zeros(8, 8), mesh(1, 2)), mesh(1, 2))
    elif what == "wrapped":
        ff.parallelize(ff.parallelize(_net(), mesh(1, 2)), mesh(1, 2))
    elif what == "item":
        ff.shard(torch.zeros(8, 8), mesh(1, 2)).item()
    elif what == "truth":
        bool(ff.shard(torch.zeros(8, 8), mesh(1, 2)) > 0)


BAD = {
    "mesh": (MeshError, "height 3 x width 1 = 3 does not divide the 2 ranks"),
    "sizes": (ShapeError, "rank 0: (1, 3, 8, 8), rank 1: (1, 3, 8, 9)"),
    "dims": (ShapeError, "rank 0: (1, 8, 8), rank 1: (8, 8)"),
    "twice": (ShapeError, "split already"),
    "wrapped": (MeshError, "wrapped already"),
    "item": (UnsupportedOp, "torch.Tensor.item"),
    "truth": (UnsupportedOp, "torch.Tensor.__bool__"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_on_all_ranks(what: str) -> None:
    kind, message = BAD[what]
    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(_bad, what)
    assert len(caught.value.errors) == 2
    for _, name, text, _ in caught.value.errors:
        assert name == kind.__name__
        assert message in text


def _odd_calls_gathered() -> tuple[float, bool]:
    """In gather mode: operands by names that are the function's own, and a result that is sparse."""
    x = _image()
    shell = ff.shard(x, mesh(1, 2))
    spec = shell.spec
    loose = wrap(shell.local, spec_of(spec.spatial, spec.shape, spec.placements, True, None))
    assert isinstance(loose, SpatialTensor)
    apart = torch.cdist(x1=loose, x2=loose)
    with pytest.raises(UnsupportedOp, match=r"runs whole, but not into out=: leave that out, and copy_ the result"):
        torch.linalg.svdvals(loose, out=torch.empty(0))
    leaf = loose.detach().requires_grad_()
    sparse = leaf.to_sparse()
    return float((apart - torch.cdist(x, x)).abs().max()), torch.equal(sparse.to_dense(), x)


@pytest.mark.filterwarnings("ignore")
def test_gathered_calls_by_keyword_and_to_sparse() -> None:
    for apart, same in rank_group(2).run(_odd_calls_gathered):
        assert apart == 0.0 and same


class Sent(nn.Module):
    def __init__(self, send: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.send = send

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        self.send(y)
        return y


def _sent() -> int:
    """Gathered, each would write into a copy, and the split tensor would stay what it was."""
    for send in (dist.all_reduce, partial(dist.broadcast, src=0), lambda y: dist.all_gather([y * 0, y * 0], y)):
        model = ff.parallelize(Sent(send), mesh(1, 2), unsupported="gather")
        with pytest.raises(UnsupportedOp, match="ranks of a replica hold parts of one tensor"):
            model(ff.shard(_image(), mesh(1, 2)))
    return 1


def test_collectives_on_split_tensors_are_refused_also_with_gather() -> None:
    assert rank_group(2).run(_sent) == [1, 1]
