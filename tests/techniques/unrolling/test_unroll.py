"""Unrolled iterations have the plain loop's results, gradients, statistics and draws, whatever is kept and wherever."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import DeviceError, GradientError, ShapeError, StrategyError
from fullframe.techniques.unrolling.schedules import extra_runs
from fullframe.techniques.unrolling.unroll import unroll
from tests.rank_group import rank_group

ITERATIONS = 14
STATE_BYTES = 2 * (2 * 3 * 7 * 9) * 8  # two parts of a state, whole; a rank's is smaller
KINDS: tuple[Any, ...] = ("none", True, "nested", 5 * STATE_BYTES, STATE_BYTES)
MESHES = ((1, 2), (2, 1), (2, 2), (1, 3))


class Block(nn.Module):
    """A learned step; its buffer counts the calls and has a say in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.3)
        self.register_buffer("pace", torch.ones(()))
        self.pace: Tensor

    def forward(self, state: Any, measured: Tensor) -> Any:
        x, momentum = state["x"], state["momentum"]
        self.pace = self.pace * 0.95
        momentum = 0.5 * momentum + self.dropout(self.norm(self.conv(x - measured)))
        return {"x": x + self.pace * torch.tanh(momentum), "momentum": momentum}


class Loop(nn.Module):
    """What a script has in place of `unroll`."""

    def __init__(self, block: Any):
        super().__init__()
        self.block = block

    def forward(self, state: Any, measured: Tensor) -> list[Any]:
        states = []
        for number in range(ITERATIONS):
            block = self.block[number] if isinstance(self.block, nn.ModuleList) else self.block
            state = block(state, measured)
            states.append(state)
        return states


def blocks(own: bool) -> Any:
    torch.manual_seed(1)
    return nn.ModuleList(Block() for _ in range(ITERATIONS)).double() if own else Block().double()


def step(model: Callable[..., Any], place: Callable[[Tensor], Tensor] = lambda whole: whole) -> dict[str, Any]:
    """One step's losses on all iterates or the last; gradients of leaves are as `.grad` has them."""
    torch.manual_seed(2)
    start, measured = (torch.randn(2, 3, 7, 9, dtype=torch.float64) for _ in range(2))
    x, measured = (place(t).requires_grad_() for t in (start, measured))
    torch.manual_seed(3)
    found = model({"x": x, "momentum": x * 0}, measured)
    states = found if isinstance(found, list) else [found]
    loss = sum(((number + 1) * state["x"].square().mean() for number, state in enumerate(states)), torch.zeros(()))
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {"x": x.grad, "measured": measured.grad}
    return {"loss": loss.detach(), "random": torch.rand(3), **grads}


