"""Parts on several stages have the plain loop's results, gradients, statistics and draws."""

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fullframe as ff
from fullframe.ranks.mesh import Axis, drawn_seed
from fullframe.ranks.randomness import kept_random_state, mixed_seed, seed_everything
from fullframe.simulation.fake.replaced import replaced
from fullframe.techniques.stages import through
from fullframe.techniques.stages.chain import Stages
from fullframe.techniques.stages.through import through_stages
from tests.rank_group import RankFailure, rank_group

ITERATIONS = 14
MESHES = ({"stages": 2}, {"stages": 3}, {"stages": 4}, {"stages": 2, "width": 2}, {"stages": 2, "height": 2})


class Block(nn.Module):
    """A learned step; with a pace, its buffer counts the calls and has a say in the result."""

    def __init__(self, paced: bool, momentum: float | None) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, momentum=momentum)
        self.dropout = nn.Dropout(0.3)
        self.paced = paced
        self.register_buffer("pace", torch.ones(()))
        self.pace: Tensor

    def forward(self, state: Any, measured: Tensor) -> Any:
        x, momentum = state["x"], state["momentum"]
        if self.paced:
            self.pace = self.pace * 0.95
        momentum = 0.5 * momentum + self.dropout(self.norm(self.conv(x - measured)))
        return {"x": x + self.pace * torch.tanh(momentum), "momentum": momentum}


class Model(nn.Module):
    """The iterations, between what comes before and after them."""

    def __init__(self, run: nn.Module):
        super().__init__()
        torch.manual_seed(5)
        self.before, self.run, self.after = nn.Conv2d(3, 3, 1), run, nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor, measured: Tensor) -> list[Tensor]:
        states = self.run({"x": self.before(x), "momentum": x * 0}, measured)
        return [self.after(state["x"]) for state in (states if isinstance(states, list) else [states])]


class Loop(nn.Module):
    """What one process does with the same microbatches, one after another."""

    def __init__(self, block: Any, microbatches: int, all_states: bool):
        super().__init__()
        self.block, self.microbatches, self.all_states = block, microbatches, all_states

    def forward(self, state: Any, measured: Tensor) -> Any:
        if self.microbatches == 1:
            return self.one(state, measured, lambda number: None)
        base, pieces = drawn_seed(), []
        with kept_random_state():
            for m in range(self.microbatches):
                part: Any = tree_map(lambda t, m=m: t.chunk(self.microbatches)[m], (state, measured))
                pieces.append(self.one(*part, lambda number, m=m: seed_everything(mixed_seed(base, m, number))))
        return tree_map(lambda *parts: torch.cat(parts), *pieces)

    def one(self, state: Any, measured: Tensor, before: Callable[[int], None]) -> Any:
        states = []
        for number in range(ITERATIONS):
            before(number)
            block = self.block[number] if isinstance(self.block, nn.ModuleList) else self.block
            state = block(state, measured)
            states.append(state)
        return states if self.all_states else states[-1]


def blocks(own: bool, paced: bool = True, momentum: float | None = 0.1, drops: bool = True) -> Any:
    torch.manual_seed(1)
    made = [Block(paced, momentum).double() for _ in range(ITERATIONS if own else 1)]
    for block in made:
        block.dropout.train(drops)
    return nn.ModuleList(made) if own else made[0]


def step(model: nn.Module, place: Callable[[Tensor], Tensor] = lambda whole: whole) -> dict[str, Tensor]:
    """One step's losses on all iterates or the last; gradients of leaves are as `.grad` has them."""
    torch.manual_seed(2)
    start, measured = (torch.randn(4, 3, 6, 7, dtype=torch.float64) for _ in range(2))
    x, measured = (place(t).requires_grad_() for t in (start, measured))
    torch.manual_seed(3)
    loss = torch.zeros((), dtype=torch.float64)
    for number, found in enumerate(model(x, measured)):
        loss = loss + (number + 1) * found.square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": loss.detach(), "random": torch.rand(3), "x": x.grad, "measured": measured.grad}  # type: ignore[dict-item]


def difference(model: nn.Module, found: dict[str, Any], loop: nn.Module, wanted: dict[str, Tensor]) -> float:
    """The largest one, of results, gradients, buffers and the random numbers that come next."""
    ours = [*found.values(), *(p.grad for p in model.parameters()), *model.buffers()]
    theirs = [*wanted.values(), *(p.grad for p in loop.parameters()), *loop.buffers()]
    assert len(ours) == len(theirs)
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def compared(axes: dict[str, int], own: bool, microbatches: int, all_states: bool, recompute: Any) -> float:
    mesh, split = ff.init_mesh(**axes), len(axes) > 1
    paced, drops = own or microbatches == 1, not split  # dropout of a split tensor draws its own numbers
    momentum = None if microbatches == 2 else 0.1
    made = blocks(own, paced, momentum, drops)
    loop = Model(Loop(copy.deepcopy(made), microbatches, all_states)).double()
    run = ff.unroll(
        made,
        ITERATIONS,
        recompute=recompute,
        placement="stages",
        mesh=mesh,
        microbatches=microbatches,
        return_all=all_states,
    )
    wanted = step(loop)
    model = ff.parallelize(Model(run).double(), mesh)
    found: dict[str, Any] = step(model, (lambda t: ff.shard(t, mesh)) if split else lambda t: t)
    if split:
        found |= {name: found[name].full() for name in ("x", "measured")}
    return difference(model, found, loop, wanted)


