"""What split tensors cost this machine's host, measured on small maps of a rank whose messages go nowhere.

The aten ops of a function are timed alone and taken off what the whole of it takes; the rest is Python's.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullframe.ranks.mesh import init_mesh, spatial_of
from fullframe.simulation.clock.ops import Op
from fullframe.simulation.devices.calibration import on_threads
from fullframe.simulation.devices.host_costs import HostCosts
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.shard import even_spec
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import wrap

_RANKS = 3  # of which the one in the middle has two neighbours
_SHAPE = 2, 8, 8, 24  # split on its columns
_CALLS = 5  # timed together
_ROUNDS = 5


def measured_host(source: str = "", seconds: float = 0.2) -> HostCosts:
    """Of a pointwise function, a convolution and a norm, forward and backward; each is timed for so many seconds.

    By this thread's own time, so that other processes do not count; the fastest of the runs.
    """
    with on_threads(1), _a_rank() as spec:
        channels = _SHAPE[1]
        weight = torch.randn(channels, channels, 3, 3, requires_grad=True)
        scale = torch.ones(channels, requires_grad=True)
        plain = _taken(F.relu, None, seconds)
        function = _taken(F.relu, spec, seconds)
        convolution = _taken(lambda x: F.conv2d(x, weight, padding=1), spec, seconds)
        norm = _taken(lambda x: F.batch_norm(x, None, None, scale, scale, training=True), spec, seconds)
    return HostCosts(
        function_seconds=max(function.beyond_ops - plain.beyond_ops, 0.0),
        exchange_seconds=max(convolution.beyond_ops - function.beyond_ops, 0.0) / convolution.exchanges,
        reduction_seconds=max(norm.beyond_ops - function.beyond_ops, 0.0) / norm.reductions,
        source=source,
    )


@contextmanager
def _a_rank() -> Iterator[Spec]:
    """A rank with neighbours of a job that does not exist, and how a map is split in it."""
    with fake_job(1, _RANKS):
        mesh = init_mesh(width=_RANKS)
        spatial_of(mesh, draw_seed=lambda generator: 0)
        yield even_spec(_SHAPE, mesh)


@dataclass
class _Taken:
    """The ops of a function, forward and backward, its messages, and its seconds beyond the ops."""

    ops: list[Callable[[], object]] = field(default_factory=list)
    exchanges: int = 0
    reductions: int = 0
    beyond_ops: float = 0.0


class _Noting(TorchDispatchMode):
    """Notes ops and messages as `StepClock` counts them: messages without an op between them are one exchange."""

    def __init__(self, taken: _Taken):
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken, self._posting = taken, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            is_message = func._opname in ("send", "recv_")
            self._taken.exchanges += is_message and not self._posting
            self._taken.reductions += not is_message
            self._posting = is_message
        elif not Op.of(func).free:
            self._taken.ops.append(lambda: func(*args, **kwargs))
            self._posting = False
        return func(*args, **kwargs)


def _taken(function: Callable[[Tensor], Tensor], spec: Spec | None, seconds: float) -> _Taken:
    """Of `function` on a map that is split as `spec` says, or on a plain one of the same size."""
    part = torch.randn(*_SHAPE[:-1], _SHAPE[-1] // _RANKS, requires_grad=True)

    def run() -> None:
        out: Any = function(part if spec is None else wrap(part, spec))
        out = out if spec is None else out.local
        torch.autograd.grad(out, part, torch.ones_like(out))

    run()  # the first time decides how
    taken = _Taken()
    with _Noting(taken):
        run()
    best, of_run = [float("inf")] * len(taken.ops), float("inf")
    share = seconds / 2 / _ROUNDS
    for _ in range(_ROUNDS):  # in turns, as a machine may be busy for a while
        of_run = min(of_run, _fastest(run, share))
        with torch.no_grad():
            best = [min(b, _fastest(op, share / len(best))) for b, op in zip(best, taken.ops, strict=True)]
    taken.beyond_ops = max(of_run - sum(best), 0.0)
    return taken


def _fastest(call: Callable[[], object], seconds: float) -> float:
    best, started = float("inf"), time.thread_time()
    while time.thread_time() - started < seconds:
        began = time.thread_time()
        for _ in range(_CALLS):
            call()
        best = min(best, (time.thread_time() - began) / _CALLS)
    return best
