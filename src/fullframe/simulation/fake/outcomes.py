"""What ops give on fake tensors, remembered: a step meets few kinds of ops, each many times.

FakeTensorMode remembers too, but takes ten times as long to recognise an op; and there is nothing to do for an op in
place. What is not plainly one of the cases below goes to FakeTensorMode.
"""

import functools
import re
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._pytree import tree_iter, tree_map_only

from fullframe.model.door import Undressed
from fullframe.simulation.fake.finite import certain, follow_certain, passes_checks_of_torch
from fullframe.simulation.fake.full_masks import (
    FULL_MASKS,
    are_known,
    as_if_all_were_true,
    count_as_full,
    picks_by_value,
)
from fullframe.simulation.fake.numbers import (
    DRAWN,
    NotKnown,
    are_drawn,
    computed,
    follow,
    know,
    known,
    numbers_of,
    written_by,
)
from fullframe.simulation.fake.recurrent import CUDNN_KEEPS_MORE, LSTM_LAYER, with_workspace
from fullframe.simulation.fake.sharded import on_parts

_number_of = torch.ops.aten._local_scalar_dense.default
_lift = torch.ops.aten.lift_fresh.default
_MESSAGES = {
    getattr(torch.ops.c10d, name).default
    for name in ("broadcast_", "allreduce_", "send", "recv_", "_allgather_base_", "_reduce_scatter_base_")
}
_EQUAL = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
_CPU = torch.device("cpu")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
NUMBERS_READ = (
    "{} reads numbers from its tensors, which a simulation does not have: each is taken to be 1, also in a comparison, "
    "and what a mask counts to be all of it"
)
_LOSS = re.compile("loss|criterion|assign", re.IGNORECASE)  # in the name of a function or of its class
_COMPARISONS = frozenset(
    ["gt", "ge", "lt", "le", "eq", "ne", "isnan", "isinf", "logical_not", "logical_and", "logical_or", "any", "all"]
)
# What derivatives write into zeros that they have made; of tensors of other classes than torch's they make new ones.
_INTO_ZEROS = {
    *(getattr(torch.ops.aten, name).default for name in ("index_put", "_unsafe_index_put", "scatter_add")),
    *(getattr(torch.ops.aten, name).default for name in ("index_add", "put")),
    torch.ops.aten.scatter.src,
}
_FILL_ZEROS = re.compile(
    "(Gather|Index|IndexSelect|Take|Max|Min|Cummax|Cummin|Topk|Sort|Kthvalue|Median|Nanmedian|Mode)Backward[0-9]"
)
# The same of what the derivative of binary cross-entropy has made, but not of what was saved for it.
_OF_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
_ON_LOGITS = (torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor)
# Made as large as their operands and then smaller, which gives no memory back: while a mean loss lives, every element's
# does.
_ROOMY = {
    *(getattr(torch.ops.aten, name).default for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "col2im")),
    torch.ops.aten.binary_cross_entropy.default,
}
_OF_ONE_DTYPE = {torch.ops.aten.grid_sampler_2d.default, torch.ops.aten.grid_sampler_3d.default}
_OF_A_GRID = {
    torch.ops.aten.grid_sampler_2d_backward.default,
    torch.ops.aten.grid_sampler_3d_backward.default,
}  # which is always made
_SMALL = 2**20  # elements that may have memory
_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_Kind = Literal["new", "compared", "in place", "all in place", "view", "other"]


