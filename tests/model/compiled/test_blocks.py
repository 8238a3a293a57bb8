"""Compiled blocks give the numbers of one process, or run as they are and say so.

The graphs are those that inductor gets, run op by op ("aot_eager"), as its compiler takes seconds for each; one case
goes through inductor.
"""

import itertools
import math
import random
import warnings
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import compile_compatible_method_lru_cache

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.model.compiled.blocks import CompiledBlocks, Programs, compiled_blocks
from fullframe.model.forward_patch import restore
from tests.rank_group import rank_group

SHAPE = (2, 4, 9, 15)
OUTSIDE = torch.ones(1, dtype=torch.float64)
FACTOR = 2.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Any) -> Any:
        return F.gelu(self.convolution(x)) + self.linear(x)


class Net(nn.Module):
    """Two equal blocks; of several results all go on."""

    def __init__(self, block: Callable[[], nn.Module], count: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, dict):
                assert x["columns"] == SHAPE[-1]
                x = x["result"] + x["same"] * x["mean"] + x.get("input", 0.0)
        return x


class Norms(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch, self.group, self.instance = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Any) -> Any:
        return self.instance(self.group(F.relu(self.batch(super().forward(x)), inplace=True)))


class Strided(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1)

    def forward(self, x: Any) -> Any:
        small = F.max_pool2d(self.down(x), 3, 2, 1)
        made = F.interpolate(self.up(small), size=x.shape[-2:], mode="bilinear")
        return made + x * x.mean((2, 3), keepdim=True) + x.flip(-1)[..., 1:].sum(-1, keepdim=True)


class Attention(Block):
    def forward(self, x: Any) -> Any:
        tokens = self.linear(x).flatten(2).transpose(1, 2)
        out = F.scaled_dot_product_attention(tokens, tokens, tokens)
        return F.layer_norm(out, (4,)).transpose(1, 2).unflatten(2, x.shape[-2:])


class Writes(Block):
    def forward(self, x: Any) -> Any:
        x.mul_(1.5)
        x[..., 2:5] += 1.0
        return super().forward(F.relu_(x))


class WritesAround(Block):
    """By a dropout that drops nothing, which AOTAutograd takes for a copy."""

    def forward(self, x: Any) -> Any:
        factor = torch.zeros(1, 4, 1, 1, dtype=torch.float64)
        F.dropout(factor, 0.5, training=False).add_(1.5)
        return super().forward(x * factor)


class WritesToWindows(Block):
    """What is in no window becomes 0 by AOTAutograd."""

    def forward(self, x: Any) -> Any:
        x = x * 1
        x.unfold(1, 1, 2).mul_(0.5)
        return super().forward(x)


class Returns(Block):
    def forward(self, x: Any) -> Any:
        result = super().forward(x)
        return {"result": result, "same": result, "input": x.detach(), "columns": x.shape[-1], "mean": result.mean()}


class Draws(Block):
    """Whole numbers, equal on all ranks: those of one process."""

    def forward(self, x: Any) -> Any:
        kept = torch.floor(torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype) + 0.5)
        noise = torch.randn(1, dtype=x.dtype) + torch.empty(1, dtype=x.dtype).bernoulli_(0.3)
        return super().forward(x) * kept + noise + torch.randint(3, (1,)) * torch.randperm(4).view(1, 4, 1, 1)


class Dropout(Block):
    def forward(self, x: Any) -> Any:
        return F.dropout(super().forward(x), 0.3) + F.dropout2d(F.dropout(x, 0.5), 0.4)


class WithFlag(Block):
    def __init__(self) -> None:
        super().__init__()
        self.flags, self.flag = [1.0], 1.0

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.flag * self.flags[0] * FACTOR


class OnData(Block):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return y * 2 if y.mean() > 0 else y * 3


class Counts(Block):
    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return super().forward(x) * self.calls


class Appends(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Any) -> Any:
        self.seen.append(1)
        return super().forward(x) * len(self.seen)


class PythonRandom(Block):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * (1 + random.random())


