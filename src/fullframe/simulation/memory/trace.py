"""What a step allocates and frees, seen from below autograd: every storage is watched by a weak reference.

Works on fake tensors and on real ones. What a kernel allocates for itself never shows as a tensor; `scratch` says it.
"""

import functools
import math
import sys
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from fullframe.ranks.operators import OPERATORS, as_it_runs
from fullframe.simulation.clock.ops import Op
from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.fake.replaced import replaced

Phase = Literal["build", "forward", "recompute", "backward", "update", "evaluation"]
Run = Callable[[Any, Sequence[Any], dict[str, Any]], Any]  # (func, args, kwargs) -> out
Scratch = Callable[[Any, tuple[Any, ...], Any], int]  # (func, args, out) -> bytes a kernel needs while it runs

# FSDP2 asks for what it gathers into, and for what it reduces into, on streams of its own.
_STREAMS_OF_FSDP2 = {"allgather_base": "gather", "reduce_scatter_base": "reduce"}

_device_of = torch.ops.prim.device.default
_add, _add_into = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_HELD = 4, 4  # references to a gradient that autograd alone has, at most: by tensors in C++, and by Python here
_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_running_node: Callable[[], Any] = torch._C._current_autograd_node


@dataclass(eq=False, slots=True)
class Block:
    """One storage: its bytes, the tensor that was first seen on it, and when it lived (numbers of events)."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    phase: Phase
    born: int
    died: int | None = None  # None: it outlived the trace
    region_end: int | None = None  # of a recompute: where the module that ran again was done
    mark: str | None = None  # the category, where somebody knows it
    stream: str = ""  # that asked for it, where it is not the program's


@dataclass
class Trace:
    """What was allocated and freed, in order, and where in that order backward passes and steps lay."""

    events: list[Block] = field(default_factory=list)  # a block's first event is its birth, its second its end
    backwards: list[range] = field(default_factory=list)  # numbers of events
    step_ends: list[int] = field(default_factory=list)


class OutOfTime(Exception):
    """The time that a simulation was given is over."""


class Tracer(TorchDispatchMode):
    """Fills `.trace` while it is entered.

    `names` are the paths of the model's modules; `axes` the mesh axis of each process group, by the group's name;
    `workspace` what a thread takes and keeps with its first product of matrices. After `until`, by `time.monotonic()`,
    the next op raises OutOfTime.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        axes: Mapping[str, str],
        run: Run,
        scratch: Scratch,
        clock: StepClock | None = None,
        until: float = math.inf,
        workspace: int = 0,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.outside: Phase = "build"  # of backward: "forward" once steps are taken
        self.groups: dict[str, int] = {}  # ranks of the process groups that were used, by name
        self._names, self._axes, self._run, self._scratch, self._clock = names, axes, run, scratch, clock
        self._until, self._workspace, self._multiplies = until, workspace, False
        self._live: dict[int, Block] = {}  # by the address of the storage
        self._watching: dict[int, weakref.ref[Any]] = {}
        self._modules: list[str] = []  # that are running, innermost last
        self._depth = 0  # modules of the model that are running
        self._nodes, self._owners = [0], [""]  # the module that made the autograd nodes from a number on
        self._backward_start: int | None = None
        self._node: int | None = None  # the autograd node that runs, and the number of the event before which it began
        self._node_start = 0
        self._rerun: list[Block] = []  # made by a module that runs again in backward
        self._open = ExitStack()

    def __enter__(self) -> "Tracer":
        self._open.enter_context(_resizes_told_to(self._resized))
        for hook in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._open.callback(hook.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._open.close()
        self._watching.clear()  # what goes from now on is not of the trace

    def end_step(self) -> None:
        """A step is done; what it made and is still there stays."""
        self._follow_backward()
        self.trace.step_ends.append(len(self.trace.events))

    def begin_anew(self, category: Callable[[Trace, Block], str]) -> Trace:
        """What was traced so far. From here on another trace is filled, by no clock, which begins with what lives."""
        self._follow_backward()
        done, self._clock = self.trace, None
        living = [block for number, block in enumerate(done.events) if number == block.born and block.died is None]
        copies = {b: replace(b, born=number, mark=category(done, b)) for number, b in enumerate(living)}
        self.trace = Trace([*copies.values()])
        self._live = {key: copies[block] for key, block in self._live.items()}
        return done

    def hold(self, category: str, bytes: int) -> None:
        """As if a tensor of so many bytes were made now and stayed."""
        self._appeared(bytes, (bytes,), torch.uint8, category)

    @property
    def held_bytes(self) -> int:
        """What tensors hold now."""
        return sum(block.bytes for block in self._live.values())

    def repeat(self, start: int, end: int | None = None, times: int = 1) -> None:
        """The same again as from event `start` to `end` (now): these events are copied.

        Blocks of them that still live are there already and are not made again; those that died since `end` live on.
        """
        self._follow_backward()
        trace = self.trace
        end = len(trace.events) if end is None else end
        copied = [n for n in range(start, end) if trace.events[n].died is not None and trace.events[n].born >= start]
        backwards = [backward for backward in trace.backwards if start <= backward.start < end]
        for _ in range(times):
            first = len(trace.events)
            at = {number: first + bisect_left(copied, number) for number in range(start, end + 1)}  # in the copy
            copies: dict[Block, Block] = {}
            for number in copied:
                block = trace.events[number]
                if block not in copies:
                    died = block.died if block.died is not None and block.died < end else None
                    copies[block] = replace(
                        block,
                        born=at[block.born],
                        died=None if died is None else at[died],
                        region_end=None if block.region_end is None else at[block.region_end],
                    )
                trace.events.append(copies[block])
            trace.backwards += [range(at[backward.start], at[backward.stop]) for backward in backwards]

    @property
    def workspaces(self) -> int:
        """Bytes that are held to multiply matrices."""
        return self._workspace if self._multiplies else 0

    @property
    def module(self) -> str:
        """The path of the module that is running, "" outside the model."""
        return self._where()[0]

    def in_loss(self) -> bool:
        """Whether a step is taken and none of the model's modules is running."""
        return self.outside == "forward" and not self._depth

    def mark(self, category: str, *trees: Any, stream: str = "") -> None:
        """Say of what category the tensors in nested values are, and what stream's; the first to say so is right."""
        for tensor in tree_iter(trees):
            if isinstance(tensor, Tensor):
                self.watch(tensor)
                for storage in storages(tensor):
                    block = self._live[storage._cdata]
                    block.mark, block.stream = block.mark or category, block.stream or stream

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled here, and torch would wrap what follows, which is called 50,000 times."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _device_of and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if time.monotonic() > self._until:
            raise OutOfTime(f"before {func}")
        self._follow_backward()
        if func.namespace == OPERATORS:  # of a compiled program: what it sends and draws
            with _entered(self):
                return as_it_runs(func)(*args, **kwargs)
        if self._workspace and Op.of(func).kind == "matmul":
            self._multiply()
        func = _add_into if self._adds_up(func, args) else func
        out = self._run(func, args, kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._communicated(func, args, out)
        elif _makes_storage(func):
            for leaf in out if type(out) in (tuple, list) else (out,):
                if isinstance(leaf, Tensor):
                    self.watch(leaf)
                elif type(leaf) in (tuple, list):
                    self.watch(*leaf)
            scratch = self._scratch(func, args, out)
            if scratch:
                block = self._appeared(scratch, (scratch,), torch.uint8, "workspace")
                self._disappeared(block)
        if self._clock is not None:
            self._clock.record(func, args, kwargs, out)
        return out

    # What lives

    def watch(self, *tensors: Tensor) -> None:
        """Follow the storages of these tensors from here on, unless they are followed already."""
        for tensor in tensors:
            for storage in storages(tensor):
                key = storage._cdata
                if key not in self._live:
                    self._live[key] = self._appeared(storage.nbytes(), tuple(tensor.shape), tensor.dtype)
                    self._watching[key] = weakref.ref(storage, lambda _, key=key: self._died(key))  # type: ignore[misc]

    def _appeared(self, bytes: int, shape: tuple[int, ...], dtype: torch.dtype, mark: str | None = None) -> Block:
        module, phase = self._where()
        block = Block(bytes, shape, str(dtype)[6:], module, phase, len(self.trace.events), mark=mark)
        self.trace.events.append(block)
        if phase == "recompute":
            self._rerun.append(block)
        return block

    def _multiply(self) -> None:
        if not self._multiplies:
            self._multiplies = True
            self._appeared(self._workspace, (self._workspace,), torch.uint8, "workspace")

    def _disappeared(self, block: Block) -> None:
        block.died = len(self.trace.events)
        self.trace.events.append(block)

    def _died(self, key: int) -> None:
        del self._watching[key]
        self._disappeared(self._live.pop(key))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        before = self._live.get(storage._cdata)
        if before is not None and before.bytes != storage.nbytes():
            self._disappeared(before)
            dtype = getattr(torch, before.dtype)
            mark = before.mark or "parameter"  # gathered
            self._live[storage._cdata] = self._appeared(storage.nbytes(), before.shape, dtype, mark)

    # Where we are

    def _where(self) -> tuple[str, Phase]:
        node = _running_node()
        if node is None:
            return self._modules[-1] if self._modules else "", self.outside
        if self._modules:
            return self._modules[-1], "recompute"
        return self._owners[bisect_right(self._nodes, node._sequence_nr()) - 1], "backward"

    def _adds_up(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether autograd adds up two gradients of a tensor: into the first, where nobody else has that one.

        Under a mode it makes a third tensor, also where it would not.
        """
        if func is not _add or self._node is None or torch.is_grad_enabled() or not isinstance(args[1], Tensor):
            return False
        first, key = args[0], args[0].untyped_storage()._cdata
        block = self._live.get(key)
        return (
            block is not None
            and block.born < self._node_start
            and block.bytes == first.nbytes
            and first.shape == args[1].shape
            and first._use_count() <= _HELD[0]
            and sys.getrefcount(first) <= _HELD[1]
            and torch._C._storage_Use_Count(key) <= 2  # its own, and Python's
        )

    def _follow_backward(self) -> None:
        node, now = _running_node(), len(self.trace.events)
        inside, number = node is not None, None if node is None else node._sequence_nr()
        if number != self._node:
            self._node, self._node_start = number, now
        if inside and self._backward_start is None:
            self._backward_start = now
        elif not inside and self._backward_start is not None:
            self.trace.backwards.append(range(self._backward_start, now))
            self._backward_start = None

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._modules.append(self._names.get(module, type(module).__name__))
        self._depth += module in self._names
        self._own_nodes()

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._modules.pop()
        self._depth -= module in self._names
        self._own_nodes()
        if not self._modules:
            for block in self._rerun:
                block.region_end = len(self.trace.events)
            self._rerun.clear()

    def _own_nodes(self) -> None:
        self._nodes.append(_sequence_number())
        self._owners.append(self._modules[-1] if self._modules else "")

    def _communicated(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        kind = func._schema.name.partition("::")[2].strip("_")
        functional = func.namespace == "_c10d_functional"
        if kind in ("wait_tensor", "barrier"):
            return
        group = _group_of(func, args)
        self.groups[group.group_name] = group.size()
        axis = self._axes.get(group.group_name, "job")
        if functional:
            self.mark("communication", out)
        elif kind not in ("send", "broadcast"):
            own = _STREAMS_OF_FSDP2.get(kind, "") if axis in ("data", "job") else ""
            self.mark("communication", args[0], stream=own)
        if self._clock is not None and kind != "recv":
            held = args[0] if not functional or kind.startswith("reduce") else out
            bytes = sum(leaf.nbytes for leaf in tree_iter(held) if isinstance(leaf, Tensor))
            self._clock.communicate(kind, bytes, group.size(), axis, group.group_name)


@contextmanager
def _entered(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, ops come to the mode again, while it handles one."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


def _group_of(func: Any, args: tuple[Any, ...]) -> torch.distributed.ProcessGroup:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return torch.distributed.ProcessGroup.unbox(value)
        if argument.name == "group_name":
            return torch.distributed.distributed_c10d._resolve_process_group(value)
    raise LookupError(f"{func} names no process group")


@functools.cache
def _makes_storage(func: Any) -> bool:
    """Whether some output of the op is, by its schema, neither an input nor a view of one."""
    return any(value.alias_info is None for value in func._schema.returns)


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold a tensor; those of its parts where it is made of tensors (a DTensor, an 8-bit state)."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # of a DTensor also the mesh is a part
                yield from storages(part)
    else:
        yield tensor.untyped_storage()


def _resizes_told_to(listener: Callable[[torch.UntypedStorage], None]) -> AbstractContextManager[None]:
    """FSDP frees and refills what it gathered by resizing storages, which is no op."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        listener(storage)
        return result

    return replaced(torch.UntypedStorage, "resize_", resize_)