def compared(model: nn.Module, of_model: dict[str, Any], loop: nn.Module, of_loop: dict[str, Any]) -> float:
    """The largest difference, of results, gradients, buffers and the random numbers that come next."""
    ours = [*of_model.values(), *(p.grad for p in model.parameters()), *model.buffers()]
    theirs = [*of_loop.values(), *(p.grad for p in loop.parameters()), *loop.buffers()]
    assert len(ours) == len(theirs)
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("placement", ["here", ("cpu", "cpu")], ids=str)
@pytest.mark.parametrize("all_states", [False, True], ids=["last", "all"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_plain_loop_s_numbers(kind: Any, all_states: bool, placement: Any, own: bool) -> None:
    loop = Loop(blocks(own))
    model = unroll(blocks(own), ITERATIONS, recompute=kind, placement=placement, return_all=all_states)
    wanted = step(loop if all_states else lambda *args: loop(*args)[-1])
    assert compared(model, step(model), loop, wanted) < 1e-12


def _split(height: int, width: int, kind: Any) -> float:
    mesh = ff.init_mesh(height, width)
    loop, block = Loop(blocks(False).eval()), blocks(False).eval()  # dropout of a part draws its own numbers
    loop.block.norm.train(), block.norm.train()
    all_states = isinstance(kind, (str, bool))  # a budget counts where the last is kept alone
    model = ff.parallelize(unroll(block, ITERATIONS, recompute=kind, return_all=all_states), mesh)

    wanted = step(loop if all_states else lambda *args: loop(*args)[-1])
    found = step(model, lambda t: ff.shard(t, mesh))
    found |= {name: found[name].full() for name in ("x", "measured")}
    return compared(model, found, loop, wanted)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_split_over_ranks(mesh: tuple[int, int]) -> None:
    group = rank_group(mesh[0] * mesh[1])
    for kind in KINDS:
        assert max(group.run(_split, *mesh, kind)) < 1e-10, kind


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.runs = nn.Parameter(torch.ones(3)), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.runs[0] += 1
        return torch.sin(x * self.weight)


@pytest.mark.parametrize("states", [1, 2, 3, 8])
def test_a_budget_runs_again_what_theory_says(states: int) -> None:
    block = Counting()
    unroll(block, 20, recompute=states * 12 + 5)(torch.ones(3)).sum().backward()
    assert block.runs[0] == 20 + extra_runs(20, states)


def test_in_evaluation_nothing_is_kept() -> None:
    block = Counting()
    with torch.no_grad():
        result = unroll(block, 5, recompute=True)(torch.ones(3))
    assert block.runs[0] == 5 and not result.requires_grad


def test_parameters_are_the_block_s() -> None:
    block = Counting()
    assert list(unroll(block, 3).state_dict()) == ["block.weight"]
    twice = copy.deepcopy(unroll(block, 3, recompute=True))
    twice(torch.ones(3)).sum().backward()
    assert block.weight.grad is None and twice.block.weight.grad is not None


class Changing(nn.Module):
    """Goes wrong in a way."""

    def __init__(self, way: str):
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.ones(())), way

    def forward(self, state: Any) -> Any:
        if self.way == "shape":
            return state[..., 1:] * self.weight
        if self.way == "parts":
            return state, state
        return state.add_(self.weight)


def test_a_state_that_changes_its_form() -> None:
    with pytest.raises(
        ShapeError, match=r"iteration 0 of Changing got a state of shape \(2, 5\) and returned shape \(2, 4\)"
    ):
        unroll(Changing("shape"), 3)(torch.ones(2, 5))
    with pytest.raises(ShapeError, match="returned 2 parts"):
        unroll(Changing("parts"), 3)(torch.ones(2, 5))


class Turning(nn.Module):
    """Returns its state's parts in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 0.7], dtype=torch.float64))

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x, memory = torch.sin(state["x"] * self.weight), state["memory"] + state["x"]
        return dict(reversed({**state, "x": x, "memory": memory}.items()))


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_parts_of_a_state_come_back_in_any_order(kind: Any) -> None:
    block, x = Turning(), torch.ones(2, dtype=torch.float64)
    given = state = {"x": x, "memory": x * 0}
    for _ in range(5):
        state = block(state)
    (wanted,) = torch.autograd.grad(state["memory"].prod(), block.weight)
    found = unroll(block, 5, recompute=kind)(given)
    assert list(found) == list(state)
    found["memory"].prod().backward()
    torch.testing.assert_close(block.weight.grad, wanted, rtol=1e-12, atol=0)


def test_without_gradients_a_state_may_hang_on_a_freed_graph() -> None:
    run = unroll(nn.Linear(3, 3), 4)
    state = run(torch.ones(2, 3))
    state.square().sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(run(state), run(state.detach()), rtol=0, atol=0)


def test_a_state_that_is_written_to_is_not_run_again() -> None:
    with pytest.raises(StrategyError, match=r"iteration 0 of Changing writes to its input.*state = state \+ step"):
        unroll(Changing("in place"), 3, recompute=True)(torch.ones(2, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"iterations": 0}, "iterations must be a whole number >= 1"),
        ({"iterations": 3, "recompute": "some"}, "recompute must be one of none, iterations, nested"),
        ({"iterations": 3, "recompute": 0}, "budget in bytes"),
        ({"iterations": 3, "placement": "there"}, "placement must be"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        unroll(Counting(), **options)


def test_as_many_blocks_as_iterations() -> None:
    with pytest.raises(StrategyError, match="2 blocks for 3 iterations"):
        unroll([Counting(), Counting()], 3)


def test_a_budget_for_less_than_a_state() -> None:
    with pytest.raises(StrategyError, match="does not hold one state, which has 12"):
        unroll(Counting(), 3, recompute=11)(torch.ones(3))


def test_a_state_on_another_device() -> None:
    with pytest.raises(DeviceError, match="the state is on meta and the weights of Counting on cpu"):
        unroll(Counting(), 3)(torch.ones(3, device="meta"))


def test_a_second_backward_through_the_first_call() -> None:
    model = unroll(Counting(), 3)
    state = model(torch.ones(3))
    state.sum().backward()
    with pytest.raises(GradientError, match=r"an earlier call at .*test_unroll\.py:\d+.*state\.detach\(\)"):
        model(state * 2)
    model(state.detach()).sum().backward()
    once = model(torch.ones(3))
    (once.sum() + model(once * 2).sum()).backward()  # one graph over two calls
    kept = model(torch.ones(3))
    kept.sum().backward(retain_graph=True)
    model(kept).sum().backward()


class Counted(nn.Module):
    """The entries of a list say which iteration it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.seen = nn.Conv2d(2, 2, 3, padding=1), list[int]()

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        self.seen.append(0)
        return torch.tanh(self.conv(state) * len(self.seen))


@pytest.mark.parametrize("recompute", [True, "nested", 2 * 2 * 5 * 5 * 4])
def test_what_an_iteration_that_is_run_again_does_not_find_as_it_was_is_refused(recompute):
    blocks = [nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh()) for _ in range(4)]
    loss = ff.unroll(blocks, 4, recompute=recompute)(torch.ones(1, 2, 5, 5)).sum()
    with torch.no_grad():
        for block in blocks[:3]:
            block[0].bias.add_(1)
    with pytest.raises(StrategyError, match=r"reads its parameter blocks.*bias, which was written to after its"):
        loss.backward()
    loss = ff.unroll(Counted(), 4, recompute=recompute)(torch.ones(1, 2, 5, 5)).sum()
    with pytest.raises(StrategyError, match=r"Counted had another result .* or give its ff.unroll recompute=.none."):
        loss.backward()