class Hooked(Block):
    def forward(self, x: Any) -> Any:
        y = self.convolution(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y + self.linear(x)


class Recomputes(Block):
    def forward(self, x: Any) -> Any:
        return checkpoint(lambda x: F.dropout(self.convolution(x), 0.3), x, use_reentrant=False) + self.linear(x)


class Apart(Block):
    """One result, of other parameters, is never used: they get no gradient."""

    def forward(self, x: Any) -> Any:
        return {"result": self.convolution(x), "unused": self.linear(x), "columns": SHAPE[-1], "same": 0.0, "mean": 0.0}


class Outside(Block):
    """Reads a tensor that is none of its own, and changes."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * OUTSIDE


SLOPE, GRIDS, CALLS = {"slope": 1.0}, {}, [0]  # type: ignore[var-annotated]


def sloped(x: Any) -> Any:
    return x * SLOPE["slope"]


class CallsAFunction(Block):
    """Which reads a table that changes."""

    def forward(self, x: Any) -> Any:
        return sloped(super().forward(x))


def counted(x: Any) -> Any:
    CALLS[0] += 1
    return x * 2.0


class CountsOutside(Block):
    def forward(self, x: Any) -> Any:
        return counted(super().forward(x))


def grid(columns: int) -> Tensor:
    """Made once; what a capture makes must not stay."""
    if columns not in GRIDS:
        GRIDS[columns] = torch.full((1, 4, 1, 1), 1.0 / columns, dtype=torch.float64)
    return GRIDS[columns]


class KeepsOutside(Block):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * grid(x.shape[-1])


@lru_cache
def remembered_grid(columns: int) -> Tensor:
    return torch.full((1, 4, 1, 1), 1.0 / columns, dtype=torch.float64)


class Remembers(Block):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * remembered_grid(x.shape[-1])


@compile_compatible_method_lru_cache(maxsize=8)  # whose cache only a library's function knows, as DINOv3's
def grid_of_a_library(columns: int) -> Tensor:
    return torch.full((1, 4, 1, 1), 1.0 / columns, dtype=torch.float64)


class RemembersInALibrary(Block):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * grid_of_a_library(x.shape[-1])


class KeepsInConfiguration(Block):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(grid=None)

    def forward(self, x: Any) -> Any:
        if self.config.grid is None:
            self.config.grid = torch.full((1, 4, 1, 1), 1.0 / x.shape[-1], dtype=torch.float64)
        return super().forward(x) * self.config.grid


def flags_change(model: Net, step: int) -> None:
    SLOPE["slope"] = 1.0 + (step // 2)
    for layer in model.layers:
        if isinstance(layer, WithFlag):
            layer.flag, layer.flags[0] = 1.0 + (step // 2), 2.0 if step == 3 else 1.0


# name: (block, why it runs as it is)
CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "plain": (Block, ""),
    "norms": (Norms, ""),
    "all of a model": (Norms, ""),
    "strided": (Strided, ""),
    "attention": (Attention, ""),
    "writes to its input": (Writes, ""),
    "writes around": (WritesAround, ""),
    "writes to windows": (WritesToWindows, "it writes to windows of unfold"),
    "returns its input and numbers": (Returns, ""),
    "draws whole numbers": (Draws, ""),
    "dropout": (Dropout, ""),
    "an attribute that changes": (WithFlag, ""),
    "a tensor of no module": (Outside, ""),
    "a table of a function": (CallsAFunction, ""),
    "results apart": (Apart, ""),
    "by data": (OnData, "it looks at numbers in a tensor, at compiled/test_blocks.py:"),
    "counts": (Counts, "it changes its attribute calls"),
    "counts outside": (CountsOutside, "it changes its global CALLS"),
    "appends": (Appends, "it changes its attribute seen"),
    "random": (PythonRandom, "draws random numbers in Python"),
    "hook on a tensor": (Hooked, "it calls register_hook"),
    "recomputes": (Recomputes, "it recomputes something inside"),
}
STEPS = 4


def built(block: Callable[[], nn.Module]) -> Net:
    torch.manual_seed(0)
    return Net(block).double()


def trained(net: Net, model: nn.Module, x: Tensor) -> list[float]:
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        random.seed(step)
        OUTSIDE.fill_(1.0 + step // 2)
        flags_change(net, step)
        loss = model(x).square().mean()
        loss.backward()
        losses.append(float(loss))
        with torch.no_grad():  # a step of SGD
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    return losses


def gap(a: Net, b: Net) -> float:
    """Between parameters, gradients and buffers, relative to the largest element."""
    worst = 0.0
    for p, q in zip((*a.parameters(), *a.buffers()), (*b.parameters(), *b.buffers()), strict=True):
        grads = [(p.grad, q.grad)] if p.grad is not None and q.grad is not None else []
        if (p.grad is None) != (q.grad is None):
            return float("inf")
        for one, other in [(p, q), *grads]:
            worst = max(worst, float((one - other).abs().max() / one.abs().max().clamp_min(1e-6)))
    return worst


def compared(name: str, height: int, width: int, backend: str = "aot_eager", as_it_is: int = -1) -> Any:
    """How far it is from one process (from the block as it is, where parts are drawn), and what is said.

    Blocks of rank `as_it_is` are not compiled.
    """
    mesh = ff.init_mesh(height=height, width=width)
    block = CASES[name][0]
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    here, there = built(block), built(block)
    programs = Programs(backend)
    parallel = ff.parallelize(there, mesh, find_unused_parameters=True)
    if dist.get_rank() != as_it_is:
        CompiledBlocks(there, [""] if name == "all of a model" else ["layers.0", "layers.1"], programs)
    if name in ("dropout", "recomputes"):
        expected = trained(here, ff.parallelize(here, mesh), ff.shard(whole, mesh))
    else:
        expected = trained(here, here, whole)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = trained(there, parallel, ff.shard(whole, mesh))
    distance = max([gap(here, there), *(abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True))])
    whys = [one.why_not for one in programs.said]
    return distance, whys, [str(w.message) for w in said if "not compiled" in str(w.message)]


SLOW = ("attention", "draws whole numbers", "returns its input and numbers", "recomputes", "appends")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_a_compiled_block_gives_one_process_numbers_or_says_why_not(name: str) -> None:
    why = CASES[name][1]
    for rank, (distance, whys, said) in enumerate(rank_group(2).run(compared, name, 1, 2)):
        assert distance < 1e-9, (distance, whys)
        assert whys
        if not why:
            assert not any(whys) and not said, whys
            continue
        assert all(whys) and why in whys[0], whys
        assert bool(said) is (rank == 0)
        assert all("layers." in line for line in said) and len(said) <= 2


ELSEWHERE = [("norms", 2, 1), *(pytest.param("strided", n, n, marks=pytest.mark.slow) for n in (1, 2))]


@pytest.mark.parametrize(("name", "height", "width"), ELSEWHERE)
def test_on_other_meshes(name: str, height: int, width: int) -> None:
    for distance, whys, _ in rank_group(height * width).run(compared, name, height, width):
        assert distance < 1e-9 and whys and not any(whys), (distance, whys)


def test_a_rank_whose_blocks_run_as_they_are_sends_the_same_messages() -> None:
    """Heads are compared at every message: equal lines, shapes, dtypes, rows."""
    (distance, whys, _), (other, none, _) = rank_group(2).run(compared, "strided", 1, 2, "aot_eager", 1)
    assert max(distance, other) < 1e-9 and not any(whys) and not none


def leaf_gradients() -> list[Tensor]:
    """Of a split leaf that goes right into a block: as it is, and compiled."""
    mesh, found = ff.init_mesh(width=2), []
    for compiled in (False, True):
        block = built(Block)
        ff.parallelize(block, mesh)
        if compiled:
            CompiledBlocks(block, ["layers.0"], programs := Programs("aot_eager"))
        x = ff.shard(torch.ones(SHAPE, dtype=torch.float64), mesh).requires_grad_()
        block.layers[0](x).square().mean().backward()
        assert isinstance(x.grad, ff.SpatialTensor)
        found.append(x.grad.full())
    assert [one.why_not for one in programs.said] == [""]
    return found


def test_a_leaf_that_goes_into_a_block_gets_its_gradient() -> None:
    for expected, found in rank_group(2).run(leaf_gradients):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Scheduled(Block):
    rate = 0.0

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.rate


def scheduled() -> tuple[list[float], str, int]:
    mesh, net, x = ff.init_mesh(width=2), built(Scheduled), torch.ones(SHAPE, dtype=torch.float64)
    model = ff.parallelize(net, mesh)
    compiled = CompiledBlocks(net, ["layers.1"], Programs("aot_eager"))
    found = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for step in range(11):
            net.layers[0].rate = net.layers[1].rate = 1.0 + step  # type: ignore[assignment]
            found.append(float(model(ff.shard(x, mesh)).mean() / (1.0 + step) ** 2))
    return found, compiled.summary, len(compiled.programs.said)


def test_what_changes_at_every_step_is_captured_a_few_times_and_then_left_as_it_is() -> None:
    for _, summary, said in rank_group(2).run(scheduled):
        assert summary.startswith("0 of 1 blocks are compiled (8 programs, made in")
        assert "layers.1 is not: what it depends on has changed 8 times" in summary
        assert said == 9  # the reason once, however often it is called


class Settles(Block):
    """Takes its window from the first map that it sees."""

    window = 0

    def forward(self, x: Any) -> Any:
        self.window = min(x.shape[-2:])
        return super().forward(x) / self.window


def settled(block: Callable[[], nn.Module]) -> tuple[list[float], str, list[str]]:
    mesh, net, x = ff.init_mesh(width=2), built(block), torch.ones(SHAPE, dtype=torch.float64)
    expected = float(net(x).mean())
    net = built(block)
    GRIDS.clear()
    in_library = [cell.cell_contents for cell in grid_of_a_library.__closure__]
    for cache in (remembered_grid, *(each for each in in_library if hasattr(each, "cache_clear"))):
        cache.cache_clear()
    model = ff.parallelize(net, mesh)
    compiled = CompiledBlocks(net, ["layers.0", "layers.1"], Programs("aot_eager"))
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        found = [float(model(ff.shard(x, mesh)).mean()) - expected for _ in range(3)]
    return found, compiled.summary, [str(w.message) for w in said if "not compiled" in str(w.message)]


@pytest.mark.parametrize("block", [Settles, KeepsOutside, Remembers, RemembersInALibrary, KeepsInConfiguration])
def test_a_block_that_settles_at_its_first_call_is_compiled_at_the_second(block: Callable[[], nn.Module]) -> None:
    for differences, summary, warned in rank_group(2).run(settled, block):
        assert max(map(abs, differences)) < 1e-12 and not warned
        programs = 2 if block is KeepsInConfiguration else 1  # each has a tensor of its own
        assert summary.startswith(f"2 of 2 blocks are compiled ({programs} programs, made in"), summary


@pytest.mark.slow
def test_inductor_compiles_a_block() -> None:
    for distance, whys, _ in rank_group(2).run(compared, "plain", 1, 2, "inductor", timeout_seconds=280):
        assert distance < 1e-9 and whys and not any(whys), (distance, whys)


def mixed(steps: int) -> list[float]:
    """Largest differences of losses and gradients in bfloat16: compiled blocks from blocks as they are."""
    mesh, results = ff.init_mesh(width=2), []
    for compiled in (False, True):
        net = built(Norms).float()
        model = ff.parallelize(net, mesh)
        if compiled:
            CompiledBlocks(net, ["layers.0", "layers.1"], programs := Programs("aot_eager"))
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7))
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ff.shard(x, mesh)).square().mean()
            loss.backward()
        with torch.no_grad():
            evaluated = model.eval()(ff.shard(x, mesh)).full()
        results.append([loss.detach(), evaluated, *(p.grad for p in net.parameters())])
    assert programs.said and not any(one.why_not for one in programs.said), programs.said
    return [float((a - b).norm() / a.norm().clamp_min(1e-3)) for a, b in zip(*results, strict=True)]


def test_under_autocast_as_the_block_as_it_is() -> None:
    for found in rank_group(2).run(mixed, 2):
        assert max(found) < 2e-2, found


class DrawsByItself(Block):
    """Stochastic depth by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.calls = np.random.default_rng(0), itertools.count(1)

    def forward(self, x: Any) -> Any:
        return super().forward(x) * (self.rng.random() + next(self.calls))


class CountsInATensor(Block):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, x: Any) -> Any:
        self.count += 1
        return super().forward(x) * self.count