def dropped(own: bool, microbatches: int) -> float:
    """Dropout and batch norm on 2 stages of images split in two, against the plain loop on images split in two.

    Of split images each part draws its own numbers, so one process has others; stages must change none of them. The
    loop runs on two replicas with the same samples.
    """
    both, split = ff.init_mesh(stages=2, width=2), ff.init_mesh(width=2)
    made = blocks(own, paced=own or microbatches == 1)
    loop = Model(Loop(copy.deepcopy(made), microbatches, False)).double()
    run = ff.unroll(made, ITERATIONS, placement="stages", mesh=both, microbatches=microbatches)
    model = Model(run).double()
    wanted: dict[str, Any] = step(ff.parallelize(loop, split), lambda t: ff.shard(t, split))
    found: dict[str, Any] = step(ff.parallelize(model, both), lambda t: ff.shard(t, both))
    for numbers in (wanted, found):
        numbers |= {name: numbers[name].full() for name in ("x", "measured")}
    assert any(module.training and isinstance(module, nn.Dropout) for module in model.modules())
    return difference(model, found, loop, wanted)


@pytest.mark.parametrize(("own", "microbatches"), [(False, 1), (True, 1), (True, 2), (False, 4)])
def test_dropout_and_batch_norm_on_stages_of_split_images(own: bool, microbatches: int) -> None:
    assert max(rank_group(4).run(dropped, own, microbatches)) < 1e-10


def messages(size: int) -> list[tuple[str, int]]:
    """What this stage sends to and receives from others of a loss inside the call, in order."""
    mesh, said = ff.init_mesh(stages=size), list[tuple[str, int]]()

    def noting(name: str) -> Callable[..., Any]:
        known = getattr(through, name)

        def noted(axis: Axis, peer: int, *args: Any) -> Any:
            said.append((name.partition("_")[0], peer))
            return known(axis, peer, *args)

        return noted

    names = ("send", "send_object", "send_some", "receive", "receive_object", "receive_some")
    with ExitStack() as changes:
        for name in names:
            changes.enter_context(replaced(through, name, noting(name)))
        run = ff.unroll(nn.Linear(3, 3), 6, placement="stages", mesh=mesh, microbatches=4)
        run.loss(Tensor.sum, (), torch.ones(4, 3)).backward()
    return said


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_send_in_the_order_in_which_others_receive(stages: int) -> None:
    """Each rank's messages by NCCL wait for those before: all are through where each has what it needs in its turn."""
    waiting = rank_group(stages).run(messages, stages)
    while any(waiting):
        heads = {rank: said[0] for rank, said in enumerate(waiting) if said}
        met = {
            (rank, peer)
            for rank, (what, peer) in heads.items()
            if what == "send" and heads.get(peer) == ("receive", rank)
        }
        assert met, heads
        for rank in (rank for pair in met for rank in pair):
            waiting[rank].pop(0)


class Head(nn.Module):
    """A criterion with weights and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.conv, self.norm = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)

    def forward(self, state: Any, target: Tensor) -> Tensor:
        return (self.norm(self.conv(state["x"])) - target).square().sum() * 0.01


class Trained(nn.Module):
    """The iterations and the head, whose loss is taken inside the call, or after it."""

    def __init__(self, run: nn.Module, microbatches: int | None):
        super().__init__()
        torch.manual_seed(5)
        self.before, self.run, self.head, self.microbatches = nn.Conv2d(3, 3, 1), run, Head(), microbatches

    def forward(self, x: Tensor, measured: Tensor) -> list[Tensor]:
        """The loss's root twice, as the loss in `step` is its square."""
        state, target = {"x": self.before(x), "momentum": x * 0}, measured[:, :2]
        if self.microbatches is None:
            loss, axis = self.run.loss(self.head, [target], state, measured), self.run.stages.axis  # type: ignore
            own = axis.size * (axis.coordinate == 0)  # the mean over the stages of what each hands back counts
            return [(loss.detach() + own * (loss - loss.detach())).sqrt()]
        base, losses = drawn_seed(), []
        with kept_random_state():
            for m in range(self.microbatches):
                one, own, wanted = tree_map(lambda t, m=m: t.chunk(self.microbatches)[m], (state, measured, target))
                before: Any = lambda number, m=m: seed_everything(mixed_seed(base, m, number))  # noqa: E731
                losses.append(self.head(self.run.one(one, own, before), wanted))  # type: ignore[operator]
        return [sum(losses, torch.zeros(())).sqrt()]


