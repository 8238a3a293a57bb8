"""A step that computes blocks again is the step that does not: gradients, statistics, draws, on any ranks."""

import copy
import io
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.model.parallelize_for import parallelize_for
from fullframe.ranks.randomness import random_state, seed_everything
from fullframe.techniques.recompute import blocks_to_recompute, recompute
from tests.collector import tensors_for_the_collector
from tests.models.zoo import ZOO
from tests.rank_group import rank_group
from tests.training import blocks
from tests.training.tiny import Plain

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def on_ranks(batch: dict[str, Any], mesh: Any, split: tuple[str, ...]) -> dict[str, Any]:
    """This replica's share of a batch, cut over its ranks."""
    share = len(batch[split[0]]) // mesh.size(0)
    mine = slice(mesh.get_local_rank("data") * share, (mesh.get_local_rank("data") + 1) * share)
    batch = {name: value[mine] for name, value in batch.items()}
    if mesh.size() > mesh.size(0):
        batch |= {name: ff.shard(batch[name], mesh) for name in split}
    return batch


def steps(strategy: ff.Strategy, rehearsed: bool = False, **options: Any) -> dict[str, Any]:
    """What two steps leave behind, as plain tensors and numbers."""
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    dtype = torch.float64 if strategy.precision == "fp32" else torch.float32
    plain = blocks.network(dtype, **options)
    model = parallelize_for(
        strategy,
        plain,
        mesh,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ff.TrainStep(model, blocks.loss, optimizer, strategy)
    batch = on_ranks(blocks.batch(dtype), mesh, ("image", "target"))
    if rehearsed:
        step.rehearse(batch)
    seed_everything(7 + mesh.get_local_rank("data"))
    losses = [step(batch).loss for _ in range(2)]
    state = random_state()
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in plain.named_parameters()}
    return {
        "losses": losses,
        "parameters": whole,
        "buffers": {name: buffer.clone() for name, buffer in plain.named_buffers()},
        "random": (state["torch"], state["numpy"]["state"]["pos"], state["python"][1]),
    }


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_same_to_the_last_bit_in_one_process(precision: Any, microbatches: int) -> None:
    """With dropout, Python's and numpy's draws, batch norm, and a spectral norm that steps on at every forward."""
    options: Any = {"precision": precision, "microbatches": microbatches}
    without = steps(ff.Strategy(**options), dropout=0.3, spectral=True)
    assert_same(steps(ff.Strategy(**options, recompute="blocks"), dropout=0.3, spectral=True), without)


STRATEGIES = [
    ff.Strategy(width=2, recompute="blocks"),
    ff.Strategy(data=2, recompute="blocks", microbatches=2),
    ff.Strategy(height=2, width=2, recompute="blocks", microbatches=2),
    ff.Strategy(data=2, width=2, recompute="blocks", precision="bf16"),
]


def both(strategy: ff.Strategy) -> tuple[dict[str, Any], dict[str, Any]]:
    options: Any = {"dropout": 0.3, "spectral": not strategy.shard_parameters}
    return steps(strategy, **options), steps(replace(strategy, recompute="none"), **options)


