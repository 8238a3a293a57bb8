"""Messages and random draws as torch operators, for graphs that are captured and compiled.

Each rank compiles a graph of its own, as parts are uneven, and yet all must send in one order, that of the rules. So
every operator takes the token of the one before it and returns a new one, a dependency that no pass can break; and has
the effect ORDERED, so that none is left out, merged, doubled or done again in backward. Arguments are tensors, numbers
and strings: a graph holds no object of this process, and is kept on disk. Heads are compared at every run, and are
those that the rules send when they run as they are.
"""

from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.effects import EffectType
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.library import Library, register_fake

from fullframe.ranks.collectives import all_gather_no_grad, all_sum_no_grad, share_out
from fullframe.ranks.exchange import InFlight, Message, message_of, noted
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import drawn_seed
from fullframe.ranks.recording import recorder, recording
from fullframe.ranks.shared_memory import fits
from fullframe.ranks.tags import Rows, line

_axes: dict[str, Any] = {}  # by the names of their process group and their own
_flights: dict[tuple[str, int], InFlight] = {}  # posted and not waited for, by axis and the number in its graph

OPERATORS = "fullframe"  # their namespace
_library = Library(OPERATORS, "DEF")
_runs: dict[Any, Callable[..., Any]] = {}


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]

    def send(*args: Any) -> Any:
        if recorder() is None:
            return run(*args)
        with recording(None):  # called with real tensors while something is captured
            return run(*args)

    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout))
    _library.impl(name, send, "CompositeExplicitAutograd")
    register_fake(f"fullframe::{name}", fake, lib=_library)
    torch.library._register_effectful_op(f"fullframe::{name}", EffectType.ORDERED, lib=_library)
    operator = getattr(torch.ops.fullframe, name).default
    _runs[operator] = send
    return operator


def as_it_runs(operator: Any) -> Callable[..., Any]:
    """What an operator does with real tensors, as a function: on fake ones it shows each op and message of it."""
    return _runs[operator]


def _next(token: Tensor) -> Tensor:
    """Another one: torch takes no result that shares memory with an operand, not even without elements."""
    return torch.empty_like(token)


class _Way(NamedTuple):
    """What is sent to whom, and what comes from whom, in which shapes."""

    sends: tuple[tuple[int, Rows | None], ...]
    receives: tuple[tuple[int, Rows | None, tuple[int, ...]], ...]


@lru_cache(maxsize=16384)
def _way(text: str) -> _Way:
    """Read from what `_written` wrote: one string takes an operator less time to take than many lists of numbers."""
    sends, receives = literal_eval(text)
    return _Way(
        tuple((peer, rows and Rows(*rows)) for peer, rows in sends),
        tuple((peer, rows and Rows(*rows), shape) for peer, rows, shape in receives),
    )


def _written(sends: Sequence[Message], receives: Sequence[Message]) -> str:
    sent = tuple((m.peer, m.rows and tuple(m.rows)) for m in sends)
    due = tuple((m.peer, m.rows and tuple(m.rows), tuple(m.tensor.shape)) for m in receives)
    return repr((sent, due))


def _sent(
    token: Tensor, sends: list[Tensor], way: str, dtype: torch.dtype, dims: int, axis: str, kind: str, at: str
) -> InFlight:
    along, known = _axes[axis], _way(way)
    channel = along.channel
    if channel.record is not None:
        noted(along, token.new_empty((0,) * dims, dtype=dtype), kind, at)
    boxes = channel.boxes
    # A compiled graph uses memory again that it takes for done with, which a message may still be read from.
    sends = [t if boxes is not None and fits(t) else t.clone(memory_format=torch.contiguous_format) for t in sends]
    out = [message_of((peer, tensor, rows)) for (peer, rows), tensor in zip(known.sends, sends, strict=True)]
    like = sends[0] if sends else token.new_empty(0, dtype=dtype)
    due = [message_of((peer, like.new_empty(shape), rows)) for peer, rows, shape in known.receives]
    return InFlight(along, out, due, kind, at)