class _Meta(NamedTuple):
    """A new tensor to be made."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Outcomes:
    """`outcomes(func, args, kwargs)` is `func(*args, **kwargs)`."""

    def __init__(self, fake: FakeTensorMode, on_gpu: bool = False):
        self.updating = False  # inside an optimizer, where a number that is read decides of no shape
        self.evaluating = False  # inside recipe.evaluate, which reads numbers to give them
        self.in_loss: Callable[[], bool] = lambda: False  # which logs numbers, and asks whether anything is there
        self.notes: set[str] = set()  # what was taken for granted
        self._fake, self._on_gpu = fake, on_gpu
        self._attributes = FakeTensor(fake, torch.empty(0, device="meta"), _CPU).__dict__
        self._remembered: dict[Hashable, Any] = {}  # by op and arguments: a _Meta, a list of them, or None: not plain
        self._works: dict[Any, Any] = {}  # by op: how a fake message ends, at once and always alike

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        numbers = numbers_of(args, kwargs)
        if numbers is not None and not _BY_VALUES.isdisjoint(func.tags):
            with suppress(NotKnown):
                found = computed(func, numbers)
                self.notes |= {DRAWN} if are_drawn(args) else set()
                return tree_map_only(Tensor, self._known_as, found)
        out = self._outcome(func, args, kwargs)
        follow(func, args, kwargs, numbers, out)
        follow_certain(func, args, out)
        count_as_full(func, args, out)
        return out

    def _outcome(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if (func in _INTO_ZEROS and _fills_zeros()) or (func in _ON_LOGITS and _writes_on_logits(args[0])):
            return args[0]
        if func in _OF_ONE_DTYPE and args[0].dtype is not args[1].dtype:
            raise RuntimeError(f"{func} wants operands of one dtype, not {args[0].dtype} and {args[1].dtype}")
        if func in _ROOMY:
            return self._in_room_for(args, func(*args, **kwargs))
        kind = _kind(func)
        if picks_by_value(func, args):
            self.notes |= set() if are_known(func, args) else {FULL_MASKS}
            with self._fake:
                return as_if_all_were_true(func, args)
        if func is LSTM_LAYER:
            self.notes |= {CUDNN_KEEPS_MORE} if self._on_gpu else set()
            with self._fake:
                return with_workspace(func(*args), args, self._on_gpu)
        if kind == "other":
            return self._other(func, args, kwargs)
        if kind == "compared":
            if all(arg.numel() == 1 for arg in args if isinstance(arg, Tensor)):
                return self._compared(func, args, kwargs)
            kind = "new"
        try:
            key = func, _signature(args), _signature(tuple(kwargs.items()))
        except _NotPlain:
            out = on_parts(self, func, args, kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out
        if kind == "all in place":
            return None
        if kind == "view":
            with in_kernel_invocation_manager(self._fake):
                out = func(*args, **kwargs)
            return self._made(out) if isinstance(out, Tensor) else [self._made(tensor) for tensor in out]
        if key not in self._remembered:
            out = _wanted(func, args, func(*args, **kwargs))
            self._remembered[key] = True if kind == "in place" else _described(out, args)
            return out
        outcome = self._remembered[key]
        if outcome is None:
            return _wanted(func, args, func(*args, **kwargs))
        if kind == "in place":
            return args[0]
        tensors = [None if meta is None else self._made(_empty(*meta)) for meta in outcome[1]]
        return tensors[0] if outcome[0] is None else outcome[0](tensors)

    def _in_room_for(self, args: Sequence[Any], out: Any) -> Any:
        """`out` in as much memory as its largest operand would take in its dtype."""
        elements = max(arg.numel() for arg in args if isinstance(arg, Tensor))
        if type(out) is not FakeTensor or out.numel() >= elements:
            return out
        with torch._C._DisableTorchDispatch():
            return self._made(torch.empty(elements, dtype=out.dtype, device="meta").resize_(out.shape))

    def _made(self, meta: Tensor) -> FakeTensor:
        """`FakeTensor(fake, meta, "cpu")`, whose constructor sets each attribute anew."""
        made = Tensor._make_subclass(FakeTensor, meta, dispatch_device=True, device_for_backend_keys=_CPU)
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self._attributes)
        return made

    def _other(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is _number_of:
            return self._number(args[0])
        if func in _EQUAL and self._may_take():
            self._note_taken()
            return args[0].shape == args[1].shape
        if func is _lift and type(args[0]) is Tensor:
            return self._known_as(args[0])
        if func.namespace == "profiler":  # marks in a profile, which name no tensor
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        work = self._works.get(func)
        if work is not None:
            return (args[0], work) if func._schema.name.endswith("_") and len(func._schema.returns) == 2 else work
        out = func(*args, **kwargs)
        if func in _MESSAGES:
            self._works[func] = out[1] if isinstance(out, tuple) else out
        return out

    def _known_as(self, values: Tensor) -> FakeTensor:
        """A fake tensor of these numbers, as `torch.tensor([2, 3])` gives."""
        made = self._made(_empty(values.shape, values.stride(), values.dtype))
        know(made, values)
        return made

    def _compared(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A truth about numbers, which says what it is where they are what they are taken for."""
        out = func(*args, **kwargs)
        operands = [_taken_for(arg) if isinstance(arg, Tensor) else arg for arg in args]
        if out.numel() == 1 and all(operand is not None for operand in operands):
            with torch._C._DisableTorchDispatch():
                out.taken_for = func(*operands, **kwargs)
        return out

    def _number(self, tensor: Tensor) -> Any:
        if self.updating and tensor.is_floating_point():
            return 1.0  # a norm, by which an update is scaled
        if (value := certain(tensor)) is None and known(tensor) is None:
            value = passes_checks_of_torch()
        if value is not None:
            return bool(value) if tensor.dtype is torch.bool else value
        taken = _taken_for(tensor) if self._may_take() else None
        if taken is None:
            return _number_of(tensor)
        self._note_taken()
        with torch._C._DisableTorchDispatch():
            return taken.item()

    def numbers(self, tensor: FakeTensor) -> Tensor:
        """Those that are known, or as many times 1 where they may be taken so; else DataDependentOutputException."""
        found = known(tensor)
        if found is not None:
            return found
        if not self._may_take():
            raise DataDependentOutputException(_number_of)
        self._note_taken()
        with torch._C._DisableTorchDispatch():
            one = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
            return one.clone() if tensor.numel() <= _SMALL else one

    def _may_take(self) -> bool:
        return self.evaluating or self.in_loss() or _model_computes_loss()

    def _note_taken(self) -> None:
        self.notes.add(NUMBERS_READ.format("evaluate()" if self.evaluating else "the loss"))


