"""What users' optimizers and averages read of sharded parameters, and assign to them, is one process's, or refused."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import GradientError, ShapeError
from fullframe.model.sharding.values import is_sharded, whole_value
from tests.exactness import mesh
from tests.rank_group import rank_group


def net() -> nn.Module:
    """Five and three rows over two ranks: parts of different sizes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, 3, 1)).double()


class Lars(torch.optim.Optimizer):
    """As it is written by hand: norms are read on the host."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                size, slope = parameter.data.norm().item(), float(parameter.grad.data.norm())
                if parameter.grad.abs().max() > 0:
                    parameter.data.add_(parameter.grad.data, alpha=-0.1 * size / slope)


Between = Callable[[Any, int], None]


def nothing(model: Any, step: int) -> None:
    pass


def swapped(model: Any, step: int) -> None:
    """An average is evaluated in the place of the parameters, as EMA is written by hand."""
    kept = {parameter: parameter.data for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        model(_image(model, 5))
    for parameter in model.parameters():
        parameter.data = kept[parameter]


def assigned_and_cast(model: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = 0.9 * parameter.data
    model.double()


def assigned_whole(model: Any, step: int) -> None:
    """As `vector_to_parameters` does it."""
    whole = [whole_value(parameter.detach()) for parameter in model.parameters()]
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(whole).mul(0.8), model.parameters())


def perturbed(model: Any, step: int) -> None:
    """A gradient is taken elsewhere, as SAM does it."""
    kept = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.add_(0.1)
    model(_image(model, 7)).square().mean().backward()
    for parameter, data in zip(model.parameters(), kept, strict=True):
        parameter.data = data


def loaded(model: Any, step: int) -> None:
    """Pretrained parts, whole, into the model that is sharded."""
    pretrained = net()
    with torch.no_grad():
        for parameter in pretrained.parameters():
            parameter.mul_(0.5 + step)
    inner = getattr(model, "module", model)
    inner[0].load_state_dict(pretrained[0].state_dict())  # type: ignore[index]
    if step < 0:  # before the optimizer is made
        part = {name: value for name, value in pretrained.state_dict().items() if name.startswith("2.")}
        said = inner.load_state_dict(part, strict=False, assign=True)
        assert said.missing_keys == ["0.weight", "0.bias"]


def written_whole(model: Any, step: int) -> None:
    """Pretrained values, noise, a mask of pruning and an average, whole as they were saved."""
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, dtype=torch.float64)
            if step == 0:
                parameter.copy_(whole)
            parameter.add_(whole, alpha=0.1).mul_(whole > 0).lerp_(whole, 0.2).sub_(0.1 * whole)


BETWEEN: list[Between] = [nothing, swapped, assigned_and_cast, assigned_whole, perturbed, loaded, written_whole]


def _image(model: Any, seed: int) -> Tensor:
    image = torch.randn(2, 3, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return ff.shard(image, mesh(1, 2)) if isinstance(getattr(model, "module", None), nn.Module) else image


def _steps(model: Any, between: Between) -> list[Tensor]:
    if between is loaded:
        between(model, -1)
    optimizer = Lars(model.parameters())
    for step in range(3):
        between(model, step)
        model(_image(model, step)).sin().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole_value(parameter.detach()) for parameter in model.parameters()]


def _compare() -> None:
    for between in BETWEEN:
        model = ff.parallelize(net(), mesh(1, 2), shard_parameters=True)
        found = _steps(model, between)
        torch.testing.assert_close(found, _steps(net(), between), rtol=1e-11, atol=1e-13)


def test_what_is_assigned_to_data_and_read_in_a_step() -> None:
    rank_group(2).run(_compare)


def _resumed(model: Any, before: Any, make: Callable[..., Any]) -> list[Tensor]:
    """The whole states that one process has saved."""
    optimizer = make(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))  # what is loaded is written to
    for step in range(3):
        model(_image(model, step)).sin().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole_value(parameter.detach()) for parameter in model.parameters()]


def _compare_resumed() -> None:
    for make in (partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=0.05, amsgrad=True)):
        first = net()
        before = make(first.parameters())
        first(_image(first, 9)).square().mean().backward()
        before.step()
        model = ff.parallelize(net(), mesh(1, 2), shard_parameters=True)
        torch.testing.assert_close(_resumed(model, before, make), _resumed(net(), before, make), rtol=1e-11, atol=1e-13)


def test_an_optimizer_takes_whole_states() -> None:
    rank_group(2).run(_compare_resumed)


READS: list[Callable[[Any], Any]] = [
    lambda weight: weight.norm().item(),
    lambda weight: float(weight.square().sum()),
    lambda weight: int(weight.sum()),
    lambda weight: weight.abs().max().item(),
    lambda weight: f"{weight.norm():.3f}",
    lambda weight: weight.norm().tolist(),
    lambda weight: bool(weight.isnan().any()),
    lambda weight: 1 if weight.isfinite().all() else 0,
]
# By torch itself of all ranks from 2.15 on: any() and all(), the last two.
OF_ALL_RANKS = READS[-2:] if torch.__version__ >= "2.15" else []


def _read() -> float:
    """After a step that ended by an error."""
    model = ff.parallelize(net(), mesh(1, 2), shard_parameters=True)
    with pytest.raises(AttributeError):
        Lars(model.parameters()).step()  # there is no gradient
    model(_image(model, 0)).square().mean().backward()
    weight: Any = next(model.parameters()).detach()
    assert is_sharded(weight)
    assert [read(weight) for read in OF_ALL_RANKS] == [False, 1][: len(OF_ALL_RANKS)]
    for read in READS[: len(READS) - len(OF_ALL_RANKS)]:
        with pytest.raises(GradientError, match=r"call .full_tensor\(\) on it before"):
            read(weight)
    assert weight.full_tensor().norm().item() == pytest.approx(weight.norm().full_tensor().item())
    assert bool(weight.norm() > 0)
    whole = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert is_sharded(whole)
    assert f"{whole:.3f}" == f"{whole.tolist():.3f}" == f"{whole.item():.3f}"
    with pytest.raises(
        ShapeError, match=r"shape \(5, 3, 3, 3\) and torch.float64 something of shape \(5, 3, 3, 3\) and"
    ):
        weight.data = weight.float()
    return weight.norm().full_tensor().item()  # type: ignore[no-any-return]


def test_a_number_that_is_this_ranks_alone_is_refused() -> None:
    expected = next(net().parameters()).norm().item()
    assert rank_group(2).run(_read) == pytest.approx([expected, expected])


class Weighing(nn.Module):
    """A model that holds the weights of the losses, which the loop takes past forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.logs = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


def _weighed(data: int, width: int, before: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net, images = Weighing().double(), torch.randn(2, 3, 5, 7, dtype=torch.float64)
    on = mesh(1, width)
    model = ff.parallelize(net, on, shard_parameters=data * width > 1)
    for image in images.chunk(data)[on.get_local_rank("data")].split(1):
        logs = whole_value(model.module.logs) if before else None
        out = model(ff.shard(image, on) if width > 1 else image)
        logs = whole_value(model.module.logs) if logs is None else logs
        losses = torch.stack([out.square().mean(), out.abs().mean(), (out - 1).abs().mean()])
        ((logs.neg().exp() * losses + logs / 2).sum() / (2 / data)).backward()
    return [whole_value(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize(("data", "width"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("before", [True, False])
def test_a_gradient_of_a_whole_value_is_one_process_s(data: int, width: int, before: bool) -> None:
    expected = _weighed(1, 1, before)
    for found in rank_group(data * width).run(_weighed, data, width, before):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