class KeepsTheLast(Block):
    """Results of earlier calls, in what holds two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[Tensor] = deque(maxlen=2)

    def forward(self, x: Any) -> Any:
        result = super().forward(x)
        self.last.append(result.detach())
        return result + sum(self.last)


class Negates(Block):
    """By the sign of a zero."""

    shift = 0.0

    def forward(self, x: Any) -> Any:
        return super().forward(x) * math.copysign(1.0, self.shift)


class Clips(Block):
    def forward(self, x: Any) -> Any:
        self.linear.weight.data = self.linear.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


AS_THEY_ARE: dict[type[Block], str] = {
    DrawsByItself: "its attribute rng is or holds a Generator, which may change unseen",
    CountsInATensor: "it writes to a tensor that is none of its parameters and buffers",
    KeepsTheLast: "it changes its attribute last",
    Clips: "it reads or sets data of a tensor",
    Negates: "",
}


@pytest.mark.filterwarnings("ignore:.*is not compiled")
@pytest.mark.parametrize("block", AS_THEY_ARE)
def test_what_a_call_leaves_behind_is_left_once_a_call(block: type[Block]) -> None:
    found, x = [], torch.randn(SHAPE, dtype=torch.float64)
    for compiled in (False, True):
        net = built(block)
        if compiled:
            blocks = CompiledBlocks(net, ["layers.0", "layers.1"], Programs("aot_eager"))
        for step in range(3):
            net.layers[0].shift = -0.0 if step == 1 else 0.0  # type: ignore[assignment]
            net(x).square().mean().backward()
            found.append(net.scale.grad.clone())  # type: ignore[union-attr]
    torch.testing.assert_close(found[3:], found[:3], rtol=1e-12, atol=1e-14)
    assert AS_THEY_ARE[block] in blocks.summary


class Takes(nn.Module):
    def forward(self, x: Tensor, what: Any) -> Tensor:
        return x if what is None or not isinstance(what, Tensor) else x + what.to_dense()


def test_what_a_program_cannot_take_is_said_once_and_nothing_is_kept_of_it() -> None:
    model = nn.Sequential(Takes())
    compiled = CompiledBlocks(model, ["0"], Programs("aot_eager"))
    with pytest.warns(UserWarning, match="0 is not compiled and runs as it is: it is called with a object"):
        for _ in range(3):
            assert float(model[0](torch.ones(2), object()).sum()) == 2.0
    assert not compiled.programs.made and len(compiled.programs.said) == 1
    assert compiled.summary == "0 of 1 blocks are compiled; 0 is not: it is called with a object"
    with pytest.warns(UserWarning, match=r"it is called with a tensor that is torch\.sparse_coo"):
        for _ in range(3):
            assert float(model[0](torch.ones(2), torch.ones(2).to_sparse()).sum()) == 4.0
    assert len(compiled.programs.made) == 1 and len(compiled.programs.said) == 2


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(StrategyError, match="Linear has no repeated blocks"):
        compiled_blocks(nn.Linear(2, 2), True)
    with pytest.raises(StrategyError, match="compile names 'stem', which no module of Net matches"):
        compiled_blocks(Net(Block), ["stem"])
    with pytest.raises(StrategyError, match="compile is 'layers'; give True"):
        compiled_blocks(Net(Block), "layers")


def test_named_modules_are_compiled_and_restored() -> None:
    net = Net(Block)
    blocks = compiled_blocks(net, ["layers.1"])
    assert blocks.names == ("layers.1",) and "forward" in vars(net.layers[1]) and "forward" not in vars(net.layers[0])
    restore(net)
    assert "forward" not in vars(net.layers[1])
