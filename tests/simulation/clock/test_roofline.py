"""The clocks: operations and bytes of ops against numbers worked out by hand, and time lines drawn."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullframe.simulation.clock.efficiency import Efficiency
from fullframe.simulation.clock.roofline import KINDS, StepClock
from fullframe.simulation.clock.timed_ops import MeasuredClock
from fullframe.simulation.devices.host_costs import HostCosts
from fullframe.simulation.devices.table import Cluster, Device, device_named

aten = torch.ops.aten
PEAK = Efficiency(matmul=1, convolution=1, grouped=1, attention=1, depthwise=1, memory=1, link=1, network=1, host=1,
                  kernel_seconds=0, message_host_seconds=0)  # fmt: skip


def device(**changed: Any) -> Device:
    """1 operation or byte a second, and no overhead: seconds are the larger of operations and bytes."""
    figures: dict[str, Any] = {
        "name": "ideal",
        "memory_bytes": 2**30,
        "matmul_flops_per_second": {"fp32": 1.0},
        "memory_bytes_per_second": 1.0,
        "launch_seconds": 0.0,
        "link_bytes_per_second": 100.0,
        "link_latency_seconds": 0.0,
        "network_bytes_per_second": 10.0,
        "network_latency_seconds": 0.0,
        "host_bytes_per_second": 50.0,
        "context_bytes": 0,
        "has_bf16": True,
    }
    return Device(**{**figures, **changed})


class Recorded(TorchDispatchMode):
    """Every op goes to the clock."""

    def __init__(self, clock: StepClock):
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.clock.record(func, args, kwargs or {}, out)
        return out


def seconds_of(program: Any, *shapes: tuple[int, ...], device: Device, dtype: torch.dtype = torch.float32,
               precision: str = "fp32") -> dict[str, float]:  # fmt: skip
    """What each kind of op takes in `program` on fake tensors of these shapes, without those that take nothing."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point) for shape in shapes]
        clock = StepClock(device, precision, efficiency=PEAK)
        with Recorded(clock):
            program(*inputs)
    assert sum(clock.seconds.values()) == pytest.approx(clock.step_seconds)
    return {kind: value for kind, value in clock.seconds.items() if value}


OPERATIONS = [
    # program, shapes, kind, operations: two for every multiplication
    (lambda a, b: a @ b, [(3, 4), (4, 5)], "matmul", 2 * 3 * 4 * 5),
    (lambda a, b: (a @ b).sum().backward(), [(3, 4), (4, 5)], "matmul", 3 * 2 * 3 * 4 * 5),
    (lambda a, b: torch.bmm(a, b), [(2, 3, 4), (2, 4, 5)], "matmul", 2 * 2 * 3 * 4 * 5),
    (lambda x, w: F.conv2d(x, w, padding=1), [(2, 3, 8, 8), (4, 3, 3, 3)], "convolution", 2 * 2 * 64 * 4 * 27),
    (lambda x, w: F.conv2d(x, w, stride=2), [(1, 3, 8, 8), (4, 3, 2, 2)], "convolution", 2 * 16 * 4 * 12),
    (lambda x, w: F.conv2d(x, w, groups=2), [(1, 4, 5, 5), (6, 2, 1, 1)], "convolution", 2 * 25 * 6 * 2),
    (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(1, 3, 4, 4), (3, 5, 2, 2)], "convolution", 2 * 16 * 3 * 5 * 4),
    (lambda x, w: F.conv3d(x, w), [(1, 2, 4, 4, 4), (3, 2, 1, 1, 1)], "convolution", 2 * 64 * 3 * 2),
    # backward: the gradients of input and weight each take as many again
    (lambda x, w: F.conv2d(x, w, padding=1).sum().backward(), [(2, 3, 8, 8), (4, 3, 3, 3)], "convolution",
     3 * 2 * 2 * 64 * 4 * 27),
    (lambda x, w: F.conv2d(x, w, padding=1, groups=4).sum().backward(), [(1, 4, 8, 8), (4, 1, 3, 3)], "convolution",
     3 * 2 * 64 * 4 * 9),
    (lambda x, w: F.conv2d(x.detach(), w).sum().backward(), [(1, 3, 8, 8), (4, 3, 1, 1)], "convolution",
     2 * 2 * 64 * 4 * 3),
    (lambda q, k: F.scaled_dot_product_attention(q, k, k), [(1, 2, 6, 8), (1, 2, 10, 8)], "attention",
     2 * 2 * 2 * 6 * 10 * 8),
]  # fmt: skip