@pytest.mark.parametrize("option", ["", "shard_parameters", "update_in_backward"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.data}x{s.height}x{s.width}")
def test_the_same_to_the_last_bit_on_ranks(strategy: ff.Strategy, option: str) -> None:
    options: Any = {option: True} if option else {}
    if option == "update_in_backward":
        options["microbatches"] = 1
    for found, expected in rank_group(strategy.ranks).run(both, replace(strategy, **options)):
        assert_same(found, expected)


def test_split_ranks_give_the_numbers_of_one_process() -> None:
    expected = steps(ff.Strategy())
    for strategy in (STRATEGIES[0], ff.Strategy(height=2, width=2, recompute="blocks")):
        for found in rank_group(strategy.ranks).run(steps, strategy):
            for kind in ("losses", "parameters", "buffers"):
                torch.testing.assert_close(found[kind], expected[kind], rtol=1e-10, atol=1e-13)


def test_statistics_count_a_batch_once() -> None:
    found = steps(ff.Strategy(microbatches=2, recompute="blocks"))["buffers"]
    assert found["stem.1.num_batches_tracked"] == found["blocks.0.norm.num_batches_tracked"] == 4
    assert found["blocks.2.norm.num_batches_tracked"] == 8  # it runs twice in a forward pass


class Count(nn.Module):
    """A layer that knows how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.runs = nn.Conv2d(3, 3, 3, padding=1), [0]  # not in an attribute, which recompute puts back
        self.second = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs[0] += 1
        return self.second(self.conv(x).relu()).sin()  # type: ignore[no-any-return]


def counted(names: tuple[str, ...] = (), steps: int = 1) -> tuple[nn.Module, list[int]]:
    model = nn.Sequential(*(Count() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = ff.Strategy(recompute="blocks", recompute_modules=names)
    for _ in range(steps):
        step = ff.TrainStep(model, lambda model, x: model(x).square().mean(), optimizer, strategy)
    step(torch.ones(1, 3, 8, 8))
    return model, [layer.runs[0] for layer in model]


def test_blocks_run_twice_also_after_a_second_step_was_made() -> None:
    assert counted()[1] == [2, 2, 2]
    assert counted(steps=3)[1] == [2, 2, 2]
    assert counted(("0", "[2]"))[1] == [2, 1, 2]


def test_hooks_inside_a_block_run_in_both_passes_and_its_own_in_one() -> None:
    calls = []
    layers = nn.Sequential(*(Count() for _ in range(3)))
    for name, module in (("block", layers[1]), ("inside", layers[1].conv)):
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    ff.TrainStep(layers, lambda model, x: model(x).mean(), optimizer, ff.Strategy(recompute="blocks"))(
        torch.ones(1, 3, 8, 8)
    )
    assert calls == ["block", "inside", "inside", "block", "inside", "inside"]


def test_a_step_without_recompute_takes_it_out_and_evaluation_does_not_see_it() -> None:
    model, _ = counted()
    assert "forward" in vars(model[0])
    with torch.no_grad():
        model(torch.ones(1, 3, 8, 8))
    assert [layer.runs[0] for layer in model] == [3, 3, 3]
    ff.TrainStep(model, lambda model, x: x, torch.optim.SGD(model.parameters()), ff.Strategy())
    assert "forward" not in vars(model[0])


def test_the_model_is_the_same_to_everyone_else() -> None:
    model, _ = counted()
    fresh = nn.Sequential(*(Count() for _ in range(3)))
    assert list(model.state_dict()) == list(fresh.state_dict())
    assert repr(model) == repr(fresh)
    assert [type(m) for m in model.modules()] == [type(m) for m in fresh.modules()]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        other[0].conv.weight.data.zero_()
        other(torch.ones(1, 3, 8, 8)).sum().backward()
        assert other[0].conv.weight.grad is not None
        assert other[0].runs[0] == 3 and model[0].runs[0] == 2, "the copy must not run in the original"
        assert model[0].conv.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ((), BLOCKS),
        (("blocks.1",), ("blocks.1",)),
        (("blocks",), BLOCKS),  # a list is never called: what is in it
        (("blocks.*",), BLOCKS),  # not also what is within them
        (("*.norm", "stem"), ("stem", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm")),
    ],
)
def test_which_blocks(patterns: tuple[str, ...], names: tuple[str, ...]) -> None:
    strategy = ff.Strategy(recompute="blocks", recompute_modules=patterns)
    assert blocks_to_recompute(blocks.network(), strategy) == names


def test_iterations_are_blocks() -> None:
    def names(unrolled: nn.Module) -> tuple[str, ...]:
        return blocks_to_recompute(nn.Sequential(nn.Conv2d(3, 3, 1), unrolled), ff.Strategy(recompute="blocks"))

    assert names(ff.unroll(nn.Conv2d(3, 3, 1), 4)) == ("1.block",)
    assert names(ff.unroll([nn.Conv2d(3, 3, 1) for _ in range(2)], 2)) == ("1.block.0", "1.block.1")


def test_names_that_are_not_there() -> None:
    strategy = ff.Strategy(recompute="blocks", recompute_modules=("blocks.0", "layers.*"))
    with pytest.raises(StrategyError, match=r"names 'layers\.\*', which no module of Blocks .* stem, stem.0"):
        blocks_to_recompute(blocks.network(), strategy)
    with pytest.raises(StrategyError, match=r"Plain has no repeated .* of four layers with weights; name modules with"):
        blocks_to_recompute(Plain(), ff.Strategy(recompute="blocks"))


class Chain(nn.Module):
    """Layers of one convolution each, with a norm, dropout, and writes in place: no block is repeated."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.ReLU(inplace=True)]
        for number in range(9):
            layers += [nn.Conv2d(3 if number == 0 else 6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)]
            layers += [nn.Dropout(0.2)] if number % 2 else []
        self.layers, self.head = nn.Sequential(*layers, nn.MaxPool2d(2)), nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x * 1))  # type: ignore[no-any-return]


