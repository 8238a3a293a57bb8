"""Every rule's messages under NCCL's rules, on all ranks of a job; and a step of networks on eight ranks.

The ranks are run one after the other on the CUDA-like device, with a process group whose messages go nowhere.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fullframe as ff
from fullframe.ranks.channel import difference
from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.ranks.mesh import spatial_of, stage_axis
from fullframe.ranks.stage_messages import Form, receive, send
from fullframe.simulation.fake.data_parallel import FakeDataParallel
from fullframe.simulation.fake.world import fake_job
from fullframe.training.step import TrainStep
from tests.cuda_like.communication import Call, Sent, faults
from tests.cuda_like.device import counted, to_device
from tests.cuda_like.launches import asked, decided_by_a_mask
from tests.cuda_like.models import moved, one_rank
from tests.cuda_like.ranks import device_ranks
from tests.models.matching_networks import TokenEncoder
from tests.models.networks import FPN, UNet
from tests.spatial.cases import Case, all_cases, every_fourth, one

# What is sent hangs on values, which a rank alone has not.
DECIDED_BY_VALUES = (
    "linear_algebra: lstsq, one without residuals", "reshape: repeat_interleave by a tensor",
    "tables: isin of split elements", "unpooling: a small SegNet",
)  # fmt: skip
MORE = {
    "16-bit integers": one(lambda x: x.detach().to(torch.int16).roll((1, 1), (2, 3))),
    "8-bit integers": one(lambda x: x.detach().to(torch.uint8).roll((1, 1), (2, 3))),
    "channels last": one(lambda x: torch.roll(x.contiguous(memory_format=torch.channels_last), (1, 1), (2, 3))),
}  # fmt: skip


def _cases(every: int) -> dict[str, Case]:
    return {name: case for name, case in (all_cases(every) | MORE).items() if not name.startswith(DECIDED_BY_VALUES)}


def _faults_of_rules(height: int, width: int, every: int) -> dict[str, list[str]]:
    """Of this process's share of the cases, each on all ranks of a job, whose records must be equal too."""
    cases = _cases(every)
    mine = sorted(cases)[dist.get_rank() :: dist.get_world_size()]
    logs: dict[str, list[list[Call]]] = {name: [] for name in mine if not decided_by_a_mask(asked(cases[name], None))}
    records: dict[str, list[Any]] = {name: [] for name in logs}
    for rank in range(height * width):
        with fake_job(rank, height * width):
            with counted() as first:
                on = ff.init_mesh(height, width)
                ff.shard(torch.zeros(height, width), on, check=False)
            for name, log in logs.items():
                forward, backward = asked(cases[name], on)
                log.append([*first.calls, *forward.calls, *backward.calls])
                records[name].append(_written_down(on))
    return {name: faults(log) + _differences(records[name]) for name, log in logs.items()}


def _written_down(on: DeviceMesh) -> list[tuple[tuple[int, ...], int, list[bytes]]]:
    """The heads that this rank would compare with others' after backward, by their ranks; they are forgotten."""
    found = []
    for channel in spatial_of(on).channels:
        assert channel.record is not None
        found.append((channel.ranks, channel.record.count, list(channel.record.last)))
        channel.record.forget()
    return found


def _differences(records: list[Any]) -> list[str]:
    """What the ranks would say of their records, by channel."""
    return [said for of_channel in zip(*records, strict=True) if (said := difference(dict(enumerate(of_channel))))]


@pytest.mark.timeout(900)
@every_fourth
def test_every_rule_keeps_nccls_rules(every: int) -> None:
    found = {
        name: said
        for rank in device_ranks().run(_faults_of_rules, 2, 2, every, timeout_seconds=800)
        for name, said in rank.items()
    }
    assert len(found) > 500 / every
    assert {name: said[:3] for name, said in found.items() if said} == {}


def _messages(place: Callable[[Tensor], Tensor]) -> list[list[tuple[str, Any]]]:
    """What this rank sends of an image that lies where `place` puts it, one list an op."""
    ops: tuple[Callable[[Tensor], Any], ...] = (
        lambda x: x.full(),  # type: ignore[attr-defined]
        lambda x: x.sum(),
        lambda x: nn.functional.conv2d(x, place(torch.ones(1, 3, 3, 3)), padding=1),
        lambda x: x.roll(1, 3),
        lambda x: x.short().roll(1, 3),
    )
    found = []
    with one_rank(0, 2):
        on = ff.init_mesh(width=2)
        x = ff.shard(place(torch.zeros(1, 3, 8, 16)), on, check=False)
        for op in ops:
            with counted() as counts:
                op(x)
            found.append([(call.kind, call.parts) for call in counts.calls])
    return found


def _of_the_host() -> bool:
    there = _messages(to_device)
    assert all(there)
    return _messages(lambda tensor: tensor) == there


def test_what_lies_on_the_host_goes_by_the_device() -> None:
    """As after `x.cpu()`: NCCL takes nothing else, and a job may have NCCL alone."""
    assert device_ranks().run(_of_the_host) == [True] * 2


def _between_stages(dtypes: list[torch.dtype]) -> list[list[Call]]:
    """What either of two stages calls where one sends the other tensors of one shape, the first not contiguous.

    The last lies on the host, and is there on the other one too.
    """
    logs = []
    for rank in range(2):
        with fake_job(rank, 2):
            axis = stage_axis(ff.init_mesh(stages=2))
            tensors = [*(to_device(torch.zeros(3, 3, dtype=dtype)) for dtype in dtypes), torch.zeros(3, 3)]
            with counted() as counts:
                all_sum_no_grad(tensors[0].real, axis.group)
                if rank == 0:
                    send(axis, 1, [tensors[0].t(), *tensors[1:]], "state").wait()
                else:
                    came = receive(axis, 0, [Form.of(tensor) for tensor in tensors], "state", tensors[0].device)
                    assert [tensor.device for tensor in came] == [tensor.device for tensor in tensors]
        logs.append(counts.calls)
    return logs


