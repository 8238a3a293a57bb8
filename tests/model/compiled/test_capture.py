"""What the compiled graphs of all ranks send, read out of the graphs: one order, each message after the one before."""

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.backends import debugging

import fullframe as ff
from fullframe.model.compiled.blocks import CompiledBlocks, Programs
from fullframe.model.compiled.capture import Capture
from fullframe.model.compiled.guard import Guard
from fullframe.ranks.recording import NotCapturable
from tests.model.compiled.test_blocks import Block, Net, Norms, Strided
from tests.rank_group import rank_group

BLOCKS: dict[str, type[Block]] = {"norms": Norms, "strided": Strided}
WITH_A_TAG = {  # where kind and line are
    "exchange": (-2, -1), "post": (-3, -2), "sum": (-1,), "gather": (-2, -1), "share_out": (-1,),
}  # fmt: skip


def operators_of(graph: torch.fx.Graph) -> list[tuple[str, ...]]:
    """The operators of a graph in order, with kind and line; asserts that each takes the token of the one before."""
    found: list[tuple[str, ...]] = []
    before: Any = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        effect = "with_effects" in str(node.target)
        op, args = (node.args[1], node.args[2:]) if effect else (node.target, node.args)
        if getattr(op, "namespace", "") != "fullframe":
            continue
        assert effect, f"{op} could be left out"
        name = op._schema.name.partition("::")[2]
        if before is not None:
            assert comes_from(args[0], before), f"{node} does not wait for {before}"
        before = node
        found.append((name, *(str(args[place]) for place in WITH_A_TAG.get(name, ()))))
    return found


def comes_from(token: Any, node: Any) -> bool:
    """Whether the token was picked from what the node returns."""
    while token.op == "call_function" and "getitem" in str(token.target):
        token = token.args[0]
        if token is node:
            return True
    return False


def graphs(name: str, height: int, width: int) -> list[list[tuple[str, ...]]]:
    """Forward and backward of one block."""
    mesh, kept = ff.init_mesh(height=height, width=width), []
    original = debugging.boxed_nop

    def keeping(module: Any, inputs: Any) -> Any:
        kept.append(operators_of(module.graph))
        return original(module, inputs)

    torch.manual_seed(0)
    net = Net(BLOCKS[name], 1).double()
    model = ff.parallelize(net, mesh)
    CompiledBlocks(net, ["layers.0"], programs := Programs("aot_eager"))
    with mock.patch.object(debugging, "boxed_nop", keeping, create=False) as patched:
        assert patched is keeping
        model(ff.shard(torch.randn(2, 4, 11, 18, dtype=torch.float64), mesh)).sum().backward()
    assert [one.why_not for one in programs.said] == [""]
    return kept


@pytest.mark.parametrize(("name", "height", "width"), [("norms", 1, 2), ("strided", 2, 1)])
def test_all_ranks_send_in_one_order(name: str, height: int, width: int) -> None:
    everyone = rank_group(height * width).run(graphs, name, height, width)
    assert len({str([sent(graph) for graph in one]) for one in everyone}) == 1, everyone
    for forward, backward in everyone:
        assert all("test_blocks.py" in one[-1] for one in forward if one[0] in WITH_A_TAG)
        assert all(one[-1] == "" for one in backward if one[0] in WITH_A_TAG)  # known when it runs
        for graph in (forward, backward):
            names = [one[0] for one in graph]
            assert names.count("post") == names.count("wait") and names.count("post") + names.count("exchange") > 0


def sent(graph: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Where one rank joins what another computes while rows come, it posts and waits by one operator."""
    return [("post" if name == "exchange" else name, *tag) for name, *tag in graph if name != "wait"]


class Odd(nn.Module):
    def forward(self, x: Any) -> Any:
        return {"result": x * 2, "name": object()}


def captured(module: nn.Module, *leaves: Any) -> Any:
    tree = torch.utils._pytree.tree_flatten((leaves, {}))[1]
    return Capture(module.forward, Guard(module), leaves, tree).program("aot_eager", {})


class Scaled(nn.Module):
    """By a tensor that is no buffer."""

    def __init__(self, scale: torch.Tensor):
        super().__init__()
        self.scale = scale

    def forward(self, x: Any) -> Any:
        return x * self.scale


def test_a_constant_is_watched_where_torch_counts_no_write() -> None:
    with torch.inference_mode():
        uncounted = torch.ones(2)
    for scale in (torch.ones(2), uncounted, torch.ones(2, 2).T[1], torch.ones(2, dtype=torch.bfloat16)):
        program = captured(Scaled(scale), torch.ones(2))
        assert program.is_current
        with torch.inference_mode():
            scale.data.add_(1)
        assert not program.is_current
    large = torch.ones(40_000)
    program = captured(Scaled(large), torch.ones(40_000))
    assert program.is_current
    large.data = torch.zeros(40_000)
    assert not program.is_current


def test_what_no_graph_can_hold_is_refused() -> None:
    with pytest.raises(NotCapturable, match="it returns a object"):
        captured(Odd(), torch.ones(2))
    with pytest.raises(NotCapturable, match="it is called with a object"):
        captured(nn.Identity(), torch.ones(2), object())
    conjugated = torch.ones(2, dtype=torch.complex64).conj()
    for x in (conjugated, conjugated.imag):
        with pytest.raises(NotCapturable, match="a tensor that is conjugated or negated when it is read"):
            captured(nn.Identity(), x)
    shares = nn.BatchNorm1d(2)
    shares.running_var = shares.running_mean.view(2)  # type: ignore[union-attr]
    with pytest.raises(NotCapturable, match="a buffer of it shares memory"):
        captured(shares, torch.ones(2, 2))
    sparse = nn.Linear(2, 2)
    sparse.weight = nn.Parameter(torch.ones(2, 2).to_sparse())
    with pytest.raises(NotCapturable, match=r"a parameter that is torch\.sparse_coo"):
        captured(sparse, torch.ones(2, 2))


def test_a_program_does_not_keep_what_it_was_captured_with() -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GELU())
    CompiledBlocks(net := nn.Sequential(block), ["0"], Programs("aot_eager"))
    first = torch.randn(1, 4, 8, 8) * 2
    kept = weakref.ref(first.untyped_storage())
    net(first).sum().backward()
    del first
    assert kept() is None
