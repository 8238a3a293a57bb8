"""Parameters that FSDP2 does not shard: their values and gradients through all that a loop does with them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fullframe as ff
from fullframe.model.sharding.kept_whole import KeptWhole
from fullframe.model.sharding.values import is_sharded, whole_value
from fullframe.techniques.recompute import recompute
from tests.exactness import mesh, relative
from tests.rank_group import rank_group


class Scaled(nn.Module):
    def __init__(self, of_norm: torch.dtype) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1).double(), nn.GroupNorm(1, 3).to(of_norm)
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.norm(self.conv(x).to(self.norm.weight.dtype)).double())


class Net(nn.Module):
    """Numbers, complex weights, norms of another dtype perhaps; `fails` behind its last block."""

    def __init__(self, of_norms: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(of_norms) for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.filter = nn.Parameter(torch.randn(3, 1, 1, dtype=torch.complex128))
        self.fails: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.fails is not None:
            raise self.fails
        return (torch.complex(x, x) * self.filter).abs() * self.temperature + self.blocks[0].scale  # type: ignore


def built(of_norms: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return Net(of_norms)


def images(height: int = 9) -> Tensor:
    return torch.randn(4, 3, height, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


WHOLE = StateDictOptions(full_state_dict=True)
Step = Callable[[Any, Callable[[Tensor], Tensor]], None]  # of a model, with how its images are shared


def plain_step(model: Any, mine: Callable[[Tensor], Tensor]) -> None:
    loss_of(model, mine(images())).backward()


def recomputed(model: Any, mine: Callable[[Tensor], Tensor]) -> None:
    """Of blocks whose forward is computed again without their hooks."""
    plain_step(model, mine)


def accumulated(model: Any, mine: Callable[[Tensor], Tensor]) -> None:
    first, second = images().chunk(2, dim=3)
    if hasattr(model, "no_sync"):
        with model.no_sync():
            loss_of(model, mine(first)).backward()
        assert all(p.grad is None for p in model.parameters())
    else:
        loss_of(model, first).backward()
    loss_of(model, mine(second)).backward()
    loss_of(model, mine(second + 1)).backward()  # to gradients that are averaged already


def after_an_error(model: Any, mine: Callable[[Tensor], Tensor]) -> None:
    net = getattr(model, "module", model)
    for net.fails in (ValueError("a bad frame"), KeyboardInterrupt("enough")):
        with pytest.raises(type(net.fails)):
            loss_of(model, mine(images()))
    net.fails = None
    assert all(is_sharded(p) for p in net.parameters()) == (net is not model)
    with torch.no_grad():
        net.temperature.mul_(0.5)
    plain_step(model, mine)


def after_a_failed_backward(model: Any, mine: Callable[[Tensor], Tensor]) -> None:
    def fail(gradient: Tensor) -> Tensor:
        raise ValueError("a bad gradient")

    net = getattr(model, "module", model)
    handle = net.blocks[1].register_forward_hook(lambda block, args, y: y.register_hook(fail) and None)
    with pytest.raises(ValueError, match="a bad gradient"):
        loss_of(model, mine(images() + 1)).backward()
    handle.remove()
    model.zero_grad()
    plain_step(model, mine)


def assigned(model: Any, mine: Callable[[Tensor], Tensor]) -> None:
    loss_of(model, mine(images()))
    net = getattr(model, "module", model)
    net.temperature.data = torch.tensor(0.3, dtype=torch.float64)
    net.load_state_dict(
        {name: whole_value(v) * 0.9 for name, v in net.state_dict().items() if "scale" in name}, strict=False
    )
    plain_step(model, mine)


def hooked(model: Any, mine: Callable[[Tensor], Tensor]) -> None:
    net = getattr(model, "module", model)
    seen: list[Tensor] = []
    net.temperature.register_post_accumulate_grad_hook(lambda p: seen.append(whole_value(p.grad).clone()))
    plain_step(model, mine)
    assert len(seen) == 1
    assert torch.equal(seen[0], whole_value(net.temperature.grad))


STEPS: list[Step] = [plain_step, recomputed, accumulated, after_an_error, after_a_failed_backward, assigned, hooked]
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=False),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
]


OF_A_BLOCK = "scale", "norm.weight", "norm.bias"
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5}  # of norms, which are rounded


def trained(model: Any, step: Step, mine: Callable[[Tensor], Tensor], number: int) -> dict[str, Tensor]:
    """All parameters after steps, and the norms of their gradients."""
    optimizer = OPTIMIZERS[number](model.parameters())
    norms = []
    for _ in range(3):
        step(model, mine)
        norms.append(whole_value(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    values = {name.removeprefix("module."): whole_value(p.detach()) for name, p in model.named_parameters()}
    return values | {"norms": torch.stack(norms)}


def errors(height: int, width: int) -> dict[tuple[str, int, torch.dtype], float]:
    on = mesh(height, width)

    def mine(x: Tensor) -> Tensor:
        return ff.shard(x.chunk(on.size(0))[on.get_local_rank("data")], on)

    found = {}
    for of_norms in (torch.float64, torch.float32):
        for step in STEPS:
            for number in range(len(OPTIMIZERS)) if step is plain_step else (2,):
                expected = trained(built(of_norms), step, lambda x: x, number)
                model = built(of_norms)
                if step is recomputed:
                    recompute(model, [f"blocks.{number}" for number in range(3)])
                model = ff.parallelize(model, on, shard_parameters=True)
                got = trained(model, step, mine, number)
                worst = max(relative(expected[name], got[name]) for name in expected)
                found[step.__name__, number, of_norms] = worst
    return found


@pytest.mark.parametrize(("ranks", "height", "width"), [(2, 1, 2), (4, 2, 1)])
def test_they_are_trained_as_in_one_process(ranks: int, height: int, width: int) -> None:
    for found in rank_group(ranks).run(errors, height, width):
        worst = {dtype: max(error for (_, _, of), error in found.items() if of == dtype) for dtype in LIMITS}
        assert all(worst[dtype] < limit for dtype, limit in LIMITS.items()), found


def with_whole_states(model: Any, of_one: Any, number: int, groups: bool, mine: Callable[[Tensor], Tensor]) -> Any:
    """After two steps that go on from an optimizer's state that one process has saved."""
    net = getattr(model, "module", model)
    net.load_state_dict(of_one[0])
    optimizer = OPTIMIZERS[number](grouped(net, groups))
    optimizer.load_state_dict(copy.deepcopy(of_one[1]))
    for _ in range(2):
        plain_step(model, mine)
        optimizer.step()
        optimizer.zero_grad()
    return [whole_value(p.detach()) for p in net.parameters()]


