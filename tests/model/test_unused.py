"""Parameters without a gradient: found in the first step, said once, and exact whatever changes later."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.model.parallelize_for import parallelize_for
from fullframe.model.unused import Unused
from fullframe.techniques.optimizers import build_optimizer
from tests.exactness import mesh, relative
from tests.rank_group import RankFailure, rank_group

MESHES = [(2, 1, 2), (2, 2, 1), (4, 2, 2), (2, 1, 1), (4, 1, 2)]  # ranks, height, width; the last two have replicas


class Net(nn.Module):
    """A mask token and a head that are not used, and a branch that is used when told."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.branch = nn.Conv2d(4, 4, 3, padding=1)
        self.never = nn.Linear(2, 2)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, branch: bool = False) -> Tensor:
        x = self.frozen(self.stem(x).tanh())
        return self.head(x + self.branch(x) if branch else x)  # type: ignore[no-any-return]


def _images(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return list(torch.randn(2, 2, 3, 9, 13, dtype=torch.float64, generator=generator))


def _gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


Loop = Callable[[Any, nn.Module, list[list[Tensor]]], list[dict[str, Tensor | None]]]
Branch = Callable[[int, int], bool]  # by step and replica


def _stepwise(branch: Branch, set_to_none: bool = True, **options: bool) -> Loop:
    """One backward pass a step, over the mean of the replicas' losses."""

    def loop(model: Any, net: nn.Module, batches: list[list[Tensor]]) -> list[dict[str, Tensor | None]]:
        found = []
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for number, images in enumerate(batches):
            optimizer.zero_grad(set_to_none)
            outs = [model(image, branch(number, replica)) for replica, image in _numbered(images)]
            sum(out.sin().square().mean() / len(images) for out in outs).backward()
            found.append(_gradients(net))
            optimizer.step()
        return [*found, dict(net.named_parameters())]

    loop.options = options  # type: ignore[attr-defined]
    return loop


def _numbered(images: list[Tensor]) -> list[tuple[int, Tensor]]:
    """The images with the number of their replica."""
    mine = getattr(images, "replica", None)
    return list(enumerate(images)) if mine is None else [(mine, image) for image in images]


class _Mine(list[Tensor]):
    replica = 0


def _accumulated(model: Any, net: nn.Module, batches: list[list[Tensor]]) -> list[dict[str, Tensor | None]]:
    """The branch is used in the first of two passes alone, every other step; then a part called by itself."""
    found = []
    for number, images in enumerate(batches):
        net.zero_grad()
        no_sync = getattr(model, "no_sync", None)
        for _, image in _numbered(images):
            if no_sync is None:
                (model(image, number % 2 == 1).sin().mean() / len(images)).backward()
            else:
                with no_sync():
                    (model(image, number % 2 == 1).sin().mean() / len(images)).backward()
        for _, image in _numbered(images):
            (model(image).cos().mean() / len(images)).backward()
        found.append(_gradients(net))
        net.zero_grad()
        for _, image in _numbered(images):
            if no_sync is None:
                (model(image).sin().mean() / len(images)).backward()
            else:
                with no_sync():
                    (model(image).sin().mean() / len(images)).backward()
        for _, image in _numbered(images):
            (net.stem(image).cos().mean() / len(images)).backward()
        found.append(_gradients(net))
    return found


def _two_losses(model: Any, net: nn.Module, batches: list[list[Tensor]]) -> list[dict[str, Tensor | None]]:
    """Of one forward pass, by parts of it: each backward reaches other parameters; kept gradients stay as they were."""
    found, kept = [], []
    for images in batches:
        net.zero_grad()
        first, second = [], []
        for _, image in _numbered(images):
            model(image)
            features = net.stem(image)
            first.append(features.sin().mean() / len(images))
            second.append(net.head(features.detach()).cos().mean() / len(images))
        sum(first).backward()  # type: ignore[union-attr]
        sum(second).backward()  # type: ignore[union-attr]
        kept.append([p.grad for p in net.parameters()])
        found.append(_gradients(net))
    names = [name for name, _ in net.named_parameters()]
    return [*found, *(dict(zip(names, gradients, strict=True)) for gradients in kept)]


def _hooked(branch: Branch, are_alone: bool) -> Loop:
    """Hooks of the user are called for gradients that are there, and for no other."""
    plain = _stepwise(branch)

    def loop(model: Any, net: Any, batches: list[list[Tensor]]) -> list[dict[str, Tensor | None]]:
        called = dict.fromkeys(("stem", "never", "after"), 0.0)

        def count(name: str) -> None:
            called[name] = 1.0

        net.stem.weight.register_hook(lambda g: (count("stem"), g.clamp(-1e-3, 1e-3))[1])
        net.never.weight.register_hook(lambda g: count("never"))
        net.mask_token.register_post_accumulate_grad_hook(lambda p: count("after"))
        found = plain(model, net, batches)
        if are_alone:  # else zeros stand for what another replica might have
            found.append({name: torch.tensor(number) for name, number in called.items()})
        return found

    return loop


def _adding(model: Any, net: Any, batches: list[list[Tensor]]) -> list[dict[str, Tensor | None]]:
    """Hooks that make something of zeros, where gradients of zeros stay from the step before."""

    def add(parameter: nn.Parameter) -> None:
        parameter.grad.add_(1e-3)  # type: ignore[union-attr]

    net.branch.weight.register_hook(lambda gradient: gradient + 1e-3)
    net.branch.bias.register_post_accumulate_grad_hook(add)
    return _stepwise(lambda step, replica: step % 2 == 1, set_to_none=False)(model, net, batches)


ALIKE: dict[str, Loop] = {
    "never": _stepwise(lambda step, replica: False),
    "always": _stepwise(lambda step, replica: True),
    "from the second step on": _stepwise(lambda step, replica: step > 0),
    "in the first step alone": _stepwise(lambda step, replica: step == 0),
    "every other step": _stepwise(lambda step, replica: step % 2 == 1),
    "zeros kept": _stepwise(lambda step, replica: step % 2 == 1, set_to_none=False),
    "said": _stepwise(lambda step, replica: step % 2 == 1, find_unused_parameters=True),
    "accumulated": _accumulated,
    "two losses": _two_losses,
    "hooks that add": _adding,
    "hooks": _hooked(lambda step, replica: step % 2 == 1, are_alone=False),
}
ALONE = {"called hooks": _hooked(lambda step, replica: step % 2 == 1, are_alone=True)}
APART: dict[str, Loop] = {
    "on one replica": _stepwise(lambda step, replica: replica == 1),
    "on each in turn": _stepwise(lambda step, replica: (step + replica) % 2 == 1),
    "later on one": _stepwise(lambda step, replica: step > 1 and replica == 0),
    "said, on one": _stepwise(lambda step, replica: replica == 0, find_unused_parameters=True),
}


def _one_hooked(both: bool, **options: bool) -> Loop:
    """A parameter with a hook that one replica alone uses: the others wait for it, or with it.

    Where that is said, a hook sees its replica's gradient, and is not called where that has none.
    """
    plain = _stepwise(lambda step, replica: replica == 1, **options)

    def hook(gradient: Tensor) -> Tensor:
        assert not options or gradient.any()
        return 3 * gradient if options else gradient.clamp(-1e-3, 1e-3)

    def loop(model: Any, net: Any, batches: list[list[Tensor]]) -> list[dict[str, Tensor | None]]:
        net.branch.weight.register_hook(hook)
        if both:
            net.stem.weight.register_hook(hook)
        return plain(model, net, batches)

    loop.options = options  # type: ignore[attr-defined]
    return loop


def _hooked_by_turns(model: Any, net: Any, batches: list[list[Tensor]]) -> list[dict[str, Tensor | None]]:
    """Of three passes the replicas use the branch, whose hook bends its gradient, in others, and in the last step none.

    Two are in `no_sync()`; in every third step all are averaged, and in one the last is a loss of parts of the model.
    """
    found = []
    net.branch.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    for step, images in enumerate(batches):
        net.zero_grad()
        for turn in range(3):
            of_parts = turn == 2 and step % 3 == 1
            alone = turn < 2 and step % 3 > 0 and hasattr(model, "no_sync")
            with model.no_sync() if alone else nullcontext():
                losses = []
                for replica, image in _numbered(images):
                    branch = step < len(batches) - 1 and turn != step % 3 and (turn + replica) % 2 == 1
                    x = net.stem(image).tanh() if of_parts else model(image, branch)
                    losses.append((net.branch(x) if branch and of_parts else x).sin().square().mean() / len(images))
                sum(losses).backward()  # type: ignore[union-attr]
        found.append(_gradients(net))
    return found


APART |= {"one hook": _one_hooked(False), "two hooks": _one_hooked(True), "a hook by turns": _hooked_by_turns}
APART["two hooks, said"] = _one_hooked(True, find_unused_parameters=True)


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _difference(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    worst = 0.0
    for here, there in zip(expected, found, strict=True):
        assert {name for name, g in here.items() if g is None} == {name for name, g in there.items() if g is None}
        worst = max([worst, *(relative(g.detach(), there[name].detach()) for name, g in here.items() if g is not None)])
    return worst


def _compared(name: str, height: int, width: int) -> tuple[float, list[str]]:
    loop = {**ALIKE, **ALONE, **APART}[name]
    on, here, there = mesh(height, width), _net(), _net()
    replicas, mine = on.size(0), on.get_local_rank("data")
    batches = [_images(number)[:replicas] for number in range(5)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = ff.parallelize(there, on, **getattr(loop, "options", {}))
        own = []
        for images in batches:
            own.append(_Mine([ff.shard(images[mine], on)]))
            own[-1].replica = mine
        expected = loop(here, here, batches)
        found = loop(model, there, own)  # type: ignore[arg-type]
    return _difference(expected, found), [str(w.message) for w in said if "no gradient" in str(w.message)]


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize(("ranks", "height", "width"), MESHES)
def test_gradients_and_updates_are_one_process_s(name: str, ranks: int, height: int, width: int) -> None:
    found = rank_group(ranks).run(_compared, name, height, width)
    assert max(error for error, _ in found) < 1e-11
    assert [len(said) for _, said in found] == [int(name != "said")] + [0] * (ranks - 1)


@pytest.mark.parametrize(("ranks", "height", "width"), MESHES[:3])
def test_hooks_are_called_for_gradients_that_are_there(ranks: int, height: int, width: int) -> None:
    assert max(error for error, _ in rank_group(ranks).run(_compared, "called hooks", height, width)) < 1e-11


@pytest.mark.parametrize("name", APART.keys() - {"two hooks"})
@pytest.mark.parametrize(("ranks", "height", "width"), MESHES[-2:])
def test_replicas_that_use_other_parameters(name: str, ranks: int, height: int, width: int) -> None:
    found = rank_group(ranks).run(_compared, name, height, width)
    assert max(error for error, _ in found) < 1e-11
    assert [len(said) for _, said in found] == [int("said" not in name)] + [0] * (ranks - 1)


def test_hooks_that_the_replicas_meet_in_other_orders_are_refused_on_all_ranks() -> None:
    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(_compared, "two hooks", 1, 1)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["DivergenceError"] * 2


class Words(nn.Module):
    """Sparse gradients, of one table that is used and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = (nn.Embedding(5, 4, sparse=True) for _ in range(2))
        self.stem = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        table = self.other if other else self.table
        return self.stem(x) * table(torch.tensor([1, 3])).sum(0)[:, None, None]  # type: ignore[no-any-return]


def _sparse() -> float:
    on, images = mesh(1, 2), _images(0)[:1]
    torch.manual_seed(0)
    here = Words().double()
    there = Words().double()
    there.load_state_dict(here.state_dict())
    model, worst = ff.parallelize(there, on), 0.0
    for number in range(4):
        here.zero_grad()
        there.zero_grad()
        here(images[0], number % 2 == 1).sin().mean().backward()
        model(ff.shard(images[0], on), number % 2 == 1).sin().mean().backward()
        dense = [
            {name: None if g is None else g.to_dense() for name, g in _gradients(net).items()} for net in (here, there)
        ]
        worst = max(worst, _difference(dense[:1], dense[1:]))
    return worst


def test_sparse_gradients() -> None:
    assert max(rank_group(2).run(_sparse)) < 1e-11


def _trained(strategy: ff.Strategy) -> dict[str, Tensor]:
    """What three steps make of the parameters, of which the branch's are used every other time."""
    on, net = ff.init_mesh(strategy.height, strategy.width), _net()
    model: Any = parallelize_for(strategy, net, on) if strategy.ranks > 1 else net

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"], number % 2 == 1).sin().square().mean()  # type: ignore[no-any-return]

    optimizer = build_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01), model, strategy)
    step = ff.TrainStep(model, loss, optimizer, strategy)
    for number in range(3):
        share = 4 // strategy.data
        whole = torch.cat([*_images(number), *_images(7 + number)])[on.get_local_rank("data") * share :][:share]
        step({"x": ff.shard(whole, on) if strategy.width > 1 else whole})
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in net.named_parameters()}


