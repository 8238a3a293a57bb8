"""How long a step takes: every op against the device's peaks, every message against its link, on two clocks.

The host issues ops one after the other and the device works them off; messages travel beside both, those of one
communicator one after the other. The step is over when both are done. What of the peaks a kernel reaches is said in
`Efficiency`; measured rates are taken as they are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp  # which makes the ops of that name
from torch.distributed.tensor import DTensor

from fullframe.ranks.mesh import AXES, STAGE, axes_in, axes_of
from fullframe.simulation.clock.efficiency import MEASURED, Efficiency
from fullframe.simulation.clock.ops import Op, is_depthwise, is_grouped, lies_channels_last, tensors
from fullframe.simulation.devices.calibration import Points, rate_at
from fullframe.simulation.devices.table import Cluster, Device
from fullframe.simulation.fake.sharded import own_parts

KINDS = ("matmul", "convolution", "layout", "attention", "memory", "optimizer", "exchange", "gradients", "offload",
         "stages", "launch")  # fmt: skip
LIMITS = ("arithmetic", "bytes", "kernel")  # of matrix units, of memory, of the shortest kernel

_SMALL_BYTES = 2**16  # what goes over all ranks and is less is no bucket of gradients but a count or a norm
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_FSDP_MESSAGES = {torch.ops.fsdp.all_gather_copy_in.default, torch.ops.fsdp.chunk_cat.default}  # what each begins with

_running_node: Callable[[], Any] = torch._C._current_autograd_node


@dataclass(frozen=True)
class Transfer:
    """A message on its way: when it is through, and which kind of seconds a wait for it counts as."""

    done: float
    kind: str


@dataclass
class _Batch:
    """Messages to neighbours that were posted without an op between them."""

    posted: float
    ranks: int
    axis: str
    communicator: str
    bytes: int = 0


class Reading(NamedTuple):
    """What a clock shows: seconds by kind; until when the device, the host and the messages are busy; host's work.

    `limits`: seconds of the kernels but the optimizer's, by what limits them, as in `Prediction`
    """

    seconds: dict[str, float]
    now: float
    issued: float
    wires: dict[str, float]
    host_seconds: float
    limits: dict[str, float]


class StepClock:
    """The seconds of one step on one rank; `record` every op of it, then read `seconds` and `step_seconds`.

    `mesh` is (data, height, width), or (data, depth, height, width); ranks fill nodes with the last one fastest.
    """

    def __init__(
        self,
        cluster: Cluster | Device,
        precision: str = "fp32",
        mesh: tuple[int, ...] = (1, 1, 1),
        efficiency: Efficiency | None = None,
        stages: int = 1,
    ):
        self._stages = stages  # between data and the rest of the mesh
        if isinstance(cluster, Device):
            cluster = Cluster(nodes=1, devices_per_node=math.prod(mesh) * stages, device=cluster)
        self.cluster, self.device, self.mesh = cluster, cluster.device, mesh
        self.efficiency = efficiency or (MEASURED if self.device.measured else Efficiency())
        self._tf32 = precision != "fp32" and "tf32" in self.device.matmul_flops_per_second
        self._links: dict[str, tuple[bool, float, float]] = {}
        self.in_function = False  # on split tensors, which sends what it sends by Python
        self._in_program = False  # of a compiled block
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.limits = dict.fromkeys(LIMITS, 0.0)
        self.host_seconds = 0.0  # what the host works, without its waiting
        self._now = self._issued = 0.0  # when the device is done with what it has; what the host has got to
        self._wires: dict[str, float] = {}  # until when messages of a communicator are on their way
        self._borrowing: _Batch | None = None  # sent to and from neighbours, not waited for yet
        self._reducing: list[Transfer] = []  # gradients of this backward

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens inside takes no time."""
        before = self.reading()
        yield
        self.seconds, self._now, self._issued, self._wires, self.host_seconds, self.limits = before

    def reading(self) -> Reading:
        """What the clock shows."""
        wires, limits = self._wires.copy(), self.limits.copy()
        return Reading(self.seconds.copy(), self._now, self._issued, wires, self.host_seconds, limits)

    def repeat(self, since: Reading, times: int) -> None:
        """The same again as since a reading."""
        worked, issued = times * (self._now - since.now), times * (self._issued - since.issued)
        self.seconds = {kind: s + times * (s - since.seconds[kind]) for kind, s in self.seconds.items()}
        self.limits = {limit: s + times * (s - since.limits[limit]) for limit, s in self.limits.items()}
        self._now, self._issued = self._now + worked, self._issued + issued
        self.host_seconds += times * (self.host_seconds - since.host_seconds)
        self._wires = {kind: done + worked for kind, done in self._wires.items()}

    @property
    def step_seconds(self) -> float:
        """From the first op to the end of the last one, on the host or the device, whichever is later."""
        return max(self._now, self._issued)

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one aten op with the (fake) tensors it got and gave."""
        op = Op.of(func)
        if op.free:
            if op.reads_back:
                self.synchronize()
            return
        if op.kind != "convolution":
            self._take_in()
        if self._reducing and _running_node() is None:  # backward is over
            for transfer in self._reducing:
                self.finish(transfer)
            self._reducing.clear()
        issue = self.device.launch_seconds * (1 + self._sharded_launches(func, args))
        args, out = tuple(map(own_parts, args)), own_parts(out)
        self.issue(issue)
        self._wait_for_host()
        for kind, seconds, limit in self.op_seconds(op, func, args, kwargs, out):
            self._work(kind, seconds, limit)
        self._take_in()

    def fused(self, bytes: int) -> None:
        """One kernel of a compiled program, which reads and writes so many bytes."""
        self._take_in()
        self.work("memory", max(bytes / self._memory_rate(bytes), self.efficiency.kernel_seconds))

    @contextmanager
    def in_program(self) -> Iterator[None]:
        """Around what a compiled program does in forward or backward: the host calls kernels, and no rules."""
        self.issue(self.device.host.program_seconds)
        self._in_program = True
        try:
            yield
        finally:
            self._in_program = False

    def _sharded_launches(self, func: Any, args: Sequence[Any]) -> float:
        """What sharded parameters cost the host beyond the op itself, in launches of an op."""
        held = args[0] if args and isinstance(args[0], list) else ()
        if func in _FSDP_MESSAGES:
            return self.efficiency.fsdp_launches + self.efficiency.fsdp_parameter_launches * len(held)
        if held and isinstance(held[0], DTensor):
            return self.efficiency.dtensor_launches * sum(isinstance(t, DTensor) for t in tensors(args))
        return 0.0

    def _take_in(self) -> None:
        """Wait for what was borrowed from neighbours; messages posted together share the wire and one latency."""
        if self._borrowing is not None:
            batch, self._borrowing = self._borrowing, None
            facts = batch.bytes, batch.ranks, batch.axis, batch.posted, batch.communicator
            self.finish(self.start("exchange", "exchange", *facts))

    def op_seconds(
        self, op: Op, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> list[tuple[str, float, str]]:
        """The roofline: of each kernel its kind, whichever is slower, operations or bytes, and which of LIMITS it is.

        Of kind "layout" is what turns the maps of a convolution.
        """
        dtype = self._dtype((*args, *kwargs.values()))
        vectors = op.kind == "convolution" and is_depthwise(op, args)
        turned = op.kind == "convolution" and not vectors and self._turns_maps(op, args, dtype)
        found = []
        for operations, bytes, maps in op.kernels(func, args, kwargs, out):
            by_operations = operations / self._rate(op, args, dtype, operations) if operations else 0.0
            by_bytes, shortest = bytes / self._memory_rate(bytes), self.efficiency.kernel_seconds
            limit = "arithmetic" if by_operations > by_bytes and not vectors else "bytes"
            seconds = max(by_operations, by_bytes)
            found.append((op.kind, seconds, limit) if seconds > shortest else (op.kind, shortest, "kernel"))
            if turned:
                found.append(("layout", 2 * maps / self._memory_rate(maps), "bytes"))  # read and written
        return found

    def _turns_maps(self, op: Op, args: Sequence[Any], dtype: str) -> bool:
        """Whether cuDNN turns maps that are not channels last for the matrix units, and back.

        What was measured on a device has these passes in it.
        """
        units = dtype in ("tf32", "bf16", "fp16") and dtype in self.device.matmul_flops_per_second
        assumed = self.device.is_cuda and self.device.measured is None
        return assumed and units and not lies_channels_last(op, args)

    def _dtype(self, values: Sequence[Any]) -> str:
        """That of the rate at which an op on these values multiplies."""
        dtype = next((_NAMES[t.dtype] for t in tensors(values) if t.dtype in _NAMES), "fp32")
        return "tf32" if dtype == "fp32" and self._tf32 else dtype

    def work(self, kind: str, seconds: float) -> None:
        """The device works `seconds`, once the host has issued it; until then it is idle, which counts as launch."""
        self.issue(self.device.launch_seconds)
        self._wait_for_host()
        self._work(kind, seconds)

    def _work(self, kind: str, seconds: float, limit: str = "bytes") -> None:
        self._now += seconds
        self.seconds[kind] += seconds
        if kind not in ("optimizer", "layout"):
            self.limits[limit] += seconds
        if not self.device.is_cuda:
            self._issued = self._now

    def issue(self, seconds: float) -> None:
        """The host works; a GPU goes on with what it has."""
        self._issued += seconds
        self.host_seconds += seconds
        if not self.device.is_cuda:
            self._wait_for_host()

    def _wait_for_host(self) -> None:
        self.seconds["launch"] += max(self._issued - self._now, 0.0)
        self._now = max(self._issued, self._now)

    def hold(self, seconds: float) -> None:
        """Host and device wait for the driver."""
        self._now = self._issued = self.step_seconds + seconds
        self.seconds["launch"] += seconds

    def wait_for_stages(self, seconds: float) -> None:
        """Nothing to do until other stages are done."""
        self._now += seconds
        self._issued = max(self._issued, self._now)
        self.seconds["stages"] += seconds

    def synchronize(self) -> None:
        """The host waits for the device, to read a number."""
        self._issued = max(self._issued, self._now)

    def communicate(self, kind: str, bytes: int, ranks: int, axis: str, communicator: str = "") -> None:
        """A collective or a message by its name in c10d, along a mesh axis ("replica", "job": over several of them).

        `bytes` is the whole tensor of a collective; of messages to neighbours what is sent. An exchange is on its way
        while the convolution that was issued next runs. The gradients that DDP and FSDP reduce travel beside the rest
        of backward; a gather of parameters starts as soon as the host issues it. On GPUs the messages of a
        `communicator` queue up behind each other, whatever they are for.
        """
        transport = _transport(kind)
        whole_model = axis == "job" and bytes >= _SMALL_BYTES and transport != "exchange"
        facts = transport, bytes, ranks, axis
        library = self.efficiency.message_host_seconds * self.device.is_cuda
        if transport == "exchange":
            if self._borrowing is None:
                self.issue(library + self.device.host.exchange(self._in_program))
                self._borrowing = _Batch(max(self._now, self._issued), ranks, axis, communicator)
            self._borrowing.bytes += bytes
            return
        by_python = not whole_model and (self.in_function or self._is_of_function())
        self.issue(library + self.device.host.reduction(self._in_program) * by_python)
        if whole_model and transport == "all_gather":
            self.finish(self.start("gradients", *facts, self._issued, communicator))
        elif whole_model and _running_node() is not None:
            self._reducing.append(self.start("gradients", *facts, max(self._now, self._issued), communicator))
        else:
            self._wait_for_host()
            self.finish(self.start("exchange", *facts, self._now, communicator))

    def _is_of_function(self) -> bool:
        """Whether a small message is of a compiled program, or in backward that of a function on split tensors."""
        return self._in_program or (_running_node() is not None and math.prod(self.mesh[1:]) > 1)

    def start(
        self, of: str, transport: str, bytes: int, ranks: int, axis: str, at: float, communicator: str = ""
    ) -> Transfer:
        """Post a message; those of one communicator travel one after the other, on the CPU those `of` one kind."""
        wire = communicator if communicator and self.device.is_cuda else of
        done = max(at, self._wires.get(wire, 0.0)) + self.transfer_seconds(transport, bytes, ranks, axis)
        self._wires[wire] = done
        return Transfer(done, of)

    def finish(self, transfer: Transfer) -> None:
        """The ops that follow need what was sent; only what is left of its way is waited for."""
        wait = max(transfer.done - self._now, 0.0)
        self.seconds[transfer.kind] += wait
        self._now += wait
        if not self.device.is_cuda:
            self._issued = self._now

    def offload(self, bytes: int) -> Transfer:
        """Bytes between device and host memory, beside the ops; `finish` where they are needed."""
        rate = self.device.host_bytes_per_second * self.efficiency.host
        done = max(self._now, self._wires.get("offload", 0.0)) + (bytes / rate if rate else 0.0)
        self._wires["offload"] = done
        return Transfer(done, "offload")

    def transfer_seconds(self, transport: str, bytes: int, ranks: int, axis: str) -> float:
        """How long a message is on its way; collectives go round a ring."""
        if ranks <= 1:
            return 0.0
        crosses, rate, latency = self._link(axis)
        shares = {"all_reduce": 2 * (ranks - 1) / ranks, "exchange": 1.0, "broadcast": 1.0}
        sent = bytes * shares.get(transport, (ranks - 1) / ranks)
        measured = self.device.measured
        if measured is not None and measured.link and not crosses:
            points = measured.all_reduce if transport == "all_reduce" else measured.link
            sent = max(sent, points[0][0])  # a smaller message takes as long as the smallest
            return sent / rate_at(points, sent)
        hops = 1 if transport == "exchange" else math.ceil(math.log2(ranks))
        return latency * hops + sent / rate

    def _link(self, axis: str) -> tuple[bool, float, float]:
        """Whether the ranks along `axis` lie on several nodes, and the bytes a second and latency between them."""
        if axis not in self._links:
            device = self.device
            crosses = self._crosses(axis)
            rate = device.network_bytes_per_second if crosses else device.link_bytes_per_second
            share = self.efficiency.network if crosses else self.efficiency.link
            latency = device.network_latency_seconds if crosses else device.link_latency_seconds
            self._links[axis] = crosses, rate * share, latency
        return self._links[axis]

    def _crosses(self, axis: str) -> bool:
        names = [AXES[0], STAGE, *axes_of(len(self.mesh))[1:]]
        sizes = dict(zip(names, (self.mesh[0], self._stages, *self.mesh[1:]), strict=True))
        along = {"replica": AXES[1:], "job": names}.get(axis) or axes_in(axis)
        each = self.cluster.devices_per_node
        inside, first, last = 1, [0], 0  # ranks of the axes done; first ranks of the groups, and how far the last is
        for name, size in reversed(sizes.items()):
            if name in along:
                last += inside * (size - 1)
            else:
                first = [rank + inside * part for part in range(size) for rank in first]
            inside *= size
        return any(rank // each != (rank + last) // each for rank in first)

    def _rate(self, op: Op, args: Sequence[Any], dtype: str, operations: float) -> float:
        """Operations a second that this op reaches."""
        device, share = self.device, self.efficiency
        if op.kind == "convolution" and is_depthwise(op, args):
            return self._measured_rate("depthwise", dtype, operations) or device.rate("fp32") * share.depthwise
        measured = self._measured_rate("convolution" if op.kind == "convolution" else "matmul", dtype, operations)
        grouped = op.kind == "convolution" and is_grouped(op, args)
        return measured or device.rate(dtype) * (share.grouped if grouped else getattr(share, op.kind))

    def _memory_rate(self, bytes: float) -> float:
        device = self.device
        return self._measured_rate("copy", None, bytes) or device.memory_bytes_per_second * self.efficiency.memory

    def _measured_rate(self, what: str, dtype: str | None, size: float) -> float | None:
        if self.device.measured is None:
            return None
        points: Points | None = getattr(self.device.measured, what)
        if dtype is not None:
            points = getattr(self.device.measured, what).get(dtype)
        return rate_at(points, max(size, 1.0)) if points else None


def _transport(kind: str) -> str:
    """How a c10d op of that name travels."""
    name = kind.replace("_", "")
    for known in ("reducescatter", "allgather", "allreduce", "alltoall", "broadcast"):
        if known in name:
            return known.replace("reduces", "reduce_s").replace("all", "all_", 1).replace("allt", "all_t")
    return "exchange"