@pytest.mark.parametrize(("program", "shapes", "kind", "operations"), OPERATIONS)
def test_operations_are_counted(program: Any, shapes: Any, kind: str, operations: int) -> None:
    endless = device(memory_bytes_per_second=math.inf)
    assert seconds_of(program, *shapes, device=endless) == {kind: pytest.approx(operations)}


BYTES = [
    # program, bytes read and written for x of 100 floats, 4 bytes each
    (lambda x: x + x, 1200),
    (lambda x: torch.relu(x), 800),
    (lambda x: x.view(10, 10).t()[1:, 2].unsqueeze(0), 0),  # views move nothing
    (lambda x: x.detach().mul_(2), 800),
    (lambda x: x.detach().zero_(), 400),
    (lambda x: x + x[:1].expand(100), 804),  # an expanded value is read once
    (lambda x: x.sum(), 404),
    (lambda x: torch.empty_like(x), 0),
    (lambda x: torch._foreach_add_([x.detach(), x.detach()[:50]], 1.0), 1200),
    (lambda x: x.to(torch.bfloat16), 600),
]


@pytest.mark.parametrize(("program", "moved"), BYTES)
def test_bytes_are_counted(program: Any, moved: int) -> None:
    endless = device(matmul_flops_per_second={"fp32": math.inf})
    assert sum(seconds_of(program, (100,), device=endless).values()) == pytest.approx(moved)


def convolution_backward(x: Tensor, w: Tensor, dy: Tensor, wanted: tuple[bool, bool, bool]) -> Any:
    return aten.convolution_backward(dy, x, w, [8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)


def norm_backward(x: Tensor, dy: Tensor, s: Tensor) -> Any:
    return aten.native_batch_norm_backward(dy, x, None, None, None, s, s, True, 1e-5, [True, False, False])


X, W, Y = 2 * 6 * 64 * 4, 8 * 6 * 4, 2 * 8 * 64 * 4  # bytes of (2, 6, 8, 8), of a 1x1 weight, and of what it gives
MAP, WEIGHT, RESULT = (2, 6, 8, 8), (8, 6, 1, 1), (2, 8, 8, 8)


@pytest.mark.parametrize(
    ("program", "shapes", "moved"),
    [
        (lambda x, w: F.conv2d(x, w), [MAP, WEIGHT], X + W + Y),
        # backward is a product for each gradient, and a sum for the bias's
        (lambda x, w, dy: convolution_backward(x, w, dy, (True, True, True)), [MAP, WEIGHT, RESULT],
         2 * (X + W + Y) + Y + 8 * 4),
        (lambda x, w, dy: convolution_backward(x, w, dy, (False, True, False)), [MAP, WEIGHT, RESULT], X + W + Y),
        # a norm that takes statistics reads its input for them and again; backward likewise
        (lambda x: F.batch_norm(x, None, None, training=True), [MAP], 3 * X + 2 * 6 * 4),
        (lambda x, m: F.batch_norm(x, m, m), [MAP, (6,)], 2 * X + 2 * 6 * 4),
        (lambda x, w: F.group_norm(x, 2, w, w), [MAP, (6,)], 3 * X + 2 * 6 * 4 + 2 * 4 * 4),
        (norm_backward, [MAP, MAP, (6,)], 5 * X + 2 * 6 * 4),
    ],
)  # fmt: skip
def test_bytes_of_convolutions_and_norms(program: Any, shapes: Any, moved: int) -> None:
    endless = device(matmul_flops_per_second={"fp32": math.inf})
    without_gradients = lambda *inputs: program(*(x.detach() for x in inputs))  # noqa: E731
    assert sum(seconds_of(without_gradients, *shapes, device=endless).values()) == pytest.approx(moved)


@pytest.mark.parametrize(
    ("dtype", "precision", "channels_last", "turned"),
    [
        (torch.float16, "fp16", False, True),
        (torch.float16, "fp16", True, False),
        (torch.float32, "tf32", False, True),
        (torch.float32, "fp32", False, False),
    ],
)
def test_matrix_units_turn_maps_that_are_not_channels_last(
    dtype: torch.dtype, precision: str, channels_last: bool, turned: bool
) -> None:
    a100 = device_named("A100-80GB")
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x.detach().to(memory_format=layout), w.detach())

    took = seconds_of(program, (8, 64, 56, 56), (16, 64, 1, 1), device=a100, dtype=dtype, precision=precision)
    maps, weight = 8 * (64 + 16) * 56 * 56, 16 * 64
    moved = {"convolution": maps + weight} | ({"layout": 2 * maps} if turned else {})
    took = {kind: seconds for kind, seconds in took.items() if kind in ("convolution", "layout")}
    assert took == {kind: pytest.approx(n * dtype.itemsize / a100.memory_bytes_per_second) for kind, n in moved.items()}