def chained(strategy: ff.Strategy) -> dict[str, Any]:
    """What two steps make of a chain."""
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    torch.manual_seed(0)
    plain = Chain()
    model = parallelize_for(strategy, plain, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ff.TrainStep(model, lambda model, b: model(b["image"]).square().mean(), optimizer, strategy)
    images = torch.randn(2, 3, 65, 70, generator=torch.Generator().manual_seed(1))
    seed_everything(7 + mesh.get_local_rank("data"))
    losses = [step(on_ranks({"image": images}, mesh, ("image",))).loss for _ in range(2)]
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in plain.named_parameters()}
    return {"losses": losses, "parameters": whole, "buffers": {name: b.clone() for name, b in plain.named_buffers()}}


def chained_both(strategy: ff.Strategy) -> tuple[dict[str, Any], dict[str, Any]]:
    budget = replace(strategy, recompute="budget", recompute_budget_bytes=10**6)
    again = chained(replace(strategy, recompute="blocks"))
    if not strategy.shard_parameters:
        assert_same(chained(budget), again)
    return again, chained(strategy)


@pytest.mark.parametrize("options", [{}, {"shard_parameters": True}, {"microbatches": 2}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_runs_of_layers_are_computed_again_to_the_last_bit(ranks: int, options: dict[str, Any]) -> None:
    if ranks == 1 and "shard_parameters" not in options:
        assert_same(*chained_both(ff.Strategy(**options)))
    for spread in {1: [], 2: [{"width": 2}], 4: [{"height": 2, "width": 2}]}[ranks]:
        for found, expected in rank_group(ranks).run(chained_both, ff.Strategy(**spread, **options)):
            assert_same(found, expected)


def test_runs_of_layers_save_memory() -> None:
    def most_bytes(recompute: Any) -> int:
        recipe = ff.Recipe(
            model=Chain,
            loss=lambda model, batch: model(batch["image"]).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            data=lambda: [{"image": torch.zeros(3, 256, 256)}],
            batch_size=1,
        )
        return ff.simulate(recipe, ff.Strategy(recompute=recompute), "cpu").bytes["activation"]

    assert most_bytes("blocks") < 0.55 * most_bytes("none")


def test_a_chain_that_is_called_layer_by_layer_is_named() -> None:
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(4)))

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = layer(x)
        return x.sum()

    step = ff.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), ff.Strategy(recompute="blocks"))
    with pytest.warns(UserWarning, match=r"no effect on \[0:2\], \[2:4\]: the model did not call them"):
        step(torch.ones(1, 3, 16, 16))


