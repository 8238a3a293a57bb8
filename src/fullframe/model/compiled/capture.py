"""A block run on fake tensors, shells around them, by AOTAutograd, which sees the ops and messages of its rules.

Not by Dynamo: the rules are ordinary Python, which decides by global facts alone. Forward and backward become two
graphs, compiled by inductor or run op by op.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from ctypes import string_at
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_unflatten

from fullframe.model.compiled.aot_faults import WithoutAOTFaults
from fullframe.model.compiled.draws import NothingByHand, Watched
from fullframe.model.compiled.fates import Fates, fates, with_fates
from fullframe.model.compiled.guard import MOST_BYTES, PLAIN, SIMPLE, Guard, is_plain, memory
from fullframe.model.compiled.unchanged import unchanged
from fullframe.model.kept_fakes import no_fakes_kept
from fullframe.ranks.operators import GraphRecorder
from fullframe.ranks.recording import NotCapturable, NotYet, recording
from fullframe.ranks.tags import count_as_inside
from fullframe.spatial.gradients import is_managed, stand_in
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_or_whole, wrap
from fullframe.spatial.views import version_of

# "inductor", or "aot_eager": the same graphs run op by op; or inductor with this in the place of its inner compiler.
Backend = str | Callable[..., Any]
_EFFECTS = "torch.ops.higher_order.with_effects"


class Constant(NamedTuple):
    """A leaf of a result that is no tensor."""

    value: Any


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled block: tensors in (parameters, buffers, local parts), tensors out."""

    run: Callable[..., Any]
    used: tuple[int, ...]  # of the tensors that go in, those that it reads
    fates: Fates | None  # of these, by which results each gets its gradient; None where it is by the same ones
    leaves: tuple[Spec | Constant | None, ...]  # of the result; None: a whole tensor
    tree: Any  # of the result
    is_flat: bool  # whether the result is one leaf
    constants: tuple[tuple[Tensor, Any], ...]  # that are in it, and what is known of them

    def __call__(self, own: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
        """The block's result; it has its `own` tensors and is `given` others."""
        tensors = [*own, *given]
        read = [tensors[n] for n in self.used]
        found = self.run(*read) if self.fates is None else with_fates(self.run, read, self.fates)
        if self.is_flat:
            leaf = self.leaves[0]
            if leaf is None:
                return found[0]
            return leaf.value if isinstance(leaf, Constant) else wrap(found[0], leaf)
        rest = iter(found)
        dressed = [
            leaf.value if type(leaf) is Constant else wrap(next(rest), leaf) if leaf is not None else next(rest)  # type: ignore[arg-type]
            for leaf in self.leaves
        ]
        return tree_unflatten(dressed, self.tree)

    @property
    def is_current(self) -> bool:
        """Whether nobody has written to its constants."""
        return all(_contents(tensor) == known for tensor, known in self.constants)


class Capture:
    """A capture of `forward`, the block's, called with `leaves` in the tree `spec`; `simulated`: on fake tensors."""

    def __init__(
        self,
        forward: Callable[..., Any],
        guard: Guard,
        leaves: Sequence[Any],
        spec: Any,
        simulated: bool = False,
    ):
        self._forward, self._guard, self._leaves, self._spec = forward, guard, leaves, spec
        self._real = [*guard.tensors, *(local_or_whole(leaf) for leaf in leaves if isinstance(leaf, Tensor))]
        self._recorder = GraphRecorder()
        self._fates: Fates | None = None
        self._read: set[int] = set()
        self._constants: dict[int, Tensor] = {}
        _require_capturable(guard, leaves, {FakeTensor} if simulated else set())

    def program(self, backend: Backend, options: dict[str, Any]) -> Program:
        """Capture and compile; raises NotCapturable, or whatever torch raises of what it cannot capture."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(recording(self._recorder))
            stack.enter_context(_without_saved_tensors_hooks())
            stack.callback(self._forget)
            used, outputs = self._rehearse()
            fake = _fake_mode()
            inputs = [_faked(self._real[n], fake) for n in used]

            def on_used(*tensors: Tensor) -> tuple[Tensor, ...]:
                given = dict(zip(used, tensors, strict=True))
                return self._body([given.get(n, real) for n, real in enumerate(self._real)])

            graph = torch.fx.Graph()
            called = graph.call_function(on_used, tuple(graph.placeholder(f"x{n}") for n in used))
            graph.output(tuple(graph.call_function(getitem, (called, n)) for n in range(outputs)))
            module = torch.fx.GraphModule(nn.Module(), graph)
            stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(fake)))
            run = _compiled(module, inputs, backend, options, stack)
        constants = tuple((t, _contents(t)) for t in self._constants.values())
        return Program(run, used, self._fates, self._result, self._tree, self._tree.is_leaf(), constants)

    def _forget(self) -> None:
        """What the block was called with: torch keeps the graph, which keeps this object."""
        self._leaves, self._real = (), []

    def _rehearse(self) -> tuple[tuple[int, ...], int]:
        """Which of its tensors the block reads, and how many come out."""
        fake = _fake_mode()
        inputs = [_faked(t, fake) for t in self._real]
        with no_fakes_kept(fake) as kept, fake:
            out = self._body(inputs)
        if kept:
            raise NotYet(f"it changes its {kept[0]}")
        read = self._read | {id(t) for t in out}
        used = tuple(n for n, t in enumerate(inputs) if id(t) in read)
        self._fates = fates([inputs[n] for n in used], out)
        if self._fates is not None and any(t._version and t.requires_grad for t in inputs):
            raise NotCapturable("it writes to what has a gradient, and its results depend on different parameters")
        return used, len(out)

    def _body(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The block on these parameters, buffers and local parts."""
        guard = self._guard
        self._recorder.begin()
        own, given = tensors[: len(guard.tensors)], iter(tensors[len(guard.tensors) :])
        before = [table[name] for table, name, _ in guard.places]
        watched = Watched(self._recorder, torch._guards.detect_fake_mode(tensors))
        for tensor, real in zip(own, guard.tensors, strict=True):
            stand_in(tensor, real)
        with unchanged(guard), watched:
            dressed = [_dressed(leaf, next(given)) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
            args, kwargs = tree_unflatten(dressed, self._spec)
            try:
                for table, name, number in guard.places:
                    table[name] = own[number]
                with WithoutAOTFaults() as faults, NothingByHand():
                    result = self._forward(*args, **kwargs)
                for table, name, number in guard.places:
                    if table.get(name) is not own[number]:
                        raise NotCapturable(f"it puts another tensor in the place of its {name}")
            finally:
                for (table, name, _), tensor in zip(guard.places, before, strict=True):
                    table[name] = tensor
        if watched.recomputes:
            raise NotCapturable("it recomputes something inside")
        self._read |= watched.read
        self._constants |= watched.constants
        leaves, self._tree = tree_flatten(result)
        self._result = tuple(map(_described, leaves))
        outputs = tuple(local_or_whole(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        faults.check(outputs)
        return outputs


def _contents(tensor: Tensor) -> tuple[Any, ...]:
    """Its version, which a write by `tensor.data` leaves, its memory, and what is there if it is small and at hand."""
    storage = tensor.untyped_storage()
    at, size = storage.data_ptr(), storage.nbytes()
    is_read = size <= MOST_BYTES and tensor.device.type == "cpu"
    version = 0 if tensor.is_inference() else version_of(tensor)
    return version, at, string_at(at, size) if is_read else None


def _require_capturable(guard: Guard, leaves: Sequence[Any], simulated: set[type]) -> None:
    if guard.has_hooks:
        raise NotCapturable("a module in it has hooks")
    if guard.refusal:
        raise NotCapturable(guard.refusal)
    several = dist.is_initialized() and dist.get_world_size() > 1
    for tensor in guard.tensors:
        if type(tensor) not in PLAIN and type(tensor) not in simulated:
            raise NotCapturable(f"it has a parameter that is a {type(tensor).__name__}")
        if not is_plain(tensor):
            raise NotCapturable(f"it has a parameter that is {_kind(tensor)}")
        if tensor.requires_grad and several and not is_managed(tensor):
            raise NotCapturable("it has a parameter that parallelize does not know")
    at = [memory(tensor) for tensor in guard.tensors]
    if any(at.count(memory(t)) > 1 for t in guard.tensors if not isinstance(t, nn.Parameter)):
        raise NotCapturable("a buffer of it shares memory with another tensor of it")
    for leaf in leaves:
        if isinstance(leaf, SpatialTensor):
            if leaf._view is not None:
                raise NotCapturable("it is called with a copied view of a split tensor")
            if leaf.spec.fleeting:
                raise NotCapturable("it is called with what a mask has picked")
            if not is_plain(local_or_whole(leaf)):
                raise NotCapturable(f"it is called with a tensor that is {_kind(local_or_whole(leaf))}")
        elif isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, nn.Parameter) and type(leaf) not in simulated:
                raise NotCapturable(f"it is called with a {type(leaf).__name__}")
            if not is_plain(leaf):
                raise NotCapturable(f"it is called with a tensor that is {_kind(leaf)}")
        elif not isinstance(leaf, SIMPLE):
            raise NotCapturable(f"it is called with a {type(leaf).__name__}")


def _kind(tensor: Tensor) -> Any:
    return tensor.layout if tensor.layout is not torch.strided else "conjugated or negated when it is read"


def _faked(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """A stand-in for a block's tensor, which may be a fake one of a simulation."""
    if not isinstance(tensor, FakeTensor):
        return fake.from_tensor(tensor, static_shapes=True)
    with fake, torch.enable_grad():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        made.requires_grad_(tensor.requires_grad)
        return made if tensor.is_leaf else made.clone()


def _dressed(leaf: Tensor, local: Tensor) -> Tensor:
    if not isinstance(leaf, SpatialTensor):
        return local
    if local.requires_grad and local.is_leaf:  # a shell around a leaf would put a hook on it
        local = local.view_as(local)
    return wrap(local, leaf.spec)


def _described(leaf: Any) -> Spec | Constant | None:
    if isinstance(leaf, SpatialTensor):
        if leaf._view is not None or leaf.spec.fleeting:
            raise NotCapturable("it returns a copied view of a split tensor, or what a mask has picked")
        return leaf.spec
    if isinstance(leaf, Tensor):
        return None
    if not isinstance(leaf, SIMPLE):
        raise NotCapturable(f"it returns a {type(leaf).__name__}")
    return Constant(leaf)


def _fake_mode() -> FakeTensorMode:
    """With a shape environment, though all shapes are static: inductor's cache on disk wants one."""
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


@contextlib.contextmanager
def _without_saved_tensors_hooks() -> Iterator[None]:
    """Those of recompute and offload around the block are for what it saves when it runs."""
    saved = torch._C._autograd
    before = []
    while (hooks := saved._top_saved_tensors_default_hooks(True)) is not None:
        before.append(hooks)
        saved._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(before):
            saved._push_saved_tensors_default_hooks(*hooks)


def _compiled(
    module: torch.fx.GraphModule, inputs: list[Tensor], backend: Backend, options: dict[str, Any],
    stack: contextlib.ExitStack,
) -> Callable[..., Any]:  # fmt: skip
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    # Both graphs at once, or one rank compiles in backward while others wait for it.
    stack.enter_context(
        functorch_config.patch({"backward_pass_autocast": "off", "force_non_lazy_backward_lowering": True})
    )
    if backend == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop

        make = aot_autograd(fw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition)
        run: Callable[..., Any] = make(module, inputs)
        return run
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    count_as_inside(cache_dir())
    settings = {
        "use_pre_grad_passes": False,
        "reorder_for_peak_memory": False,  # the order of the rules, in which compute covers the exchange
        "unsafe_marked_cacheable_functions": {_EFFECTS: "fullframe 1"},
        **options,
    }
    stack.enter_context(inductor_config.patch(settings))
    stack.enter_context(_inputs_taken_as_they_are())
    made: Any = compile_fx(module, inputs, compile_fx_inner if isinstance(backend, str) else backend)
    return made  # type: ignore[no-any-return]


@contextlib.contextmanager
def _inputs_taken_as_they_are() -> Iterator[None]:
    """Inductor looks at each input's layout, a twentieth of the host's time of a pass: the guard has done so.

    Backward gets what forward has made, whose layouts inductor looks at where a kernel is not its own.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    before = PythonWrapperCodegen.codegen_input_size_asserts
    PythonWrapperCodegen.codegen_input_size_asserts = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        PythonWrapperCodegen.codegen_input_size_asserts = before  # type: ignore[method-assign]