TECHNIQUES: dict[str, dict[str, Any]] = {
    "microbatches": {"microbatches": 2},
    "recompute": {"recompute": "blocks", "recompute_modules": ("stem", "branch")},
    "FSDP2": {"shard_parameters": True},
    "FSDP2, recompute, microbatches": {
        "shard_parameters": True,
        "microbatches": 2,
        "recompute": "blocks",
        "recompute_modules": ("stem", "branch"),
    },
    "update in backward": {"update_in_backward": True},
    "clipping": {"clip_norm": 0.01},
    "ZeRO": {"shard_optimizer": True},
}


@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize("spread", [{"width": 2}, {"data": 2}, {"data": 2, "width": 2}], ids=str)
def test_with_every_technique(name: str, spread: dict[str, int]) -> None:
    strategy = ff.Strategy(**spread, **TECHNIQUES[name])  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _trained(ff.Strategy(clip_norm=strategy.clip_norm))
    for found in rank_group(strategy.ranks).run(_trained, strategy):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(expected["never.weight"], _net().never.weight), "not even its weight decays"


def test_a_simulation_takes_them_as_they_are() -> None:
    recipe = ff.Recipe(
        model=Net,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        data=lambda: [{"x": torch.zeros(3, 16, 16)}] * 2,  # type: ignore[arg-type,return-value]
        batch_size=2,
    )
    numbers = sum(p.numel() for name, p in Net().named_parameters() if name.startswith(("stem", "head")))
    for strategy in (ff.Strategy(width=2), ff.Strategy(data=2), ff.Strategy(data=2, shard_parameters=True)):
        state = ff.simulate(recipe, strategy, "cpu").bytes["optimizer"]  # two numbers a parameter that has a gradient
        assert state == 8 * numbers // (2 if strategy.shard_parameters else 1)


def test_they_are_named() -> None:
    (_, said), _ = rank_group(2).run(_compared, "never", 1, 2)
    assert said[0].startswith("5 parameters got no gradient (mask_token, branch.weight, branch.bias, ...): ")


def test_ddp_is_made_without_those_of_the_first_pass_and_for_all_once_they_change() -> None:
    net = nn.Linear(2, 2)
    weight, bias = net.parameters()
    unused, known = Unused(net, varies=False), Unused(net, varies=True)
    with pytest.warns(UserWarning, match=r"1 parameters got no gradient \(bias\)"):
        unused.learn([bias], {weight})
    assert {*unused.others(dict.fromkeys([weight, bias]))} == {weight}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        unused.learn([], {weight, bias})
        known.learn([bias], {weight})
    assert (
        {*unused.others(dict.fromkeys([weight, bias]))}
        == {*known.others(dict.fromkeys([weight, bias]))}
        == {weight, bias}
    )