def _model_computes_loss() -> bool:
    """Whether a function on the way here from the model's own forward is named as a part of a loss."""
    frame: FrameType | None = sys._getframe(1)
    named = False
    while frame is not None:
        asks = frame.f_globals.get("__name__", "")
        if asks == Undressed.__module__:
            return named
        named |= not asks.startswith(("torch.", "fullframe.")) and _LOSS.search(frame.f_code.co_qualname) is not None
        frame = frame.f_back
    return False


def _fills_zeros() -> bool:
    """Whether torch's own derivative of an op that picks elements is at work, and is not to be derived itself."""
    node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
    return node is not None and _FILL_ZEROS.fullmatch(node.name()) is not None


def _writes_on_logits(x: Tensor) -> bool:
    """Whether the derivative of binary cross-entropy is at work, and `x` is its own."""
    node: Any = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
    return node is not None and node.name() == _OF_LOGITS and x is not node._saved_pos_weight


def _taken_for(number: Tensor) -> Tensor | None:
    """A real tensor of one element: what it knows, or 1. None for a truth of which nothing is known."""
    found = known(number)
    found = getattr(number, "taken_for", None) if found is None else found
    if found is not None or number.dtype is torch.bool:
        return found
    with torch._C._DisableTorchDispatch():
        return torch.ones((), dtype=number.dtype)


def _wanted(func: Any, args: Sequence[Any], out: Any) -> Any:
    """`out` without what `output_mask` leaves out, which a kernel does not make and a fake one does."""
    place = _place_of_mask(func)
    if place is None or len(args) <= place:
        return out
    kept = (args[place][0], True) if func in _OF_A_GRID else args[place]
    return tuple(made if wanted else None for made, wanted in zip(out, kept, strict=True))


@functools.cache
def _place_of_mask(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("output_mask") if "output_mask" in names else None


class _NotPlain(Exception):
    """An argument by whose shape and type alone the outcome is not decided."""


@functools.cache
def _kind(func: Any) -> _Kind:
    schema = func._schema
    name = func._opname
    written = written_by(func)
    if written and not schema.returns and (name.startswith(("_foreach", "_fused")) or func.namespace == "fsdp"):
        return "all in place"
    if func.namespace != "aten" or torch.Tag.inplace_view in func.tags or name.startswith("lift"):
        return "other"
    if not all(str(value.type) in ("Tensor", "List[Tensor]") for value in schema.returns):
        return "other"
    if written:
        first_only = len(schema.returns) <= 1 and written[0][0] == 0
        return "in place" if len(written) == 1 and first_only and schema.returns else "other"
    if all(value.alias_info is not None for value in schema.returns):
        return "view" if func.is_view and len(schema.returns) == 1 else "other"
    if any(value.alias_info is not None for value in schema.returns):
        return "other"
    return "compared" if name in _COMPARISONS else "new"


def _signature(value: Any) -> Hashable:
    kind = type(value)
    if kind is FakeTensor or isinstance(value, FakeTensor):
        if value.constant is not None:
            raise _NotPlain
        return value.shape, value.stride(), value.dtype
    if kind in (list, tuple, torch.Size):
        return tuple(map(_signature, value))
    if kind not in _PLAIN:
        raise _NotPlain
    return kind, value


def _described(out: Any, args: Sequence[Any]) -> Any:
    """The container and the tensors of an outcome that shares nothing with the arguments; None of any other."""
    container = type(out) if type(out) in (tuple, list) else None
    tensors = [out] if container is None else list(out)
    metas: list[_Meta | None] = []
    for tensor in tensors:
        if tensor is None:  # a gradient that nobody asked for
            metas.append(None)
            continue
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.storage_offset():
            return None
        meta = _Meta(tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.untyped_storage().nbytes() != _bytes(meta) or tensor._is_view():
            return None
        metas.append(meta)
    mine = {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}
    given = {leaf.untyped_storage()._cdata for leaf in tree_iter(args) if isinstance(leaf, Tensor)}
    return None if mine & given or len(mine) < len(metas) - metas.count(None) else (container, metas)


def _empty(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """On the meta device, unseen by any mode."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _bytes(meta: _Meta) -> int:
    if 0 in meta.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride, strict=True))
    return (last + 1) * meta.dtype.itemsize