def test_a_grouped_convolution_has_a_share_of_its_own() -> None:
    clock = StepClock(device(memory_bytes_per_second=math.inf), efficiency=dataclasses.replace(PEAK, grouped=0.25))
    with FakeTensorMode(), Recorded(clock):
        F.conv2d(torch.empty(1, 4, 5, 5), torch.empty(6, 2, 1, 1), groups=2)
    assert clock.seconds["convolution"] == 4 * 2 * 25 * 6 * 2


def test_an_op_takes_as_long_as_the_slower_of_both() -> None:
    shapes = [(8, 8), (8, 8)]  # 1024 operations, 768 bytes
    for flops, bandwidth, seconds in ((1.0, 1.0, 1024), (2.0, 1.0, 768)):
        ideal = device(matmul_flops_per_second={"fp32": flops}, memory_bytes_per_second=bandwidth)
        assert seconds_of(torch.matmul, *shapes, device=ideal) == {"matmul": seconds}


@pytest.mark.parametrize(
    ("dtype", "precision", "rate"),
    [
        (torch.float32, "fp32", "fp32"),  # IEEE, also where there are matrix units for TF32
        (torch.float32, "tf32", "tf32"),
        (torch.float32, "bf16", "tf32"),  # what autocast leaves in fp32
        (torch.bfloat16, "bf16", "bf16"),
        (torch.float16, "fp16", "fp16"),
        (torch.float64, "fp32", "fp64"),
    ],
)
def test_the_rate_is_that_of_the_dtype(dtype: torch.dtype, precision: str, rate: str) -> None:
    a100 = device_named("A100-80GB")
    side = 4096
    took = seconds_of(torch.matmul, (side, side), (side, side), device=a100, dtype=dtype, precision=precision)
    assert took["matmul"] == pytest.approx(2 * side**3 / a100.rate(rate))


def test_a_depthwise_convolution_runs_on_the_vector_units() -> None:
    v100 = device_named("V100-16GB")
    shapes = [(1, 512, 256, 256), (512, 1, 31, 31)]
    program = lambda x, w: F.conv2d(x, w, padding=15, groups=512)  # noqa: E731
    took = seconds_of(program, *shapes, device=v100, dtype=torch.float16, precision="fp16")
    assert took["convolution"] == pytest.approx(2 * 512 * 256 * 256 * 31 * 31 / 15.7e12)


def test_the_assumed_shares_of_the_peak_are_taken() -> None:
    half = Efficiency(matmul=0.5, memory=0.25, kernel_seconds=0)
    for a, b, seconds in ((64, 64, 2 * 64**3 / 0.5), (1, 1, 12 / 0.25)):
        clock = StepClock(device(), efficiency=half)
        with FakeTensorMode(), Recorded(clock):
            torch.empty(a, b) @ torch.empty(b, a)
        assert clock.seconds["matmul"] == seconds


# Two clocks. The host issues an op in 1 s, the device works as long as it is told:
#
#   host    |0 |1 |2 |3 |                     host    |0 |1 |read....|2 |
#   device     |0      |1 |2 |3 |             device     |0   |1   |    |2 |


def test_the_device_waits_for_the_host_only_when_it_has_nothing_to_do() -> None:
    clock = StepClock(device(launch_seconds=1.0), efficiency=PEAK)
    for seconds in (3.0, 1.0, 1.0, 1.0):
        clock.work("memory", seconds)
    assert clock.step_seconds == 7.0 and clock.seconds["launch"] == 1.0


def test_short_kernels_are_bound_by_the_host() -> None:
    clock = StepClock(device(launch_seconds=1.0), efficiency=PEAK)
    for _ in range(10):
        clock.work("memory", 0.25)
    assert clock.step_seconds == 10.25 and clock.seconds["launch"] == 7.75