def grouped(net: Any, groups: bool) -> Any:
    """Its parameters, of which a number is the first; in two groups numbers are one by themselves."""
    numbers = [p for p in net.parameters() if p.dim() == 0]
    return (
        [{"params": numbers}, {"params": [p for p in net.parameters() if p.dim() > 0]}] if groups else net.parameters()
    )


def resumed(width: int) -> dict[tuple[int, bool], float]:
    on, found = mesh(1, width), {}
    for number in range(len(OPTIMIZERS)):
        for groups in (False, True):
            net = built()
            before = OPTIMIZERS[number](grouped(net, groups))
            plain_step(net, lambda x: x)
            before.step()
            of_one = copy.deepcopy((net.state_dict(), before.state_dict()))
            expected = with_whole_states(built(), of_one, number, groups, lambda x: x)
            model = ff.parallelize(built(), on, shard_parameters=True)
            got = with_whole_states(model, of_one, number, groups, lambda x: ff.shard(x, on))
            found[number, groups] = max(map(relative, expected, got))
    return found


def test_an_optimizer_takes_whole_states_of_numbers() -> None:
    for found in rank_group(2).run(resumed, 2):
        assert max(found.values()) < 1e-9, found


def through_torch() -> float:
    """Loaded by torch's own functions, which leave states of numbers plain."""
    on = mesh(1, 2)
    models = [ff.parallelize(built(), on, shard_parameters=True) for _ in range(2)]
    optimizers = [OPTIMIZERS[0](model.parameters()) for model in models]
    saved: Any = None
    for model, optimizer in zip((models[0], *models), (optimizers[0], *optimizers), strict=True):
        if model is models[1]:
            states = {"model_state_dict": saved[0], "optim_state_dict": saved[1]}
            set_state_dict(model.module, optimizer, **states, options=WHOLE)
        if model is models[0] and optimizer.state:
            saved = copy.deepcopy(get_state_dict(model.module, optimizer, options=WHOLE))
        plain_step(model, lambda x: ff.shard(x, on))
        optimizer.step()
        optimizer.zero_grad()
    first, second = ([whole_value(p.detach()) for p in model.parameters()] for model in models)
    return max(map(relative, first, second))


def test_an_optimizer_takes_states_of_numbers_that_torch_loads() -> None:
    assert max(rank_group(2).run(through_torch)) == 0.0


def numbers_held() -> tuple[set[str], int]:
    """The names of parameters of which a rank holds all; how many are whole of a module with a complex one alone."""
    model = ff.parallelize(built(torch.float32), mesh(1, 2), shard_parameters=True)
    named: dict[str, Any] = dict(model.module.named_parameters())
    alone = nn.ParameterDict({"alone": torch.ones(4, dtype=torch.complex64)})
    kept = KeptWhole(alone, "", named["temperature"].device_mesh)
    return {name for name, p in named.items() if p.to_local().numel() == p.numel()}, len(kept.parameters)


def test_what_is_whole_on_each_rank() -> None:
    expected = {"filter", "temperature", *(f"blocks.{n}.{own}" for n in range(3) for own in OF_A_BLOCK)}
    assert rank_group(2).run(numbers_held) == [(expected, 1)] * 2
