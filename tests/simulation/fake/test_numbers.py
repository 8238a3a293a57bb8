"""Numbers that a program makes tensors of are read as they are; those written from elsewhere are not known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import fullframe as ff
from fullframe.simulation.fake.numbers import DRAWN, FEW
from fullframe.simulation.fake.outcomes import Outcomes
from fullframe.simulation.simulate import simulate
from tests.simulation.fake.test_outcomes import Remembering

Program = Callable[[Tensor], Any]
GENERATOR = torch.Generator()

KNOWN: dict[str, Program] = {
    "axes of MONAI's losses": lambda x: torch.arange(2, x.dim()).tolist(),
    "timm's rates of layers": lambda x: [rate.item() for rate in torch.linspace(0, 1, 3)],
    "deformable attention's levels": lambda x: [
        (shapes := torch.as_tensor([[4, 5], [2, 3]])).prod(1).sum().item(),
        torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]]).tolist(),
        bool((shapes[:, 0] * shapes[:, 1]).sum() == 26),
    ],
    "what is picked": lambda x: [
        (kept := torch.tensor([3, 1, 3, 0])).unique(return_counts=True),
        kept.nonzero(),
        kept[kept > 0],
        kept.equal(kept + 0),
    ],
    "in place": lambda x: [numbers := torch.arange(4), numbers.add_(1), numbers.tolist()],
    "through a view": lambda x: [numbers := torch.arange(4), numbers[1:].mul_(3), numbers.tolist()],
    "a base, and a view": lambda x: [view := (numbers := torch.zeros(4)).view(2, 2), numbers.add_(2), view.tolist()],
    "out=": lambda x: [numbers := torch.arange(4), torch.add(numbers, 1, out=numbers), numbers.tolist()],
    "a part": lambda x: [numbers := torch.zeros(4), numbers.narrow(0, 1, 2).fill_(7), numbers.tolist()],
    "as one of a list": lambda x: [n := torch.zeros(4), torch._foreach_add_([n], 1), n.tolist()],
    "drawn": lambda x: [torch.manual_seed(0), torch.rand(4).tolist(), int(torch.randint(2, 9, (1,)))][1:],
    "drawn over": lambda x: [torch.manual_seed(0), n := torch.zeros(4), n.uniform_(), (n > 0.5).tolist()][1:],
    "by index": lambda x: [n := torch.zeros(4), n.index_put_((torch.tensor([1]),), torch.tensor(5.0)), n.tolist()],
}


@pytest.mark.parametrize("name", KNOWN)
def test_they_are_those_of_torch(name: str) -> None:
    real = KNOWN[name](torch.ones(2, 3, 4, 5))
    fake = FakeTensorMode()
    with fake, Remembering(Outcomes(fake)):
        for _ in range(2):
            _require_alike(KNOWN[name](torch.empty(2, 3, 4, 5)), real)


def _require_alike(found: Any, real: Any) -> None:
    if isinstance(real, Tensor):
        assert (found.shape, found.dtype, found.tolist()) == (real.shape, real.dtype, real.tolist())
    elif isinstance(real, (list, tuple)):
        for each, other in zip(found, real, strict=True):
            _require_alike(each, other)
    else:
        assert found == real


def _written(numbers: Tensor, x: Tensor) -> None:
    numbers[1:].copy_(x)


UNKNOWN: dict[str, Program] = {
    "unset": lambda x: torch.empty(4).tolist(),
    "drawn from the program's own generator": lambda x: torch.rand(4, generator=GENERATOR).tolist(),
    "many": lambda x: torch.zeros(FEW + 1).sum().item(),
    "of an image": lambda x: (torch.arange(4) * x[0, 0, 0, :4]).tolist(),
    "written to": lambda x: [n := torch.zeros(4), n.add_(x[0, 0, 0, 0]), n.tolist()],
    "written to a view": lambda x: [n := torch.zeros(4), _written(n, x[0, 0, 0, :3]), n.tolist()],
    "written to a base": lambda x: [v := (n := torch.zeros(4)).view(2, 2), n.copy_(x[0, 0, 0, :4]), v.tolist()],
    "drawn over, from its own": lambda x: [n := torch.zeros(4), n.uniform_(generator=GENERATOR), n.tolist()],
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_not_read(name: str) -> None:
    fake = FakeTensorMode()
    with fake, Remembering(Outcomes(fake)), pytest.raises(DataDependentOutputException):
        UNKNOWN[name](torch.empty(2, 3, 4, 5))


def test_that_a_drawn_number_is_read_is_said() -> None:
    before = GENERATOR.get_state()
    outcomes = Outcomes(fake := FakeTensorMode())
    with fake, Remembering(outcomes):
        torch.rand(3) * 2
        assert torch.arange(3).tolist() == [0, 1, 2] and not outcomes.notes
        assert 0 <= (torch.rand(()) * 2).item() <= 2
    assert outcomes.notes == {DRAWN} and GENERATOR.get_state().equal(before)


PICKED: dict[str, Program] = {
    "index": lambda x: x[torch.tensor([True, False])],
    "index of rows": lambda x: x[:, :, torch.arange(4) > 2],
    "masked_select": lambda x: x[0, 0].masked_select(torch.arange(5) < 3),
    "writing": lambda x: x.index_put((torch.arange(2) > 0,), x[torch.arange(2) > 0] * 2),
}


@pytest.mark.parametrize("name", PICKED)
def test_a_known_mask_picks_what_it_picks_also_of_an_image(name: str) -> None:
    real, outcomes = PICKED[name](torch.ones(2, 3, 4, 5)), Outcomes(fake := FakeTensorMode())
    with fake, Remembering(outcomes):
        assert PICKED[name](torch.empty(2, 3, 4, 5)).shape == real.shape
    assert not outcomes.notes


class Grid(nn.Module):
    """A view from above whose size a parameter and a buffer hold, as Lift-Splat's; a count that it reads of labels."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.tensor([6, 9]), requires_grad=False)
        self.register_buffer("channels", torch.tensor(4))
        self.lift = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        above = x.new_zeros(len(x), int(self.channels), *(int(size) for size in self.size))
        return above + self.lift(x).mean((2, 3), keepdim=True)


@pytest.mark.parametrize("strategy", [ff.Strategy(), ff.Strategy(width=2), ff.Strategy(data=2)])
def test_a_model_reads_its_buffers_and_a_loss_the_labels_of_the_first_sample(strategy: ff.Strategy) -> None:
    counts = list[int]()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        counts.append(int(batch["boxes"].unique(return_counts=True)[1].max()))
        return model(batch["image"]).square().mean()

    sample = {"image": torch.ones(3, 16, 20), "boxes": torch.tensor([1, 1, 5])}
    made = Grid()
    recipe = ff.Recipe(
        model=lambda: made,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: [sample],  # type: ignore[arg-type,return-value]
        batch_size=2,
    )
    prediction = simulate(recipe, strategy, "2xA100-80GB")
    assert prediction.peak_bytes and counts[0] == 4 // strategy.data
    assert not any("numbers" in note for note in prediction.notes)
    assert (made.size.device.type, sample["boxes"].tolist()) == ("cpu", [1, 1, 5])