@pytest.mark.parametrize("others", [torch.int64, torch.complex64, torch.int16])
def test_what_stages_send_of_several_dtypes_keeps_nccls_rules(others: torch.dtype) -> None:
    for logs in device_ranks().run(_between_stages, [torch.float32, others, torch.float32]):
        assert faults(logs) == []


NETWORKS: dict[str, Callable[[], nn.Module]] = {"UNet": UNet, "FPN": FPN, "tokens": TokenEncoder}


def _loss(model: nn.Module, image: Tensor) -> Tensor:
    outputs: Any = model(image)
    outputs = [t for pair in outputs for t in pair] if isinstance(outputs, list) else [outputs]
    return sum(t.square().mean() for t in outputs)  # type: ignore[return-value]


def _step(network: str, height: int, layout: torch.memory_format, rank: int) -> list[Call]:
    """What `rank` of two replicas of `height` x (4 / `height`) ranks sends in all, with a step."""
    torch.manual_seed(0)
    with one_rank(rank, 8), counted() as counts:
        on = ff.init_mesh(height, 4 // height)
        built = moved(NETWORKS[network]()).to(memory_format=layout)
        model = ff.parallelize(built, on, data_parallel=FakeDataParallel)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(model, _loss, optimizer, ff.Strategy(data=2, height=height, width=4 // height))
        x = to_device(torch.randn(2, 3, 50, 76)).contiguous(memory_format=layout)
        step(ff.shard(x, on, check=False))
    return counts.calls


def _steps(network: str, height: int, layout: torch.memory_format) -> list[tuple[int, list[Call]]]:
    mine = range(dist.get_rank(), 8, dist.get_world_size())
    return [(rank, _step(network, height, layout, rank)) for rank in mine]


# Side by side, the inner ranks pack a strip for either neighbour.
@pytest.mark.parametrize(("height", "layout"), [(2, torch.contiguous_format), (1, torch.channels_last)])
@pytest.mark.parametrize("network", NETWORKS)
def test_eight_ranks_of_a_network_keep_nccls_rules(network: str, height: int, layout: torch.memory_format) -> None:
    by_rank = dict(pair for part in device_ranks().run(_steps, network, height, layout) for pair in part)
    logs = [by_rank[rank] for rank in range(8)]
    assert faults(logs) == []
    kinds = {call.kind.split()[0] for call in logs[0]}
    assert {"batch", "allreduce_", "broadcast_"} <= kinds
    assert any("data_parallel" in call.line for call in logs[0])


def batch(
    *messages: tuple[str, int], to: int = 4, dtype: str = "torch.float32", line: str = "x.py:1", tight: bool = True
) -> Call:
    """A call of group "a" of ranks 0, 1 and 2: ("send", 1), ("receive", 1)."""
    return Call(
        "a", (0, 1, 2), "batch", tuple((what, peer, Sent((to,), dtype, tight)) for what, peer in messages), line
    )


def everyone(kind: str = "allreduce_", size: int = 1, line: str = "x.py:1") -> Call:
    return Call("a", (0, 1, 2), kind, (("all", -1, Sent((size,), "torch.float32", True)),), line)


OPEN = everyone()
SWAP = [[batch(("send", 1), ("receive", 1))], [batch(("receive", 0), ("send", 0))], []]
LOGS = {
    "in order": ([[OPEN, *log] for log in SWAP], None),
    "a chain": (
        [[OPEN, batch(("send", 1))], [OPEN, batch(("send", 2), ("receive", 0))], [OPEN, batch(("receive", 1))]], None
    ),
    "first call of some": (SWAP, "the first call of group a is made by [0, 1] of [0, 1, 2]"),
    "crossed": ([[OPEN, everyone(), *SWAP[0]], [OPEN, *SWAP[1], everyone()], [OPEN, everyone()]], "waits for ever"),
    "nobody receives": ([[OPEN, batch(("send", 1))], [OPEN], [OPEN]], "waits for ever"),
    "another size": ([[OPEN, batch(("send", 1))], [OPEN, batch(("receive", 0), to=3)], [OPEN]], "waits for ever"),
    "another dtype": (
        [[OPEN, batch(("send", 1))], [OPEN, batch(("receive", 0), dtype="torch.int32")], [OPEN]], "waits for ever"
    ),
    "sums of other sizes": ([[OPEN, everyone(size=2)], [OPEN, everyone()], [OPEN, everyone()]], "waits for ever"),
    "a sum and a broadcast": ([[everyone("broadcast_")], [everyone()], [everyone()]], "waits for ever"),
    "one is missing": ([[OPEN], [OPEN], []], "waits for ever"),
    "not contiguous": (
        [[OPEN, batch(("send", 1), tight=False)], [OPEN, batch(("receive", 0))], [OPEN]], "not contiguous"
    ),
    "complex": (
        [[OPEN, batch(("send", 1), dtype="torch.complex64")], [OPEN, batch(("receive", 0), dtype="torch.complex64")],
         [OPEN]], "which NCCL does not know"
    ),
    "gradients beside an exchange": (
        [[OPEN, *log, everyone(line="model/averaging.py:3")] for log in SWAP], "by the communicator a of exchanges"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_the_checker_finds(name: str) -> None:
    logs, said = LOGS[name]
    found = faults(logs)
    assert found == [] if said is None else any(said in fault for fault in found), found