def test_to_read_a_number_the_host_waits_for_the_device() -> None:
    clock = StepClock(device(launch_seconds=1.0), efficiency=PEAK)
    clock.work("memory", 2.0)
    clock.work("memory", 2.0)
    clock.synchronize()
    clock.work("memory", 1.0)
    assert clock.step_seconds == 7.0 and clock.seconds["launch"] == 2.0


def test_a_number_read_from_a_tensor_synchronizes() -> None:
    def took(program: Any) -> float:
        clock, x = StepClock(device(launch_seconds=500.0), efficiency=PEAK), torch.ones(100)
        with Recorded(clock):
            program(x)
        return clock.step_seconds

    assert took(lambda x: (x + 1, x + 2)) == 500 + 800 + 800  # each reads 400 bytes and writes 400
    assert took(lambda x: (float((x + 1)[0]), x + 2)) == 500 + 800 + 500 + 800


def test_on_the_cpu_every_op_costs_its_launch() -> None:
    clock = StepClock(device(name="cpu", launch_seconds=1.0), efficiency=PEAK)
    for _ in range(4):
        clock.work("memory", 3.0)
    assert clock.step_seconds == 16.0 and clock.seconds["launch"] == 4.0


TRANSFERS = [
    # c10d's name, ranks, bytes a rank sends of 800
    ("send", 2, 800),
    ("allreduce", 2, 800),
    ("allreduce", 8, 1400),
    ("_allgather_base", 4, 600),
    ("allgather", 4, 600),
    ("reduce_scatter_tensor_coalesced", 4, 600),
    ("reduce_scatter_base", 4, 600),
    ("all_gather_into_tensor", 8, 700),
    ("broadcast", 8, 800),
    ("alltoall_base", 8, 700),
    ("allreduce", 1, 0),
]


@pytest.mark.parametrize(("kind", "ranks", "sent"), TRANSFERS)
def test_collectives_go_round_a_ring(kind: str, ranks: int, sent: int) -> None:
    clock = StepClock(device(), mesh=(1, 1, ranks), efficiency=PEAK)
    clock.communicate(kind, 800, ranks, "width")
    clock.record(torch.ops.aten.relu.default, (torch.ones(0),), {}, torch.ones(0))
    assert clock.step_seconds == pytest.approx(sent / 100)


# 8 ranks on 2 nodes of 4 as data 2 x height 2 x width 2:
#
#   node 0:  0 1    node 1:  4 5      width 0-1, height 0-2 and a replica 0-1-2-3 stay within a node;
#            2 3             6 7      data 0-4 and the whole job do not. As depth 2 x height 2 x width 2 depth does not.
@pytest.mark.parametrize(
    ("mesh", "axis", "crosses"),
    [
        ((2, 2, 2), "width", False),
        ((2, 2, 2), "height", False),
        ((2, 2, 2), "replica", False),
        ((2, 2, 2), "data", True),
        ((2, 2, 2), "job", True),
        ((1, 2, 4), "width", False),
        ((1, 2, 4), "height", True),
        ((1, 1, 8), "width", True),
        ((8, 1, 1), "width", False),
        ((4, 2, 1), "height", False),
        ((1, 2, 2, 2), "depth", True),
        ((1, 2, 2, 2), "height", False),
        ((1, 2, 2, 2), "height and width", False),
        ((1, 2, 2, 2), "depth and width", True),
        ((1, 2, 2, 2), "replica", True),
        ((2, 2, 2, 1), "depth", False),
        ((2, 2, 2, 1), "replica", False),
        ((2, 2, 1, 2), "depth and width", False),
        ((2, 2, 1, 2), "data", True),
        ((1, 4, 1, 2), "depth", True),
    ],
)
def test_the_link_is_that_of_the_ranks_place(mesh: tuple[int, ...], axis: str, crosses: bool) -> None:
    cluster = Cluster(nodes=2, devices_per_node=4, device=device(link_latency_seconds=1, network_latency_seconds=2))
    clock = StepClock(cluster, mesh=mesh, efficiency=PEAK)
    assert clock.transfer_seconds("exchange", 1000, 2, axis) == (2 + 100 if crosses else 1 + 10)