def compared_inside(axes: dict[str, int], own: bool, microbatches: int) -> float:
    mesh, split = ff.init_mesh(**axes), "width" in axes
    made = blocks(own, paced=own, drops=not split)
    loop = Trained(Loop(copy.deepcopy(made), microbatches, False), microbatches).double()
    run = ff.unroll(made, ITERATIONS, placement="stages", mesh=mesh, microbatches=microbatches)
    wanted = step(loop)
    model = ff.parallelize(Trained(run, None).double(), mesh)
    found: dict[str, Any] = step(model, (lambda t: ff.shard(t, mesh)) if split else lambda t: t)
    if split:
        found |= {name: found[name].full() for name in ("x", "measured")}
    return difference(model, found, loop, wanted)


CASES = (  # own blocks, microbatches, losses on all iterates, recompute
    (False, 1, True, "none"),
    (True, 1, False, "none"),
    (False, 4, False, "nested"),
    (False, 2, True, True),
    (True, 4, True, "none"),
)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_plain_loop_s_numbers(axes: dict[str, int]) -> None:
    for case in CASES:
        assert max(rank_group(math.prod(axes.values())).run(compared, axes, *case)) < 1e-10, case


@pytest.mark.parametrize("axes", [{"stages": 2}, {"stages": 3}, {"stages": 2, "width": 2}], ids=str)
def test_a_loss_inside_goes_back_at_once(axes: dict[str, int]) -> None:
    ranks = math.prod(axes.values())
    for own, microbatches in ((False, 4), (True, 2)):
        assert max(rank_group(ranks).run(compared_inside, axes, own, microbatches)) < 1e-10


def replicas(own: bool) -> float:
    """Two replicas of two stages: the mean over their samples, as of any replicas."""
    mesh = ff.init_mesh(stages=2)
    assert mesh.mesh_dim_names == ("data", "stage", "height", "width") and mesh.shape == (2, 2, 1, 1)
    made = blocks(own, paced=False).eval()
    loop = copy.deepcopy(made)
    run = ff.parallelize(ff.unroll(made, ITERATIONS, placement="stages", mesh=mesh, microbatches=2), mesh)
    torch.manual_seed(4)
    x = torch.randn(8, 3, 6, 7, dtype=torch.float64)
    mine = x.chunk(2)[mesh.get_local_rank("data")]
    run({"x": mine, "momentum": mine * 0}, mine)["x"].square().mean().backward()
    Loop(loop, 1, False)({"x": x, "momentum": x * 0}, x)["x"].square().mean().backward()
    pairs = zip(made.parameters(), loop.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)  # type: ignore[operator]


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_beside_data_replicas(own: bool) -> None:
    assert max(rank_group(4).run(replicas, own)) < 1e-10


class Beside(nn.Module):
    """Makes a part of the state anew, through which no gradient goes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1, 3, dtype=torch.float64))

    def forward(self, state: Any) -> Any:
        return torch.tanh(self.weight * state[0]) + state[1], state[0].detach() * 2


def few_gradients(all_states: bool, frozen: int, stages: int) -> list[Tensor | None]:
    """Each block's gradient of a loss on the first state, or the last; the first blocks are frozen."""
    own = [Beside().requires_grad_(number >= frozen) for number in range(4)]
    run = ff.unroll(own, 4, return_all=all_states)
    if stages > 1:
        run.spread(ff.init_mesh(stages=stages))
    found = run((torch.ones(2, 3, dtype=torch.float64),) * 2)
    (found[0] if all_states else found)[0].sum().backward()
    return [block.weight.grad for block in own]


@pytest.mark.parametrize(("all_states", "frozen"), [(False, 0), (True, 0), (False, 2)])
def test_what_no_gradient_reaches_has_none(all_states: bool, frozen: int) -> None:
    ranks = rank_group(2).run(few_gradients, all_states, frozen, 2)
    for expected, *found in zip(few_gradients(all_states, frozen, 1), *ranks, strict=True):
        assert [each is None for each in found] == [expected is None] * 2
        if expected is not None:
            torch.testing.assert_close(sum(found) / 2, expected, rtol=1e-12, atol=1e-12)


