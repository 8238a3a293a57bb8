"""Weights that one rank alone has changed are found at the next pass, in a replica and over replicas."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullframe as ff
from fullframe.errors import DivergenceError
from fullframe.model.same import weights
from fullframe.model.same.weights import Weights, WeightsInTurn, require_same_weights
from fullframe.ranks.channel import Record
from fullframe.ranks.mesh import spatial_of
from tests.rank_group import rank_group


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)).double()


def with_frozen() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.0), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
    layers[3].requires_grad_(False)
    return nn.Sequential(*layers).double()


def test_each_parameter_has_its_turn_and_a_change_of_any_is_seen() -> None:
    parameters = list(small().parameters())
    before, after = WeightsInTurn(), WeightsInTurn()
    first = [before.look(parameters) for _ in parameters]
    with torch.no_grad():
        parameters[2].view(-1)[5] += 1e-12
    second = [after.look(parameters) for _ in parameters]
    assert [found.turn for found in first] == [0, 1, 2, 3] == [found.turn for found in second]
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, True]
    assert all(0 <= found.digest < 2**31 for found in first)


def test_a_large_parameter_is_looked_at_row_by_row() -> None:
    large = [nn.Parameter(torch.zeros(3, 8000))]
    before, after = WeightsInTurn(), WeightsInTurn()
    first = [before.look(large) for _ in range(3)]
    with torch.no_grad():
        large[0][1, 7] = 1
    assert [found == after.look(large) for found in first] == [True, False, True]


def test_what_is_elsewhere_is_not_looked_at() -> None:
    look = WeightsInTurn().look
    assert look([]) == look([]) == (0, 0, look([]).digest, 0)
    meta = [nn.Parameter(torch.zeros(3, device="meta"))]
    assert look(meta).digest == look(meta).digest


class _OnGpu(torch.Tensor):
    """Says of itself that it lies there."""

    is_cpu = property(lambda self: False)
    device = property(lambda self: torch.device("cuda"))


class _Event:
    """Of that GPU, which has come to nothing before the host waits."""

    def __init__(self, device: torch.device):
        self.begun = False

    def record(self) -> None:
        self.begun = True

    def synchronize(self) -> None:
        assert self.begun


@pytest.mark.parametrize("of_one_kind", [True, False])
def test_what_lies_on_a_gpu_is_read_a_call_later_and_only_where_all_are_of_one_kind(
    of_one_kind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu: Any = SimpleNamespace(mesh=SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(weights, "_are_of_one_kind", lambda spatial: of_one_kind)
    monkeypatch.setattr(weights, "_values", lambda parameter, row: parameter.detach().as_subclass(_OnGpu).flatten())
    monkeypatch.setattr(torch, "Event", _Event)
    parameters = list(small().parameters())
    before, after = WeightsInTurn(on_gpu), WeightsInTurn(on_gpu)
    first = [before.look(parameters) for _ in range(5)]
    with torch.no_grad():
        parameters[2].view(-1)[5] += 1e-12
    second = [after.look(parameters) for _ in range(5)]
    assert [found.turn for found in first[1:]] == ([0, 1, 2, 3] if of_one_kind else [1, 2, 3, 0])
    alike = [a == b for a, b in zip(first, second, strict=True)]
    assert alike == [True, True, True, not of_one_kind, True]


def test_the_parameter_and_the_ranks_are_named() -> None:
    named = list(small().named_parameters())
    with pytest.raises(DivergenceError, match=r"rank 5 holds other weights than rank 4, as those of 2\.weight show"):
        require_same_weights({4: Weights(4, 2, 7), 5: Weights(4, 2, 8)}, named)
    with pytest.raises(
        DivergenceError, match="other parameters that are trained than rank 0: 4 on rank 0, 2 on rank 1"
    ):
        require_same_weights({0: Weights(4, 2, 7), 1: Weights(2, 0, 8)}, named)
    require_same_weights({0: Weights(4, 2, 7), 1: Weights(4, 2, 7)}, named)


def _rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 2


def _skips(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _clips(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _loads(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module = model.module
    module.load_state_dict({name: 2 * value for name, value in module.state_dict().items()})


def _evaluates(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.module[1].eval()


def _sets(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.module[1].inplace = True


def _freezes(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.module[2].requires_grad_(False)


def _unfreezes(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.module[3].requires_grad_(True)


def _rounds(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.set_float32_matmul_precision("high")


CHANGES = {change.__name__: change for change in (_skips, _clips, _loads)}
STATES = {  # what is to be said of them
    _evaluates: "1 is in train() on rank 0, 1 is in eval() on rank 1",
    _sets: "1.inplace = False on rank 0, 1.inplace = True on rank 1",
    _freezes: "2.weight is trained on rank 0, 2.weight is frozen on rank 1",
    _rounds: "{0} highest on rank 0, {0} high on rank 1".format("torch.get_float32_matmul_precision()"),
    _unfreezes: "3.weight is frozen on rank 0, 3.weight is trained on rank 1",
}
CHANGES |= {change.__name__: change for change in (*STATES, _rate)}


def trained(width: int, change: str, build: Callable[[], nn.Module] = small) -> tuple[str, list[float]]:
    """Three steps; in the first, rank 1 does something of its own."""
    mesh = ff.init_mesh(width=width)
    generator = torch.Generator().manual_seed(0)
    image = ff.shard(torch.randn(1, 3, 8, 9, dtype=torch.float64, generator=generator), mesh)
    model = ff.parallelize(build(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for number in range(3):
            model(image).square().mean().backward()
            if change and number == 0 and dist.get_rank() == 1:
                CHANGES[change](model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    except DivergenceError as error:
        return str(error), []
    finally:
        torch.set_float32_matmul_precision("highest")
    return "", [parameter.sum().item() for parameter in model.parameters()]


@pytest.mark.parametrize("width", [1, 2])
def test_weights_of_one_rank_alone_are_refused_on_all(width: int) -> None:
    for change in CHANGES.keys() - {state.__name__ for state in STATES} - {"_rate"}:
        for said, _ in rank_group(2).run(trained, width, change):
            assert said.startswith("rank 1 holds other weights than rank 0, as those of "), (change, said)
    (said, first), (_, second) = rank_group(2).run(trained, width, "")
    assert not said and first == second


@pytest.mark.parametrize("width", [1, 2])
def test_a_model_in_another_state_on_one_rank_alone_is_refused_on_all(width: int) -> None:
    for change, differs in STATES.items():
        for said, _ in rank_group(2).run(trained, width, change.__name__, with_frozen):
            assert said.startswith(f"rank 1 has its model in another state than rank 0: {differs}, so"), (change, said)


def recorded(change: str) -> str:
    """As where heads do not travel with messages: what was sent is compared at the end of backward."""
    channels = spatial_of(ff.init_mesh(width=2)).channels
    kept = [dict(vars(channel)) for channel in channels]
    for channel in channels:
        channel.boxes = channel.heads = channel.carrier = None
        channel.record = Record()
    try:
        return trained(2, change, with_frozen)[0]
    finally:
        for channel, before in zip(channels, kept, strict=True):
            vars(channel).update(before)


def test_a_model_in_another_state_is_refused_where_heads_do_not_travel() -> None:
    for change, differs in STATES.items():
        if change is _freezes:  # DDP sends in another order there, and all wait
            continue
        for said in rank_group(2).run(recorded, change.__name__):
            assert said.startswith(f"rank 1 has its model in another state than rank 0: {differs}, so"), (change, said)
    for said in rank_group(2).run(recorded, "_rate"):
        assert said.startswith("the ranks do not take the same steps: the optimizer's lr, group 0, is 0.1 on rank 0")
    assert rank_group(2).run(recorded, "") == [""] * 2


def scheduled(width: int) -> str:
    """Two steps; after the first, rank 1 sets another option, by which the last one would go."""
    mesh = ff.init_mesh(width=width)
    model = ff.parallelize(small(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for number in range(2):
            model(ff.shard(torch.ones(1, 3, 8, 9, dtype=torch.float64), mesh)).square().mean().backward()
            optimizer.step()
            if number == 0 and dist.get_rank() == 1:
                optimizer.param_groups[0]["weight_decay"] = 0.3
    except DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("width", [1, 2])
def test_an_option_that_one_rank_alone_sets_is_refused_before_the_last_step(width: int) -> None:
    start = "the ranks do not take the same steps: the optimizer's"
    for said in rank_group(2).run(scheduled, width):
        assert said.startswith(f"{start} weight_decay, group 0, is 0 on rank 0")
    for said, _ in rank_group(2).run(trained, width, "_rate"):
        assert said.startswith(f"{start} lr, group 0, is 0.1 on rank 0, the optimizer's lr, group 0, is 0.2 on rank 1")


def freezes(width: int) -> str:
    mesh = ff.init_mesh(width=width)
    model = ff.parallelize(small(), mesh)
    if dist.get_rank() == 1:
        model.module[2].requires_grad_(False)
    try:
        model(ff.shard(torch.ones(1, 3, 8, 9, dtype=torch.float64), mesh))
    except DivergenceError as error:
        return str(error)
    return ""


def test_parameters_that_one_rank_alone_trains_are_refused() -> None:
    for said in rank_group(2).run(freezes, 2):
        assert "2.weight is trained on rank 0, 2.weight is frozen on rank 1" in said
