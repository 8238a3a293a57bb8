"""A device that works as CUDA does, in pure Python: its tensors' data lie on the CPU, all else is as on a GPU.

Autograd runs in a thread of the device; a kernel takes no CPU tensor beside the device's; each copy between the two,
and each value that the host asks for, is counted with the line that asked, and so are the kernels. What it lacks: time
(a kernel has run when it returns), streams, and CUDA's own kernels, but for the few in `stand_ins`.

torch has one such device a process, for good: only processes of their own call `register`.
"""

import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.library import Library
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg as _fake_pg  # noqa: F401  it makes the backend known
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fullframe.model import world_collectives
from tests.cuda_like.communication import Call, Sent
from tests.cuda_like.stand_ins import STAND_INS

NAME = "cuda_like"
CPU = torch.device("cpu")
_PACKAGES, _PYTHON = str(Path(torch.__file__).parents[1]), sysconfig.get_paths()["stdlib"]
_SOURCE, _FOLDER, _HERE = "/src/fullframe/", "/tests/cuda_like/", str(Path(__file__))
_WATCH = world_collectives.__file__

# The host asks for a value, or for a shape or an error that hangs on values, and so waits for the device.
WAITS = frozenset({
    "_linalg_check_errors", "_local_scalar_dense", "_unique", "_unique2", "bincount", "equal", "histc", "histogram",
    "is_nonzero", "item", "linalg_eig", "linalg_eigvals", "masked_select", "multinomial", "nonzero",
    "unique_consecutive", "unique_dim",
})  # fmt: skip
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
NO_KERNEL = frozenset({
    "_has_compatible_shallow_copy_type", "_reshape_alias", "_unsafe_view", "alias", "as_strided_", "detach", "empty",
    "empty_like", "empty_permuted", "empty_strided", "is_same_size", "lift_fresh", "new_empty", "new_empty_strided",
    "record_stream", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride",
})  # fmt: skip


class Line(NamedTuple):
    """Where something was asked of the device; `ours` in the package, whose `path` is that below it."""

    path: str
    function: str
    number: int
    ours: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.number} ({self.function})"


class Counts:
    """What was asked of the device: kernels by operator, waits of the host by (why, line), and from which threads."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[tuple[str, Line]] = Counter()
        self.threads: set[int] = set()
        self.faults: set[tuple[str, Line]] = set()  # what CUDA would refuse, and its line
        self.calls: list[Call] = []  # of the device's communicators, in order
        self.batch = -1  # of the last one


_counting: list[Counts] = []


@contextmanager
def counted() -> Iterator[Counts]:
    """What is asked of the device inside, on all threads."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