class Odd(nn.Module):
    """Does what it is told on one stage alone."""

    def __init__(self, way: str):
        super().__init__()
        self.weight, self.unused, self.way = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), way
        self.outside = nn.Parameter(torch.ones(3)) * 2
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        late = torch.distributed.get_rank() == 1
        if self.way == "counts":
            self.calls = self.calls + 1
        if self.way == "shape" and late:
            return x[:1]
        if self.way == "outside" and late:
            return torch.sin(x * self.weight * self.outside)
        return torch.sin(x * self.weight)


def odd(way: str, microbatches: int = 1, twice: bool = False, penalty: bool = False, inside: bool = False) -> Any:
    mesh = ff.init_mesh(stages=2)
    block = Odd(way)
    run = ff.unroll(block, 4, placement="stages", mesh=mesh, microbatches=microbatches)
    run(torch.ones(4, 3)).sum().backward()
    loss = run.loss(Tensor.sum, (), torch.ones(4, 3)) if inside else run(torch.ones(4, 3)).sum()
    loss.backward(retain_graph=twice)
    if twice:
        loss.backward()
    if penalty:
        x = torch.ones(4, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        (slope.square().sum() + run(x).sum()).backward()  # of the penalty there would be nothing
    given = torch.ones(3, 3, requires_grad=True)
    with torch.no_grad():
        odd_sized = run.eval()(given)  # no microbatches
    given.sum().backward()  # type: ignore[no-untyped-call]  # it stays the caller's
    return block.unused.grad is None, block.weight.grad is not None, odd_sized.shape


def odd_with(way: str, options: dict[str, Any]) -> Any:
    return odd(way, **options)


def test_what_gets_no_gradient_has_none() -> None:
    assert rank_group(2).run(odd, "well", 2) == [(True, True, (3, 3))] * 2


@pytest.mark.parametrize(
    ("way", "options", "words"),
    [
        ("shape", {}, "returned shape"),
        ("outside", {}, "wants a gradient and is neither a parameter"),
        ("counts", {"microbatches": 2}, "changes its buffer calls in forward"),
        ("well", {"twice": True}, "a second time"),
        ("well", {"twice": True, "inside": True}, "a second time"),
        ("well", {"penalty": True}, "are asked for through stages, of which there is a first derivative only"),
        ("well", {"microbatches": 3}, "4 samples cannot be cut into 3 equal microbatches"),
    ],
)
def test_an_error_on_one_stage_ends_all(way: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RankFailure) as raised:
        rank_group(2).run(odd_with, way, options)
    assert len(raised.value.errors) == 2 and all(words in message for _, _, message, _ in raised.value.errors)


def autocast() -> float:
    """bf16 inside: as near to the plain loop as it is to itself on other ranks, to the last bit."""
    mesh = ff.init_mesh(stages=2)
    made = blocks(False, drops=False).float()
    loop = copy.deepcopy(made)
    x = torch.randn(4, 3, 6, 7, generator=torch.Generator().manual_seed(1))
    grads = []
    for model in (
        Loop(loop, 1, False),
        ff.parallelize(ff.unroll(made, ITERATIONS, placement="stages", mesh=mesh), mesh),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model({"x": x, "momentum": x * 0}, x)["x"].square().mean()
        loss.backward()
        grads.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    return float((grads[0] - grads[1]).norm() / grads[0].norm())


def test_autocast() -> None:
    assert max(rank_group(2).run(autocast)) < 1e-6


class Norms:
    """A chain that is none."""

    def __init__(self, *parts: nn.Module):
        self.parts, self.whole = parts, nn.ModuleList(parts)

    def run(self, part: range, state: Any, inputs: Any, before: Any) -> list[Any]:
        raise AssertionError


def refused() -> None:
    stages = Stages(ff.init_mesh(stages=2), 1)
    with pytest.raises(ff.FullframeError, match="1 parts cannot be spread over 2 stages"):
        through_stages(Norms(nn.Identity()), stages, torch.ones(2, 3), ())
    with pytest.raises(ff.FullframeError, match="SyncBatchNorm waits for all ranks"):
        through_stages(Norms(nn.SyncBatchNorm(3), nn.Identity()), stages, torch.ones(2, 3), ())
    with torch.no_grad(), pytest.raises(ff.FullframeError, match="3 samples cannot be cut"):
        stages.microbatches = 2
        through_stages(Norms(nn.BatchNorm1d(3), nn.Identity()), stages, torch.ones(3, 3), ())


def test_what_cannot_be_on_stages() -> None:
    rank_group(2).run(refused)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement": "stages"}, "mesh not given"),
        ({"microbatches": 2}, "microbatches=2 is for stages"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ff.FullframeError, match=words):
        ff.unroll(nn.Identity(), 3, **options)
    with pytest.raises(ff.FullframeError, match=r"no stages; make it with ff\.init_mesh\(stages=2\)"):
        ff.unroll(nn.Identity(), 3, placement="stages", mesh=ff.init_mesh())