def test_a_measured_link_is_taken_as_it_is() -> None:
    from tests.simulation.devices.test_table import RATES

    measured = device(measured=RATES)
    clock = StepClock(measured, mesh=(1, 1, 2))
    assert clock.transfer_seconds("exchange", 10**6, 2, "width") == pytest.approx(1e-4)  # 1e10 bytes a second
    assert clock.transfer_seconds("exchange", 8, 2, "width") == pytest.approx(1e-4)  # as 1000 bytes, the smallest
    assert clock.op_seconds.__self__.efficiency.memory == 1  # type: ignore[attr-defined]


# An exchange travels while the convolution that was issued after it runs; any other op waits for it:
#
#   wire  |======|            wire  |======|
#   ops   |conv....|add|      ops   |......|add|
def test_an_exchange_hides_behind_the_next_convolution() -> None:
    def took(first: Any) -> dict[str, float]:
        clock = StepClock(device(link_bytes_per_second=1.0), mesh=(1, 1, 2), efficiency=PEAK)
        with FakeTensorMode(), Recorded(clock):
            clock.communicate("send", 500, 2, "width")
            clock.communicate("send", 500, 2, "width")  # to the other neighbour: the same wire
            first(torch.empty(1, 1, 10, 10), torch.empty(2, 1, 1, 1))
        return clock.seconds

    hidden = took(lambda x, w: F.conv2d(x, w))  # 1208 bytes
    assert (hidden["convolution"], hidden["exchange"]) == (1208, 0)
    shown = took(lambda x, w: x + x)
    assert (shown["memory"], shown["exchange"]) == (1200, 1000)


# Messages of one communicator queue up, those of another do not:
#
#   ops      |.........|add|     ops      |....|add|
#   one      |====|====|         one      |====|
#                                another  |====|
@pytest.mark.parametrize(("communicators", "name", "waits"), [("aa", "gpu", 10), ("ab", "gpu", 5), ("aa", "cpu", 5)])
def test_a_communicator_is_one_wire(communicators: str, name: str, waits: int) -> None:
    mib = 2**20
    clock = StepClock(device(name=name, link_bytes_per_second=mib), mesh=(1, 1, 2), efficiency=PEAK)
    y = Sent.apply(torch.ones(1, requires_grad=True), clock, 0.0, "allreduce", 5 * mib, communicators[0])  # type: ignore[no-untyped-call]
    y.sum().backward()
    clock.communicate("send", 5 * mib, 2, "width", communicators[1])
    clock.record(torch.ops.aten.relu.default, (torch.ones(0),), {}, torch.ones(0))
    assert clock.step_seconds == waits


# The host posts an exchange in 4 s, and needs 2 s for a reduction, of which the device has to wait:
#
#   host    |4 exchange|1|2 reduction|1|
#   device  |..........|1|...........|1|
def test_messages_cost_the_host() -> None:
    costs = HostCosts(exchange_seconds=3.0, reduction_seconds=1.0, function_seconds=0.5)
    share = dataclasses.replace(PEAK, message_host_seconds=1.0)
    add, x = torch.ops.aten.add.Tensor, torch.ones(0)
    for name, library in (("gpu", 1.0), ("cpu", 0.0)):  # gloo is not NCCL
        clock = StepClock(device(name=name, launch_seconds=1.0, host=costs), mesh=(1, 1, 2), efficiency=share)
        for _ in range(2):  # to both neighbours
            clock.communicate("send", 4, 2, "width")
        clock.record(add, (x, x), {}, x)
        assert clock.step_seconds == pytest.approx(3 + library + 1, abs=0.1)
        clock.in_function = True
        clock.communicate("allreduce", 4, 2, "replica")
        clock.in_function = False
        clock.record(add, (x, x), {}, x)
        assert clock.step_seconds == pytest.approx(4 + 2 + 2 * library, abs=0.2)
        assert clock.host_seconds == 6 + 2 * library
        assert sum(clock.seconds.values()) == pytest.approx(clock.step_seconds)


def test_what_is_written_to_a_given_tensor_counts_as_a_new_one() -> None:
    x, w, there = torch.ones(64, 8), torch.ones(8, 16), torch.empty(64, 16)
    found = []
    for func, given in ((torch.ops.aten.mm.default, {}), (torch.ops.aten.mm.out, {"out": there})):
        clock = StepClock(device(), efficiency=PEAK)
        clock.record(func, (x, w), given, func(x, w, **given))
        found.append(clock.step_seconds)
    assert found[0] == found[1] > 0