def _due(token: Tensor, way: str, dtype: torch.dtype) -> list[Tensor]:
    return [token.new_empty(shape, dtype=dtype) for _, _, shape in _way(way).receives]


def _exchange(token: Tensor, *what: Any) -> list[Tensor]:
    return [_next(token), *_sent(token, *what).wait()]


_exchange_op = _define(
    "exchange(Tensor token, Tensor[] sends, str way, ScalarType dtype, int dims, str axis, str kind, str at) "
    "-> Tensor[]",
    _exchange,
    lambda token, sends, way, dtype, *rest: [_next(token), *_due(token, way, dtype)],
)


def _post(token: Tensor, *what: Any) -> Tensor:
    _flights[what[4], what[-1]] = _sent(token, *what[:-1])  # by axis and number
    return _next(token)


_post_op = _define(
    "post(Tensor token, Tensor[] sends, str way, ScalarType dtype, int dims, str axis, str kind, str at, int slot) "
    "-> Tensor",
    _post,
    lambda token, *rest: _next(token),
)


def _wait(token: Tensor, after: list[Tensor], way: str, dtype: torch.dtype, axis: str, slot: int) -> list[Tensor]:
    return [_next(token), *_flights.pop((axis, slot)).wait()]


_wait_op = _define(
    "wait(Tensor token, Tensor[] after, str way, ScalarType dtype, str axis, int slot) -> Tensor[]",
    _wait,
    lambda token, after, way, dtype, *rest: [_next(token), *_due(token, way, dtype)],
)


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = _resolve_process_group(GroupName(name))
    return group


_sum_op = _define(
    "sum(Tensor token, Tensor value, str group, str at) -> (Tensor, Tensor)",
    lambda token, value, group, at: (_next(token), all_sum_no_grad(value, _group(group), at=at or None)),
    lambda token, value, group, at: (_next(token), value.new_empty(value.shape)),
)
_gather_op = _define(
    "gather(Tensor token, Tensor value, int ranks, str group, str kind, str at) -> (Tensor, Tensor)",
    lambda token, value, ranks, group, kind, at: (
        _next(token),
        all_gather_no_grad(value, _group(group), kind, at or None),
    ),
    lambda token, value, ranks, group, kind, at: (_next(token), value.new_empty((ranks, *value.shape))),
)
_share_op = _define(
    "share_out(Tensor token, Tensor parts, str group, str at) -> (Tensor, Tensor)",
    lambda token, parts, group, at: (_next(token), share_out(parts, _group(group), at or None)),
    lambda token, parts, group, at: (_next(token), parts.new_empty(parts.shape[1:])),
)


def _kept(token: Tensor, shape: list[int], p: float, device: torch.device, part: int) -> tuple[Tensor, Tensor]:
    own = torch.Generator(device).manual_seed(drawn_seed() + part)
    return _next(token), torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(p, generator=own)


_kept_op = _define(
    "kept(Tensor token, int[] shape, float p, Device device, int part) -> (Tensor, Tensor)",
    _kept,
    lambda token, shape, p, device, part: (_next(token), torch.empty(shape, dtype=torch.bool, device=device)),
)


def _draw(
    token: Tensor, kind: str, size: list[int], dtype: torch.dtype, device: torch.device, a: float, b: float
) -> tuple[Tensor, Tensor]:
    if kind == "randint":
        return _next(token), torch.randint(int(a), int(b), size, dtype=dtype, device=device)
    if kind == "randperm":
        return _next(token), torch.randperm(size[0], dtype=dtype, device=device)
    drawn = getattr(torch.empty(size, dtype=dtype, device=device), kind)
    return _next(token), drawn(a) if kind == "bernoulli_" else drawn(a, b)


_draw_op = _define(
    "draw(Tensor token, str kind, int[] size, ScalarType dtype, Device device, float a, float b) -> (Tensor, Tensor)",
    _draw,
    lambda token, kind, size, dtype, device, a, b: (_next(token), torch.empty(size, dtype=dtype, device=device)),
)


