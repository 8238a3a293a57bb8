"""Training as it shows in a program: backward passes, updates, the loops around them, and which values hold a graph."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fullframe.doctor.lint.program import Call, Frame, FrameKind, Program, Store
from fullframe.doctor.lint.roles import Role, Roles
from fullframe.doctor.lint.values import Origin, Value, cone

# Methods and functions whose result has no graph, whatever they are given.
WITHOUT_GRAPH = frozenset({"item", "detach", "tolist", "numpy", "size", "dim", "numel", "argmax", "argmin", "long",
                           "int", "bool", "byte", "short", "char", "eq", "ne", "gt", "ge", "lt", "le", "isnan", "isinf",
                           "isfinite", "isclose", "nonzero", "count_nonzero", "argsort", "any", "all", "equal",
                           "allclose", "logical_and", "logical_or", "logical_not", "unique", "tensor", "zeros_like",
                           "ones_like", "empty_like", "full_like", "randn_like", "rand_like", "bincount", "multinomial",
                           "bernoulli", "searchsorted", "bucketize", "stride", "data_ptr", "get_device", "element_size",
                           "is_floating_point", "is_available", "gather_for_metrics", "keys"})  # fmt: skip
_PLAIN = frozenset(
    ["shape", "data", "grad", "device", "dtype", "requires_grad", "is_leaf", "grad_fn", "ndim", "is_cuda"]
)
_COMPARES = frozenset({"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE", "Is", "IsNot", "In", "NotIn", "Not"})
_KEEPS = frozenset({"builtins.sum", "builtins.max", "builtins.min", "builtins.abs", "builtins.pow", "builtins.list",
                    "builtins.tuple", "builtins.dict", "builtins.sorted", "builtins.reversed", "builtins.zip",
                    "builtins.getattr"})  # fmt: skip
_TENSOR_CODE = ("torch.", "torchvision.ops.", "einops.", "math.", "operator.", "kornia.", "functools.reduce")


@dataclass(frozen=True)
class Backward:
    """One call that runs a backward pass: `loss` of `loss.backward()`, `accelerator.backward(loss)` and the like."""

    call: Call
    losses: tuple[Value, ...]

    @property
    def scaler(self) -> Value | None:
        """Of `scaler.scale(loss).backward()`: the scaler."""
        for loss in self.losses:
            for value in cone([loss], 30):
                if value.method == "scale" and value.receiver is not None and value.arguments:
                    return value.receiver
        return None


@dataclass(frozen=True)
class Update:
    """One call that updates parameters, through a scaler or not; `optimizer` None where that is unknown."""

    call: Call
    optimizer: Value | None
    scaler: Value | None


class Training:
    """Questions about one program, answered once."""

    def __init__(self, program: Program):
        self.program, self.roles = program, Roles()
        self.backwards = list(self._find_backwards())
        self._seed = {id(m) for b in self.backwards for loss in b.losses for m in loss.members()}
        self._graph: dict[int, bool] = {}
        self._mark(loss for b in self.backwards for loss in b.losses)
        self.updates = list(self._find_updates())
        self.model_calls = list(self._find_model_calls())

    def is_a(self, value: Value, role: Role) -> bool:
        """Whether `value` may play this part."""
        return bool(self.roles.of(value) & role)

    def has_graph(self, value: Value) -> bool:
        """Whether `value` is known to hold a graph of autograd, or holds something that does."""
        known = self._graph.get(id(value))
        if known is None:
            self._graph[id(value)] = False
            known = self._graph[id(value)] = id(value) in self._seed or self._found_graph(value)
        return known

    def in_loop(self, frame: Frame) -> Frame | None:
        """The innermost loop around `frame` that runs a backward pass."""
        return next((loop for loop in frame.enclosing(FrameKind.LOOP) if any(self.backwards_in(loop))), None)

    def step_loop(self, frame: Frame) -> Frame | None:
        """The innermost loop around `frame` that runs a backward pass and an update each time round."""
        loops = frame.enclosing(FrameKind.LOOP)
        return next((loop for loop in loops if any(self.backwards_in(loop)) and any(self.updates_in(loop))), None)

    def backwards_in(self, frame: Frame) -> Iterator[Backward]:
        """Backward passes inside `frame`."""
        return (b for b in self.backwards if frame.start <= b.call.index < frame.stop)

    def updates_in(self, frame: Frame) -> Iterator[Update]:
        """Updates inside `frame`."""
        return (u for u in self.updates if frame.start <= u.call.index < frame.stop)

    def model_calls_in(self, frame: Frame) -> Iterator[Call]:
        """Calls of models inside `frame`."""
        return (c for c in self.model_calls if frame.start <= c.index < frame.stop)

    def trains(self, frame: Frame, model: Value) -> bool:
        """Whether `frame` runs a backward pass of what `model` gave inside it."""
        calls = {id(c.value) for c in self.model_calls_in(frame) if self.same_model(c.value.function, model)}
        return any(id(v) in calls for b in self.backwards_in(frame) for v in cone(b.losses))

    def same_model(self, a: Value, b: Value) -> bool:
        """Whether two values may be one model, wrapped or not."""
        ones = {id(self.roles.model_inside(m)) for m in a.members()}
        return any(id(self.roles.model_inside(m)) in ones for m in b.members())

    def escapes(self, values: Iterable[Value], frame: Frame) -> bool:
        """Whether any of `values` is handed, inside `frame`, to a function whose text is not in this file."""
        ids = {id(m) for value in values for m in (*value.members(), self.roles.model_inside(value))}
        for event in self.program.events_in(frame):
            if isinstance(event, Call) and not event.followed and not event.value.path.startswith(_INNOCENT):
                given = (m for argument in event.value.inputs[1:] for m in argument.members())
                receiver = event.value.receiver
                is_helper = receiver is not None and receiver.path.endswith((".Accelerator", ".Fabric"))
                is_known = is_helper or (receiver is not None and self.is_a(receiver, Role.SCALER))
                if not is_known and any(id(m) in ids for m in given):
                    return True
        return False

    def _find_backwards(self) -> Iterator[Backward]:
        for call in self.program.calls("backward", "manual_backward"):
            if call.followed:
                continue
            value = call.value
            if value.path in ("torch.autograd.backward", "torch.autograd.graph.backward"):
                yield Backward(call, value.arguments[:1])
            elif value.receiver is not None:
                through = value.arguments[:1] if _drives(value.receiver) else ()
                yield Backward(call, through or (value.receiver,))

    def _find_updates(self) -> Iterator[Update]:
        for call in self.program.calls("step"):
            receiver = call.value.receiver
            if receiver is None or call.followed:
                continue
            role = self.roles.of(receiver)
            if Role.SCALER in role:
                yield Update(call, call.value.argument(0, "optimizer"), receiver)
            elif Role.OPTIMIZER in role and Role.SCHEDULER not in role:
                yield Update(call, receiver, None)

    def _find_model_calls(self) -> Iterator[Call]:
        for event in self.program.events:
            if isinstance(event, Store) or event.followed or event.value.path:
                continue
            if self.is_a(event.value.function, Role.MODEL):
                yield event

    def _mark(self, losses: Iterable[Value]) -> None:
        """What a backward pass was run from holds a graph, and so does what models and losses gave on the way there."""
        stack, seen = list(losses), set[int]()
        while stack:
            value = stack.pop()
            if id(value) in seen or value.grad is False:
                continue
            seen.add(id(value))
            if value.origin in (Origin.OPERATION, Origin.EITHER, Origin.CONTAINER):
                stack.extend(value.inputs)
            elif value.origin in (Origin.ITEM, Origin.ELEMENT):
                stack.append(value.inputs[0])
                self._seed_if_called(value)
            elif value.origin is Origin.ATTRIBUTE and value.text not in _PLAIN:
                stack.append(value.inputs[0])
            elif value.origin is Origin.CALL:
                last = value.function.text.rpartition(".")[2]
                if last in WITHOUT_GRAPH:
                    continue
                self._seed_if_called(value)
                stack.extend(value.inputs[1:])
                if value.receiver is not None:
                    stack.append(value.receiver)

    def _seed_if_called(self, value: Value) -> None:
        """Of a parameter, attribute or object that is called: the loss depends on what it gives."""
        if value.origin is not Origin.CALL or value.path or value.grad is False:
            return
        function = value.function
        if function.origin is Origin.ATTRIBUTE and not self.is_a(function, Role.MODEL):
            base = function.inputs[0]
            if base.origin is not Origin.INSTANCE and not (base.origin is Origin.PARAMETER and base.text == "self"):
                return
        self._seed.add(id(value))

    def _found_graph(self, value: Value) -> bool:
        origin = value.origin
        if origin is Origin.CALL:
            return value.grad is not False and self._graph_of_call(value)
        if origin is Origin.OPERATION:
            return value.grad is not False and value.text not in _COMPARES and any(map(self.has_graph, value.inputs))
        if origin is Origin.CONTAINER:
            return value.text != "text" and any(map(self.has_graph, value.inputs))
        if origin is Origin.ATTRIBUTE:
            return value.text not in _PLAIN and self.has_graph(value.inputs[0])
        if origin in (Origin.ITEM, Origin.ELEMENT):
            return self.has_graph(value.inputs[0])
        return origin is Origin.EITHER and any(map(self.has_graph, value.inputs))

    def _graph_of_call(self, value: Value) -> bool:
        function = value.function
        last = function.text.rpartition(".")[2]
        if last in WITHOUT_GRAPH and function.origin in (Origin.PATH, Origin.ATTRIBUTE):
            return False
        if value.path == "torch.autograd.grad" and "create_graph" not in value.keywords:
            return False
        if value.path:
            return value.path.startswith((*_TENSOR_CODE, *_KEEPS)) and any(map(self.has_graph, value.inputs[1:]))
        if self.is_a(function, Role.MODEL):
            return True
        if self.is_a(function, Role.CRITERION):
            return any(map(self.has_graph, value.inputs[1:]))
        receiver = value.receiver
        if receiver is None:
            return False
        if self.is_a(receiver, Role.SCALER) and last == "scale":
            return any(map(self.has_graph, value.inputs[1:]))
        return self.has_graph(receiver)


_INNOCENT = ("builtins.", "torch.nn.utils.clip", "torch.nn.functional.", "torch.optim.", "torch.nn.parallel.", "tqdm.",
             "torch.cuda.", "torch.amp.", "torch.distributed.", "logging.", "time.", "torch.save")  # fmt: skip


def _drives(receiver: Value) -> bool:
    """Whether `receiver.backward(loss)` is the way of a framework's object rather than `tensor.backward(gradient)`."""
    if receiver.origin is Origin.CALL:
        return receiver.path.rpartition(".")[2] in ("Accelerator", "Fabric") or receiver.path.startswith("deepspeed.")
    if receiver.origin is Origin.ITEM:
        return receiver.inputs[0].path.startswith("deepspeed.")
    return receiver.origin in (Origin.PARAMETER, Origin.ATTRIBUTE, Origin.UNKNOWN, Origin.INSTANCE)