class Renorm(nn.BatchNorm2d):
    """Its output in training follows from its running statistics, too: batch renormalization, quantized ConvBn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.running_var.sqrt()[:, None, None]
        return super().forward(x) * scale


class Heated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Renorm(3), nn.Tanh(), nn.Conv2d(3, 3, 1))
        self.register_buffer("heat", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x / self.heat)


class Annealed(nn.Module):
    """Its blocks' temperature is a new tensor after each forward pass, before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Heated() for _ in range(3)]).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        for block in self.blocks:
            block.heat = block.heat * 0.5
        return x


def annealed(recompute: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Annealed()
    options = torch.optim.SGD(model.parameters(), lr=0.1), ff.Strategy(recompute=recompute)
    step = ff.TrainStep(model, lambda model, x: model(x).square().mean(), *options)
    for _ in range(3):
        step(torch.randn(2, 3, 5, 6, dtype=torch.float64) * 3)
    return [*model.parameters(), *model.buffers()]


def test_buffers_are_those_of_the_first_pass_whoever_changes_them_after() -> None:
    assert_same(annealed("blocks"), annealed("none"))


class Drawing(nn.Module):
    """With a counter and a generator of its own, both of which have a say in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.draws, self.calls = torch.Generator().manual_seed(0), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        kept = torch.rand(len(x), 1, 1, 1, generator=self.draws) > 0.5
        return x + self.last(self.conv(x).tanh()) * kept / self.calls


def drawing(recompute: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Drawing() for _ in range(3)))
    options = torch.optim.SGD(model.parameters(), lr=0.1), ff.Strategy(recompute=recompute)
    step = ff.TrainStep(model, lambda model, x: model(x).square().mean(), *options)
    for _ in range(3):
        step(torch.randn(4, 3, 5, 6))
    return [*model.parameters(), *(torch.tensor(block.calls) for block in model)]


def test_counters_and_generators_of_blocks_go_on_by_one_pass() -> None:
    assert_same(drawing("blocks"), drawing("none"))


class OfAnObject(Count):
    def forward(self, given: SimpleNamespace) -> torch.Tensor:  # type: ignore[override]
        return super().forward(given.x)


@pytest.mark.parametrize("block", [Count(), OfAnObject()])
def test_checkpoint_is_shown_the_device_of_a_block(block: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the random states of those GPUs alone on which an argument lies, and tensors may come in an object."""
    shown = list[list[str]]()

    def seen(run: Any, *args: Any, **kwargs: Any) -> Any:
        shown.append([one.device.type for one in args if isinstance(one, torch.Tensor)])
        return checkpoint(run, *args, **kwargs)

    monkeypatch.setattr("fullframe.techniques.recompute.checkpoint", seen)
    model = nn.Sequential(block).to("meta")
    recompute(model, ["0"])
    x = torch.zeros(1, 3, 4, 4, device="meta")
    model(x if type(block) is Count else SimpleNamespace(x=x)).sum().backward()
    assert shown == [["meta"]]


class Clipping(Count):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.conv.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_block_that_writes_to_its_parameters_is_refused() -> None:
    model = nn.Sequential(Clipping(), Clipping(), Clipping())
    options = torch.optim.SGD(model.parameters(), lr=0.1), ff.Strategy(recompute="blocks")
    step = ff.TrainStep(model, lambda model, x: model(x).sum(), *options)
    with pytest.raises(StrategyError, match=r"0 writes to its parameter conv.weight in forward, which it would do"):
        step(torch.ones(1, 3, 8, 8))


class Writing(Count):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.relu_())


def writing(width: int) -> str:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Writing(), Writing())
    mesh = ff.init_mesh(width=width)
    strategy = ff.Strategy(width=width, recompute="blocks")
    given = ff.parallelize(model, mesh)
    step = ff.TrainStep(given, lambda model, x: model(x).sum(), torch.optim.SGD(given.parameters(), lr=0.1), strategy)
    with pytest.raises(StrategyError) as raised:
        step(ff.shard(torch.ones(1, 3, 8, 8), mesh) if width > 1 else torch.ones(1, 3, 8, 8))
    return str(raised.value)