class GraphRecorder:
    """Puts operators into the graph that is being captured, in the place of messages and draws."""

    def __init__(self) -> None:
        self._token: Tensor | None = None
        self._slot = 0

    def begin(self) -> None:
        """A new trace of the same block."""
        self._token, self._slot = None, 0

    def _last(self, device: torch.device) -> Tensor:
        return torch.empty(0, device=device) if self._token is None else self._token

    def post(
        self, axis: Any, sends: Sequence[Message], receives: Sequence[Message], like: Tensor, kind: str, at_once: bool
    ) -> "_Recorded":
        """An operator that posts the messages; the result's `wait` puts in the one that waits for them.

        `at_once`: one operator that does both.
        """
        sends = [m for m in sends if m.tensor.numel()]
        full = [m for m in receives if m.tensor.numel()]
        flight = _Recorded(self, receives)
        if sends or full or axis.channel.record is not None:
            name = f"{axis.group.group_name}/{axis.name}"
            _axes[name] = axis
            way = _written(sends, full)
            token, tensors = self._last(like.device), [m.tensor.detach() for m in sends]
            what = way, like.dtype, like.dim(), name, kind, _line()
            if at_once:
                self._token, *flight.found = _exchange_op(token, tensors, *what)
            else:
                self._token = _post_op(token, tensors, *what, self._slot)
                flight.what = way, like.dtype, name, self._slot
                self._slot += 1
        return flight

    def wait(self, after: Sequence[Tensor], what: tuple[Any, ...]) -> list[Tensor]:
        """What was posted with `what`, once `after` is computed."""
        self._token, *found = _wait_op(self._token, [t.detach() for t in after], *what)
        return list(found)

    def all_sum(self, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The operator of `all_sum_no_grad`."""
        if dist.get_world_size(group) == 1:
            return value.detach().clone(memory_format=torch.contiguous_format)
        return self._made(_sum_op, value, group.group_name, _line())

    def all_gather(self, value: Tensor, group: dist.ProcessGroup, kind: str) -> Tensor:
        """The operator of `all_gather_no_grad`."""
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return value.detach()[None].clone(memory_format=torch.contiguous_format)
        return self._made(_gather_op, value, ranks, group.group_name, kind, _line())

    def share_out(self, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The operator of `share_out`."""
        return self._made(_share_op, parts, group.group_name, _line())

    def _made(self, operator: Any, value: Tensor, *rest: Any) -> Tensor:
        self._token, result = operator(self._last(value.device), value.detach(), *rest)
        return result  # type: ignore[no-any-return]

    def kept(self, shape: Sequence[int], p: float, device: torch.device, part: int) -> Tensor:
        """What dropout keeps of part number `part`: drawn from the default generator's next seed."""
        self._token, drawn = _kept_op(self._last(device), list(shape), p, device, part)
        return drawn  # type: ignore[no-any-return]

    def draw(
        self, kind: str, size: Sequence[int], dtype: torch.dtype, device: torch.device, a: float, b: float
    ) -> Tensor:
        """Numbers from the default generator, in the order in which the block draws them."""
        self._token, drawn = _draw_op(self._last(device), kind, list(size), dtype, device, a, b)
        return drawn  # type: ignore[no-any-return]


class _Recorded:
    """As an `InFlight`: with `what` it is to wait for, where anything is, or what it has `found`."""

    def __init__(self, by: GraphRecorder, receives: Sequence[Message]):
        self._by, self._receives = by, receives
        self.what: tuple[Any, ...] = ()
        self.found: list[Tensor] = []

    def wait(self, after: Sequence[Tensor] = ()) -> list[Tensor]:
        """What the graph receives, in the order of `receives` and in their memory formats."""
        found = iter(self._by.wait(after, self.what) if self.what else self.found)
        return [
            next(found).contiguous(memory_format=memory_format_of(m.tensor)) if m.tensor.numel() else m.tensor
            for m in self._receives
        ]


def _line() -> str:
    """The line of the block that is captured; "" in backward, whose line is only known when it runs."""
    return line() if torch._C._current_graph_task_id() == -1 else ""