def test_a_compiled_program_costs_the_host_less() -> None:
    costs = HostCosts(exchange_seconds=100.0, reduction_seconds=100.0, function_seconds=1.0)
    clock = StepClock(device(launch_seconds=1.0, host=costs), mesh=(1, 1, 2), efficiency=PEAK)
    with clock.in_program():
        assert clock.host_seconds == costs.program_seconds == 5.0
        clock.communicate("send", 4, 2, "width")
        assert clock.host_seconds == pytest.approx(5 + 83)
        clock.communicate("allreduce", 4, 2, "replica")
        assert clock.host_seconds == pytest.approx(5 + 83 + 38)
        before = clock.seconds["memory"]
        clock.fused(int(clock.device.memory_bytes_per_second))
        assert clock.seconds["memory"] - before == pytest.approx(1.0)
        assert clock.host_seconds == pytest.approx(5 + 83 + 38 + 1)
    clock.communicate("send", 4, 2, "width")
    assert clock.host_seconds == pytest.approx(5 + 83 + 38 + 1 + 100)


def test_python_reduces_for_split_functions_alone() -> None:
    costs = HostCosts(reduction_seconds=1.0)
    splits = ((1, 1, 2), (1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2))
    for mesh, by_python in (((2, 1, 1), 0.0), ((2, 1, 1, 1), 0.0), *((split, 1.0) for split in splits)):
        clock = StepClock(device(host=costs), mesh=mesh, efficiency=PEAK)
        clock.communicate("allreduce", 4, 2, "job")  # of a count, by the training step
        assert clock.host_seconds == 0.0
        y = Sent.apply(torch.ones(1, requires_grad=True), clock, 0.0, "allreduce", 4)  # type: ignore[no-untyped-call]
        y.sum().backward()  # of a bucket by torch, or of a norm's gradient
        assert clock.host_seconds == by_python
        y = Sent.apply(torch.ones(1, requires_grad=True), clock, 0.0, "allreduce", 2**20)  # type: ignore[no-untyped-call]
        y.sum().backward()  # a bucket
        assert clock.host_seconds == by_python


def test_the_step_is_over_when_the_host_is_too() -> None:
    clock = StepClock(device(launch_seconds=1.0), efficiency=PEAK)
    clock.work("memory", 3.0)
    clock.issue(7.0)
    assert clock.step_seconds == 8.0 == clock.host_seconds
    with clock.stopped():
        clock.issue(5.0)
    before = clock.reading()
    clock.issue(1.0)
    clock.repeat(before, times=2)
    assert clock.host_seconds == 8.0 + 3 * 1.0 == clock.step_seconds