class OnDevice(Tensor):
    """A tensor of the device; `raw` holds its data."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> "OnDevice":
        assert type(raw) is not OnDevice, "it is on the device already"
        made = Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=torch.device(NAME, 0), requires_grad=requires_grad,
        )  # fmt: skip
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        for counts in _counting:
            counts.waits["tolist", line()] += 1
        return self.raw.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.raw!r})"


def to_device(tensor: Tensor) -> Tensor:
    """A copy on the device, a leaf that wants a gradient where `tensor` does; not counted."""
    return OnDevice(tensor.detach().clone(), tensor.requires_grad)


def to_host(tensor: Tensor) -> Tensor:
    """The data of a tensor of the device; not counted."""
    return tensor.detach().raw if tensor.device.type == NAME else tensor.detach()  # type: ignore[attr-defined]


class TestsOnDevice(TorchFunctionMode):
    """What a test makes or holds without saying where lies on the device; calls of the package are left alone."""

    def __init__(self) -> None:
        super().__init__()
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the first, which must not be used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_code.co_filename
        if "/tests/" in caller and _FOLDER not in caller:
            args, kwargs = tree_map_only(Tensor, self._here, (args, kwargs))
            if func in _device_constructors() and kwargs.get("device") is None:
                kwargs["device"] = NAME
        return func(*args, **kwargs)

    def _here(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or not tensor.dim():
            return tensor
        if id(tensor) not in self._moved:
            self._moved[id(tensor)] = tensor, to_device(tensor)
        return self._moved[id(tensor)][1]


def register() -> None:
    """Make the device known to torch and to its fake process group, in this process for good."""
    _setup_privateuseone_for_python_backend(NAME)
    module = torch.get_device_module(NAME)
    module.get_device_name = lambda index: NAME
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.init, module.get_rng_state, module.set_rng_state = lambda: None, torch.get_rng_state, torch.set_rng_state
    _libraries.append(Library("_", "IMPL"))
    _libraries[-1].fallback(_run_here, "PrivateUse1")
    _libraries.append(Library("aten", "IMPL"))
    for name in (*_KERNELS, *STAND_INS):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _libraries[-1].impl(name, partial(_run_here, op), "PrivateUse1")
    torch.Generator = Generator  # type: ignore[assignment, misc]  # torch takes none of a device made in Python
    dist.Backend.backend_capability["fake"].append(NAME)
    dist.Backend.default_device_backend_map[NAME] = "fake"  # as CUDA has NCCL
    FakeProcessGroup.supports_coalescing = True  # as NCCL does
    dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing = _start_batch, _end_batch


class _Through:
    """The work of a batch, which is done."""

    def wait(self) -> bool:
        return True


def _start_batch(group: dist.ProcessGroup, device: torch.device) -> None:
    _batches[0] += 1


def _end_batch(group: dist.ProcessGroup, device: torch.device) -> _Through:
    _batches[0] += 1
    return _Through()


_batches = [0]  # begun and ended: an odd number inside of one
_libraries: list[Library] = []
# What does not do with a fallback: what `torch.tensor` writes with, and what torch makes by `resize_`.
_KERNELS = ("copy_", "arange", "arange.start", "arange.start_step", "linspace", "logspace", "eye", "eye.m", "randperm")
_Generator = torch.Generator


class _AlsoOthers(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Generator)


class Generator(metaclass=_AlsoOthers):
    """In the place of `torch.Generator`: one of the CPU draws for the device."""

    def __new__(cls, device: Any = CPU) -> Any:
        return _Generator(CPU if torch.device(device).type == NAME else device)


def _run_here(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on the data, its results on the device again."""
    tensors = list(_tensors_in((*args, *kwargs.values())))
    own = [t for t in tensors if type(t) is OnDevice]
    others = [t for t in tensors if type(t) is not OnDevice]
    target = kwargs.get("device")
    arrives = target is not None and torch.device(target).type == NAME
    leaves = func._opname == "_local_scalar_dense" or (target is not None and not arrives)
    for counts in _counting:
        counts.threads.add(threading.get_ident())
        _count(counts, func, args, own, others, leaves)
    given, named = _mapped(_raw, args), {name: _mapped(_raw, value) for name, value in kwargs.items()}
    if arrives:
        named = {**named, "device": CPU}
    if func.namespace == "c10d":
        for counts in _counting:
            _log(counts, func._opname, args, own)
        for t in own if func._opname.startswith("recv") else ():
            t.raw.zero_()  # what comes from nowhere is the same in every run
    stand_in = STAND_INS.get(func._opname)
    result = func(*given, **named) if stand_in is None else stand_in(*given, **named)
    if leaves:
        return result
    known = {id(t.raw): t for t in own}

    def here(t: Tensor) -> Tensor:
        # A wrapper cannot say that its data are to be read conjugated or negated.
        return known[id(t)] if id(t) in known else OnDevice(t.resolve_conj().resolve_neg())

    result = _mapped(here, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if _is_view(func) and own else result


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors_in(value)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with its tensors changed: as `tree_map`, which takes most of a test's time."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_mapped(change, item) for item in value) if type(value) in (list, tuple) else value


def _raw(t: Tensor) -> Tensor:
    return t.raw if type(t) is OnDevice else t


def _meet(func: Any, others: list[Tensor]) -> bool:
    """Whether tensors of the CPU meet the device's where CUDA's kernel refuses them.

    It takes numbers in pointwise functions, and positions.
    """
    if func._opname in INDEXING or func._opname in ("copy_", "_to_copy") or func.namespace != "aten":
        return False
    return any(t.dim() for t in others) or torch.Tag.pointwise not in func.tags


def _count(counts: Counts, func: Any, args: Any, own: list[Tensor], others: list[Tensor], leaves: bool) -> None:
    name = func._opname
    why = None
    if name == "copy_":
        why = "copy to the device" if type(args[0]) is OnDevice and others else "copy to the host" if others else None
    elif own and leaves and name != "_local_scalar_dense":
        why = "copy to the host"
    elif name in INDEXING:
        marks = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        why = "a mask as an index" if marks else "copy to the device" if others else None
    elif name in WAITS or str(func) == "aten.repeat_interleave.Tensor":
        why = name
    if own and others and _meet(func, others):
        counts.faults.add((f"{func} of tensors of two devices", line()))
    if why is not None and (own or others):
        counts.waits[why, line()] += 1
    copied = why is not None and why.startswith("copy")
    if func.namespace == "aten" and not (name in NO_KERNEL or _is_view(func) or leaves or copied):
        counts.kernels[name] += 1


def _log(counts: Counts, name: str, args: Any, own: list[Any]) -> None:
    """Note a call; the messages of one batch are one."""
    group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject) and _is_group(a)))
    ranks = tuple(dist.get_process_group_ranks(group))
    numbers = [a for a in args if type(a) in (int, bool)]
    sent = [Sent(tuple(t.shape), str(t.dtype), t.raw.is_contiguous()) for t in own]
    at = str(line())
    if name in ("send", "recv_"):
        what, peer = ("send" if name == "send" else "receive"), ranks[numbers[0]]
        parts = tuple((what, peer, one) for one in sent)
        if counts.batch == _batches[0] % 2 * _batches[0]:
            parts = counts.calls.pop().parts + parts
        counts.batch = _batches[0]
        counts.calls.append(Call(group.group_name, ranks, "batch", parts, at))
        return
    counts.calls.append(Call(group.group_name, ranks, f"{name} {numbers}", tuple(("all", -1, one) for one in sent), at))


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in value._type().name()


def _is_view(func: Any) -> bool:
    return func.is_view or torch.Tag.inplace_view in func.tags


def line() -> Line:
    """The innermost line outside torch, here and the watch on collectives; nobody's where autograd calls kernels."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name not in (_HERE, _WATCH) and not name.startswith((_PACKAGES, _PYTHON, "<")):
            inside = _SOURCE in name
            return Line(name.partition(_SOURCE)[2] if inside else name, code.co_qualname, frame.f_lineno, inside)
        frame = frame.f_back
    return Line("", "", 0, False)
