"""What torch makes a view is one: a write to either side is seen in both, or it is refused by name on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.errors import UnsupportedOp
from tests.exactness import differences, mesh, relative
from tests.rank_group import rank_group
from tests.spatial.cases import Op, all_cases

MESHES = [(1, 2), (2, 1), (1, 3), (2, 2)]
SHAPE = (2, 4, 7, 13)


def nested(x: Tensor) -> Any:
    y = x[..., 1:8]
    z = y[:, 1:]
    w = z[:, 0, :, 2]
    w.fill_(7)
    z[..., 0] = -3
    return x, y, z, w


def both_ways(x: Tensor) -> Any:
    y = x[..., 3:9]
    first = y.sum()
    x.mul_(2)
    second = y.sum()
    y.add_(1)
    return first, second, x.sum(), y


def siblings(x: Tensor) -> Any:
    a, b, c = x.chunk(3, -1)
    a.zero_()
    b.mul_(2)
    return x, a, b, c


def of_resized(x: Tensor) -> Any:
    y = F.interpolate(x, scale_factor=2, mode="bilinear")
    y.view(2, -1)[0].zero_()
    y.view(2, 4, 14, 13, 2)[..., 0].mul_(3)
    return y


def windows(x: Tensor) -> Any:
    x = F.pad(x, (1, 2, 1, 0))
    tiles = x[:, :, 1:7, 1:13].reshape(2, 4, 3, 2, 3, 4)
    tiles += 1  # of a slice, so a copy in torch
    tiles = x.view(2, 4, 4, 2, 4, 4)
    tiles[:, :, 0] = 5
    return x, tiles


def strips(x: Tensor, value: Tensor) -> Any:
    x[..., 1:6] = x[..., 4:9] * 2
    x[..., 1::3] = value
    x[:, :, 2:6:2] += 1
    x[..., None, 4] = 8.0
    return x


def properties(x: Tensor) -> Any:
    """Of slices that are copies: their rows lie on some of the ranks, and are spread over all of them."""
    y = x[1, :, :3, :6]
    y.mT[:, 3:] -= 1
    y[:, :2].mH[1].mul_(2)
    x[0, 1, :3, 7:].T[4] = 3
    x[0, 2, 4:, :5].H.add_(1)
    y.data[0, 1] += 4
    x[1, 3:, 4:, :4].real[0, :, :2] *= 5
    return x, y


def whole_views(x: Tensor) -> Any:
    """What is written into a row that all ranks hold is split itself."""
    x[..., 3] = x[:, :, :, 5].clone()
    y = x[1, 2, 4]
    y += x[0, 0, :, :6].sum(-1)[4] + x[0, 1, 2] * 2
    z = x[0, :, :, 2]
    z.copy_(x[1, :, :7, 6:].flatten(1)[:, 2:9] * 1)
    return x, y, z, x.select_scatter(x[..., 1] * x[..., 4], -1, -1)


def same_memory(x: Tensor) -> Any:
    y = F.interpolate(x, size=x.shape[2:])
    y += 1
    z = F.pad(x, (0, 0, 0, 0))
    z += 1
    c = F.pad(x, (-1, -1, 0, 0))
    c += 1
    r = x.roll(0, 3)
    r += 1
    e = x[..., 2:7].contiguous()
    e += 1
    q = x.roll(13, 3) + x.flip(())
    return x, y, z, c, r, e, q


def with_gaps(x: Tensor) -> Any:
    """What torch copies for the gaps between strides, which rows that were spread over the ranks do not have."""
    z = torch.complex(x, -x)
    copies = [
        x[:, :, 1:4].detach().reshape(-1), x[..., ::2].data.flatten(), x[..., 1:].data.contiguous(),
        x[:, :, 2:5, 6].reshape(-1), x[:, :, 3, 1:4].flatten(1), x[:, 1:, 2:5, 6].contiguous(), z.real.contiguous(),
        z.imag.reshape(-1),
    ]  # fmt: skip
    for copy in copies:
        copy += 1
    return x, z.real, z.imag, copies


def through_data(x: Tensor) -> Any:
    y, z = x[..., 2:5], x.diagonal(0, 2, 3)
    x.view(2, 4, -1).data[..., 1:50] = 5
    first = y.sum() + z.sum()
    y.data[0].data.add_(1)
    return x, y, z, first


def read_without_graph(x: Tensor) -> Any:
    y = x[..., 2:5]
    x.detach().mul_(2)
    with torch.no_grad():
        seen = y.sum()
    return y.sin(), seen


def out_of_whole(x: Tensor) -> Any:
    torch.add(torch.ones(7, 13, dtype=x.dtype), 2.0, out=x.detach()[1, 1])
    torch.mul(torch.arange(13, dtype=x.dtype), torch.ones(7, 1, dtype=x.dtype), out=x.detach()[0, 2])
    return x * 1


def without_rows(x: Tensor) -> Any:
    y = x[..., 13:].flatten(2)
    y += 1
    x[:, []] = 4.0
    return y, x[:, :, 3:3].reshape(2, -1, 13), x[..., 13:].chunk(3, 3), x[..., 5:5].split(4, 3), x


def all_of_a_part(x: Tensor) -> Any:
    """The gradient of a slice that is all that one rank holds, beside that of what it was cut from."""
    slices = x.narrow(3, 0, 11), x.narrow(2, 0, 6)
    if not x.requires_grad:
        return x
    loss = sum(t.square().sum() for t in (x, *slices))
    return x, torch.autograd.grad(loss, slices, retain_graph=True)  # type: ignore[arg-type]


def hooked(x: Tensor) -> Any:
    """The hooks of a view, and of what it is a view of, end with a write to it, or to a part of it."""
    views = []
    for rows in (slice(2, 9), slice(0, 7)):
        between = x[:, 1:]
        views += [between, between[..., rows], between[0, :, 1:4, 5:], x[..., rows], x[..., 4]]
    for view in views if x.requires_grad else ():
        view.register_hook(lambda gradient: gradient * 3)
    views[1][..., :4].mul_(2)
    views[2].mul_(3)
    views[3][:, 0].mul_(5)
    views[4].mul_(7)
    return x, views


def asked_of_views(x: Tensor) -> Any:
    """The gradient of a view has no part of what is read of views of it, once something was written."""
    between = x.narrow(3, 0, 11)
    part, piece = between.narrow(3, 1, 7), between.narrow(3, 3, 8)
    piece[:, 0].mul_(2)
    if not x.requires_grad:
        return x
    loss = sum(t.square().sum() for t in (x, between, part, piece))
    return x, torch.autograd.grad(loss, (x, between, part, piece), retain_graph=True)  # type: ignore[arg-type]


WRITES: dict[str, Callable[..., Any]] = {
    "split values into a whole view": lambda x: (x[..., 3, :1].copy_(x[..., 4, 5:6].detach() * 2), x),
    "split values into a whole row": lambda x: (x[0, 0, -3, :2:2].copy_(x[0, 0, 3:4, 2].detach() * 2), x),
    "gaps": with_gaps,
    "through data": through_data,
    "read without a graph": read_without_graph,
    "out= of whole operands": out_of_whole,
    "out= of whole views": lambda x: (
        torch.sin(x.detach()[:, :, 1], out=x.detach()[:, :, 0]), torch.exp(x.detach()[..., 2], out=x[..., 0].data), x,
    ),
    "without rows": without_rows,
    "slice": lambda x: (x[..., :2].zero_(), x),
    "one column": lambda x: (x[..., 0].zero_(), x),
    "select": lambda x: (x.select(-1, 0).zero_(), x.select(2, -1).fill_(4), x),
    "narrow": lambda x: (x.narrow(-1, 1, 2).fill_(9), x),
    "relu in place": lambda x: (F.relu_(x[..., :3]), x),
    "relu in place, by position": lambda x: (F.relu(x[..., 5:], True), x),
    "chunk": lambda x: (x.chunk(4, -1)[0].zero_(), x),
    "unbind": lambda x: (x.unbind(-1)[0].zero_(), x),
    "copy_": lambda x: (x[..., :3].copy_(x[..., 5:8]), x),
    "add to a slice": lambda x: (x[..., :3].__iadd__(1), x),
    "wide slice": lambda x: (x[..., 2:9].mul_(2), x),
    "rows and columns": lambda x: (x[:, :, 1:3, 2:9].mul_(2), x[:, :, 1:5, :1].fill_(3), x),
    "all of a part": all_of_a_part,
    "hooks of views": hooked,
    "gradients of views": asked_of_views,
    "every second": lambda x: (x[..., ::2].mul_(2), x[:, :, 1::3].zero_(), x),
    "of the data": lambda x: (x.data[..., 0].zero_(), x.detach()[..., 3:5].fill_(2), x),
    "properties": properties, "whole views": whole_views,
    "transposed": lambda x: (x.transpose(2, 3)[:, :, 0].zero_(), x.permute(0, 2, 3, 1)[..., 5, :].fill_(1), x),
    "a view of a slice": nested,
    "base and view": both_ways,
    "chunks": siblings,
    "view of what was resized": of_resized,
    "windows": windows,
    "what torch copies": same_memory,
    "shuffled and repeated": lambda x: (
        F.pixel_shuffle(x, 2).fill_(2), F.channel_shuffle(x, 2).fill_(2), x.repeat_interleave(2, 1).fill_(2), x,
    ),
    "one element": lambda x: (x[0, 1, 2, 3].fill_(9), x[1, 2, 3, 4].item(), x),
    "a whole strip": lambda x: (x[..., 0].t() if x[..., 0].dim() == 2 else x[..., 0].transpose(0, 1), x[..., :1] * 2),
    "strip of a strip": lambda x: (x[..., 0][..., 1:3].zero_(), x[0, ..., 0].view(-1).mul_(2), x),
}  # fmt: skip

WITHOUT_GRAPH = (
    "of the data",
    "other data",
    "chunk",
    "unbind",
    "chunks",
)  # what torch itself refuses where a gradient is wanted


def _values(results: Any) -> list[Tensor]:
    found = []
    for t in tree_leaves(results):
        if isinstance(t, Tensor):
            found.append((t.full() if isinstance(t, ff.SpatialTensor) else t).detach().clone())
    return found


def _compared(name: str, height: int, width: int, graph: bool) -> list[float]:
    given = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    answers = []
    for split in (False, True):
        leaf = given.clone().requires_grad_(graph)
        x = (ff.shard(leaf, mesh(height, width)) if split else leaf) * 1
        results = WRITES[name](x)
        values = _values(results)
        tensors = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        if graph:
            loss = sum((t * t.detach().sin()).sum() for t in tensors if t.requires_grad)
            (of_base,) = torch.autograd.grad(loss, x, retain_graph=True)  # type: ignore[arg-type]
            loss.backward()  # type: ignore[union-attr]
            assert leaf.grad is not None
            values += _values(of_base)
            if split:
                torch.distributed.all_reduce(leaf.grad)
                leaf.grad /= height * width
            values.append(leaf.grad)
        answers.append(values)
    assert len(answers[0]) == len(answers[1])
    return [relative(here, there) for here, there in zip(*answers, strict=True)]


def _all_compared(height: int, width: int, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    graph = mode == "gradients"
    for name in WRITES:
        if graph and name in WITHOUT_GRAPH:
            continue
        try:
            with torch.inference_mode(mode == "inference"):
                found[name] = _compared(name, height, width, graph)
        except UnsupportedOp as refused:
            found[name] = str(refused)
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("mode", ["values", "gradients", "inference"])
@pytest.mark.parametrize(("height", "width"), MESHES)
def test_a_write_reaches_who_shares_the_memory(height: int, width: int, mode: str) -> None:
    for found in rank_group(height * width).run(_all_compared, height, width, mode):
        wrong = {name: e for name, e in found.items() if isinstance(e, str) or not max(e) <= 1e-12}
        assert not wrong, wrong


HOOKS_END = (  # of a chunk, a gradient's gradient, what is picked, an operand itself
    "composed: unsafe_chunk",
    "convolution_gradients",
    "masks: index tensors beside a mask",
    "pointwise: whole tensors meet split ones",
)


def _added_to(op: Op, hooked: bool) -> Op:
    """The op of a case, with 1 added in place to all it gives that is of floating point, after a hook on what is new.

    What is new in torch, and no view, keeps its hooks.
    """
    new: list[bool] = []

    def run(*operands: Tensor) -> Any:
        results = [t for t in tree_leaves(op(*(t * 1 for t in operands))) if isinstance(t, Tensor)]
        for number, t in enumerate(results):
            if len(new) == number:  # plain torch comes first
                new.append(hooked and t.requires_grad and not t._is_view())
            if new[number]:
                t.register_hook(lambda gradient: gradient * 3)
        return [t.add_(1) if t.is_floating_point() else t for t in results]

    return run


def _differences_of_results_written_to(height: int, width: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in all_cases().items():
        generator = torch.Generator().manual_seed(1)
        split = [torch.rand((*lead, 9, 14), generator=generator, dtype=torch.float64) for lead in case.split]
        whole = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in case.whole]
        leaves = [t.clone().requires_grad_() for t in (*split, *whole)]
        op = _added_to(case.op, not name.startswith(HOOKS_END))
        try:
            sum(t.sum() for t in op(*leaves) if t.requires_grad).backward()
        except (RuntimeError, AttributeError, ValueError, IndexError):
            continue  # plain torch refuses
        try:
            found[name] = max(differences(op, split, whole, height, width).values())
        except UnsupportedOp as refused:
            found[name] = str(refused)
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


# Families of which some results are not written to, and what they say.
NOT_WRITABLE = {"diagonals": "a write to a view by", "attention": "has been modified by an inplace operation"}


@pytest.mark.filterwarnings("ignore")
def test_what_an_op_gives_can_be_written_to() -> None:
    for found in rank_group(2).run(_differences_of_results_written_to, 1, 2, timeout_seconds=250):
        assert len(found) > 130
        refused = {
            name for name, e in found.items() if isinstance(e, str) and NOT_WRITABLE.get(name.split(":")[0], " ") in e
        }
        wrong = {name: e for name, e in found.items() if name not in refused and (isinstance(e, str) or not e <= 1e-9)}
        assert not wrong, wrong


def _looks_at_memory() -> None:
    x = ff.shard(torch.ones(SHAPE), mesh(1, 2))
    looks: list[Callable[[Tensor], Any]] = [
        lambda t: t.as_strided((2,), (1,), 0), lambda t: torch.as_strided(t, (2,), (1,)), Tensor.storage_offset,
        lambda t: t.unsqueeze_(0), lambda t: t.resize_(3), lambda t: setattr(t, "data", t * 2),
    ]  # fmt: skip
    for look in looks:
        with pytest.raises(UnsupportedOp):
            look(x[..., 6])
        look(x[..., 6].clone())


def test_how_a_whole_view_lies_in_its_base_is_not_looked_at() -> None:
    rank_group(2).run(_looks_at_memory)


def _given_other_data() -> None:
    x = ff.shard(torch.ones(SHAPE), mesh(1, 2))
    strip, column, diagonal = x[..., 2:5], x[..., 1], x.diagonal(0, 2, 3)
    x.data = x.data * 2
    x.add_(1)
    assert strip.sum() == strip.numel() and column.sum() == column.numel()  # of the data before, as in torch
    with pytest.raises(UnsupportedOp, match="given other data"):
        diagonal.sum()
    assert x[..., 2:5].sum() == 3 * strip.numel()


def test_a_view_of_what_was_given_other_data_has_the_data_before_or_is_refused() -> None:
    rank_group(2).run(_given_other_data)


def _read_by_contiguous() -> list[bool]:
    x = ff.shard(torch.ones(1, 2, 6, 8, dtype=torch.float64), mesh(1, 2)).requires_grad_()
    parts = [x.flatten()[3:], x[0, 0, 0, 1:], x[0, 0, 0, :1]]  # copies, a whole one among them
    before = x.local._version
    for part in parts:
        assert part.contiguous() is part and part.to(torch.float64) is part
    return [x.local._version == before]


def test_what_returns_its_operand_does_not_write_to_it() -> None:
    assert rank_group(2).run(_read_by_contiguous) == [[True]] * 2


def _several_at_once() -> str:
    x = ff.shard(torch.zeros(SHAPE), mesh(2, 1))
    try:
        torch._foreach_add_(list(x.unbind(2)[:2]), 1.0)
    except UnsupportedOp as refused:
        assert not x.full().any()
        return refused.reason
    return ""


def test_a_write_into_several_copies_is_refused() -> None:
    assert all("writes into several tensors" in reason for reason in rank_group(2).run(_several_at_once))