class Sent(torch.autograd.Function):
    """Works and sends in backward, as DDP does when a bucket is full."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, clock: StepClock, seconds: float, kind: str, size: int, communicator: str = ""
    ) -> Tensor:
        ctx.facts = clock, seconds, kind, size, communicator
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        clock, seconds, kind, size, communicator = ctx.facts
        clock.work("matmul", seconds)
        clock.communicate(kind, size, 2, "job", communicator)
        return gradient, None, None, None, None, None


# Gradients are averaged beside the rest of backward, one bucket after the other:
#
#   ops     |---1---|---2---|---3---|............|add|
#   wire            |==1==| |==2==| |=====3======|       only the last one is waited for
@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter_base"])
def test_gradients_hide_behind_backward(kind: str) -> None:
    mib, share = 2**20, 1 if kind == "allreduce" else 2
    clock = StepClock(device(link_bytes_per_second=mib), mesh=(2, 1, 1), efficiency=PEAK)
    y = torch.ones(1, requires_grad=True)
    for seconds, size in ((20.0, 30), (10.0, 9), (10.0, 1)):  # the last in forward is the first in backward
        y = Sent.apply(y, clock, seconds, kind, size * mib * share)  # type: ignore[no-untyped-call]
    y.backward()
    assert clock.step_seconds == 40
    clock.record(torch.ops.aten.relu.default, (torch.ones(0),), {}, torch.ones(0))
    assert clock.step_seconds == 40 + 30 and clock.seconds["gradients"] == 30


# FSDP: the host is ahead of the device, so the next parameters are on their way while the device computes:
#
#   ops     |--------1--------|--------2--------|
#   wire    |==1==||==2==|
def test_parameters_are_gathered_ahead() -> None:
    mib = 2**20
    clock = StepClock(device(link_bytes_per_second=mib), mesh=(2, 1, 1), efficiency=PEAK)
    for _ in range(2):
        clock.communicate("_allgather_base", 10 * mib, 2, "job")
        clock.work("matmul", 20.0)
    assert clock.step_seconds == 5 + 20 + 20 and clock.seconds["gradients"] == 5


def test_what_is_offloaded_travels_beside_the_ops() -> None:
    clock = StepClock(device(), efficiency=PEAK)
    transfer = clock.offload(500)  # 10 s
    clock.work("matmul", 4.0)
    clock.finish(transfer)
    assert clock.seconds["offload"] == 6.0


def test_a_new_step_starts_from_nothing() -> None:
    clock = StepClock(device(), mesh=(2, 1, 1), efficiency=PEAK)
    clock.communicate("send", 500, 2, "data")
    clock.work("memory", 5.0)
    clock.reset()
    clock.record(torch.ops.aten.relu.default, (torch.ones(0),), {}, torch.ones(0))
    assert clock.step_seconds == 0 and clock.seconds == dict.fromkeys(KINDS, 0.0)


def step(x: Tensor, weight: Tensor) -> None:
    """Ops of many kinds: an index, a reduction, an in-place update, an expanded value."""
    x = F.conv2d(x, weight, padding=1)
    x = F.gelu(x) + x.mean((2, 3), keepdim=True).expand_as(x)
    x = F.embedding(torch.zeros(5, dtype=torch.int64), x.flatten(0, 2))
    x.softmax(-1).sum().backward()
    weight.detach().sub_(weight.grad)  # type: ignore[arg-type]


def test_each_op_is_timed_once_on_the_device_that_is_here() -> None:
    timings: dict[Any, float] = {}
    for again in (False, True):
        known = dict(timings)
        clock = MeasuredClock(device_named("cpu"), timings=timings)
        with FakeTensorMode(), Recorded(clock):
            step(torch.empty(1, 8, 24, 24), torch.empty(8, 8, 3, 3, requires_grad=True))
        assert clock.guessed == {}
        assert (timings == known) is again
        assert clock.seconds["convolution"] > 0 and 1e-5 < clock.step_seconds < 5


@torch.library.custom_op("fullframe_tests::stubborn", mutates_args=())
def stubborn(x: Tensor) -> Tensor:
    raise ValueError("not with these numbers")


@stubborn.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_op_that_cannot_be_run_alone_is_guessed_and_named() -> None:
    clock = MeasuredClock(device_named("cpu"))
    with FakeTensorMode(), Recorded(clock):
        stubborn(torch.empty(1000))
    assert clock.guessed == {"fullframe_tests.stubborn.default": "ValueError: not with these numbers"}
    assert clock.seconds["memory"] > 0


def test_it_is_known_what_limits_each_kernel_but_the_optimizers() -> None:
    share = dataclasses.replace(PEAK, kernel_seconds=100.0)
    with FakeTensorMode():
        clock = StepClock(device(matmul_flops_per_second={"fp32": 0.1}), efficiency=share)
        large, thin, small = (torch.empty(size, 8) for size in (8, 128, 1))
        weight = torch.empty(1, 1, 3, 3).expand(2, 1, 3, 3)
        with Recorded(clock):
            large @ large  # 1024 operations
            thin + thin  # 3 times 4096 bytes
            small + small
            before = clock.reading()
            F.conv2d(torch.empty(1, 2, 8, 8), weight, groups=2)  # 1296 operations, of no matrix unit
            torch._foreach_add_([thin], 1.0)
    assert before.limits == {"arithmetic": 10240.0, "bytes": 12288.0, "kernel": 100.0}
    assert clock.limits["arithmetic"] == 10240.0 and clock.limits["bytes"] > 12288.0
    assert sum(clock.limits.values()) == pytest.approx(sum(clock.seconds.values()) - clock.seconds["optimizer"])
    now = clock.reading()
    clock.repeat(before, times=2)
    assert clock.limits["bytes"] == pytest.approx(now.limits["bytes"] + 2 * (now.limits["bytes"] - 12288.0))
    with clock.stopped():
        clock.work("memory", 5.0)
    assert sum(clock.limits.values()) == pytest.approx(sum(clock.seconds.values()) - clock.seconds["optimizer"])