def test_a_block_that_writes_to_its_input_is_refused() -> None:
    for message in (writing(1), *rank_group(2).run(writing, 2)):
        assert message.startswith("1 writes to its input, so it cannot be recomputed from it; use inplace=False")


class PassedBy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Count() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0].second(self.layers[0].conv(x)))  # type: ignore[no-any-return]


def test_a_block_that_is_not_called_is_named() -> None:
    model = PassedBy()
    strategy = ff.Strategy(recompute="blocks")
    step = ff.TrainStep(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    with pytest.warns(UserWarning, match=r"no effect on layers\.0: the model did not call them"):
        step(torch.ones(1, 3, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.ones(1, 3, 8, 8))


def of_a_model(name: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    entry = ZOO[name]
    mesh = ff.init_mesh(height=2, width=2)
    torch.manual_seed(0)
    plain = entry.build().double().train()
    model = ff.parallelize(
        plain, mesh, unsupported=entry.unsupported, find_unused_parameters=entry.find_unused_parameters
    )
    strategy = ff.Strategy(height=2, width=2, **options)
    step = ff.TrainStep(model, entry.loss, torch.optim.SGD(model.parameters(), lr=0.0), strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is gathered
        step(on_ranks(entry.inputs(64, 96), mesh, entry.split))
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return gradients, dict(plain.named_buffers())


def both_of_a_model(name: str, modules: tuple[str, ...]) -> Any:
    return of_a_model(name), of_a_model(name, recompute="blocks", recompute_modules=modules)


@pytest.mark.parametrize(
    ("name", "modules"), [("convnext", ()), ("segformer", ()), ("unet", ()), ("unrolled_stereo", ("update", "delta"))]
)
def test_models_on_two_by_two_ranks(name: str, modules: tuple[str, ...]) -> None:
    """Blocks that exchange rows and reduce over ranks do so again in backward, in one order on all ranks."""
    for expected, found in rank_group(4).run(both_of_a_model, name, modules):
        assert_same(found, expected)


class Checkpointed(blocks.Blocks):
    """The user's own recompute, by torch, of all or, in its selective form, of all but convolutions."""

    selective = False

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for block in self.blocks:
            options: dict[str, Any] = {"context_fn": keeping_convolutions} if self.selective else {}
            x, found = checkpoint(block, x, [], extra={"scale": 0.5}, use_reentrant=False, **options)
            x = x + found["mean"]
        return self.head(x)  # type: ignore[no-any-return]


def keeping_convolutions() -> Any:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = "convolution" in str(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def with_the_users_own(height: int, width: int, selective: bool) -> Any:
    torch.manual_seed(0)
    model = Checkpointed().double()
    model.selective = selective
    image, given = blocks.batch()["image"], model
    if height * width > 1:
        mesh = ff.init_mesh(height=height, width=width)
        given, image = ff.parallelize(model, mesh), ff.shard(image, mesh)
    given(image).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


@pytest.mark.parametrize("selective", [False, True])
def test_the_users_own_recompute_is_what_it_is_in_one_process(selective: bool) -> None:
    """Torch's, which counts a batch twice: the numbers of one GPU, whatever they are."""
    expected = with_the_users_own(1, 1, selective)
    assert expected[1]["blocks.0.norm.num_batches_tracked"] == 2
    for found in rank_group(4).run(with_the_users_own, 2, 2, selective):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)


def garbage_of_a_recomputed_block() -> int:
    """Tensors that only the garbage collector would free after a backward pass with recompute on split tensors."""
    mesh = ff.init_mesh(width=2)
    block = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())
    split = ff.shard(torch.ones(1, 2, 6, 8, requires_grad=True), mesh)
    return tensors_for_the_collector(lambda: checkpoint(block, split, use_reentrant=False).sum().backward())


def test_what_was_recomputed_is_freed_at_once() -> None:
    assert rank_group(2).run(garbage_of_a_recomputed_block) == [0, 0]
