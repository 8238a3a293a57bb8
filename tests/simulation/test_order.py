"""What orders, counts or draws by values can be simulated, without values; or is refused by name."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import Dataset

import fullframe as ff
from benchmarks.communication.traffic import MESSAGES, by_process_groups
from fullframe.ranks.channel import channel_of
from fullframe.ranks.mesh import spatial_of
from fullframe.ranks.tags import HEAD_BYTES
from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.fake.outcomes import Outcomes
from fullframe.simulation.fake.world import fake_job
from fullframe.simulation.memory.trace import Tracer
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Op

OPS: dict[str, Op] = {
    "topk": lambda x: x.topk(3).values,
    "topk of tokens": lambda x: x.flatten(2).topk(9, sorted=False).values,
    "sort": lambda x: x.sort(2).values,
    "median": lambda x: x.median() + x.nanmedian(),
    "median along a dim": lambda x: x.median(3).values,
    "mode": lambda x: x.mode().values,
    "quantile": lambda x: x.quantile(0.3, 3),
    "histc": lambda x: x + x.detach().histc(5)[0],
    "bincount": lambda x: x + x.detach().long().flatten().bincount(minlength=9)[0],
    "running products": lambda x: x.cumprod(3) + x.cummax(2).values + x.logcumsumexp(3),
    "areas": lambda x: torch.trapezoid(x),
    "positions": lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1) * 2 - 1, align_corners=False),  # all rows are read
    "places": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "draws": lambda x: torch.normal(x, x.abs()) + torch.poisson(x.abs()),
    "numbers by weights": lambda x: x + x.abs().flatten(1).multinomial(3).sum(),
    "slopes": lambda x: F.rrelu(x, training=True) + F.gumbel_softmax(x, hard=True, dim=2),
}
REFUSED: dict[str, Op] = {
    "unique": lambda x: x.detach().unique().sum() + x,
    "unique_consecutive": lambda x: x.detach().unique_consecutive().sum() + x,
    "minlength": lambda x: x.detach().long().flatten().bincount().sum() + x,
}


class _Ordered(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.first, self.op = nn.Conv2d(3, 4, 3, padding=1), op

    def forward(self, image: Tensor) -> Tensor:
        return self.op(self.first(image))  # type: ignore[no-any-return]


class _Images(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": torch.zeros(3, 20, 36)}


def _simulated(op: Op, device: str = "A100-80GB") -> int:
    recipe = ff.Recipe(
        model=lambda: _Ordered(op),
        loss=lambda model, batch: model(batch["image"]).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=_Images,
        batch_size=2,
    )
    return ff.simulate(recipe, ff.Strategy(height=2, width=2), device=device).peak_bytes


@pytest.mark.parametrize("name", OPS)
def test_what_needs_no_value_can_be_simulated(name: str) -> None:
    assert _simulated(OPS[name]) > 0


def test_a_place_by_tensors_without_dims_can_be_simulated() -> None:
    assert _simulated(lambda x: x[:, :, torch.tensor(2), torch.tensor(-1)]) > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_its_shape_from_values_is_refused_by_name(name: str) -> None:
    with pytest.raises(ff.UnsupportedOp, match=name):
        _simulated(REFUSED[name])


def _messages(name: str, image: Tensor) -> list[int]:
    """Bytes of each message of a rank of 2 x 2, forward and backward; without heads, and none by shared memory."""
    x = ff.shard(image, mesh(2, 2), check=False).requires_grad_()
    with by_process_groups() as traffic:
        OPS[name](x).sum().backward()
    return sorted(call.bytes for call in traffic.calls if (call.kind, call.bytes) != (MESSAGES, HEAD_BYTES))


def _really_sent(name: str) -> list[int]:
    return _messages(name, torch.rand(2, 4, 20, 36, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("name", OPS)
def test_as_many_bytes_are_sent_in_a_simulation(name: str) -> None:
    for rank, sent in enumerate(rank_group(4).run(_really_sent, name)):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake_job(rank, 4), Tracer({}, {}, Outcomes(fake), lambda *_: 0), fake:
            for group in spatial_of(mesh(2, 2)).groups.values():
                channel_of(group).gathers = False  # as of ranks with gloo
            assert _messages(name, torch.empty(2, 4, 20, 36)) == sent


@pytest.mark.parametrize(("device", "by_one_call"), [("cpu", False), ("A100-80GB", True)])
def test_equal_parts_are_made_whole_by_one_call_where_the_ranks_have_gpus(device: str, by_one_call: bool) -> None:
    """Gloo's ranks send each part to each rank."""
    row = 2 * 4 * 20 * 36 * 4  # of the whole tensor, in halves
    with mock.patch.object(StepClock, "communicate", autospec=True, side_effect=StepClock.communicate) as said:
        _simulated(OPS["draws"], device)
    calls = {(call.args[1].strip("_"), call.args[2]) for call in said.call_args_list}
    assert (("allgather_base", row // 2) in calls or ("allgather_base", row) in calls) == by_one_call, calls
