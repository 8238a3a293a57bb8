"""FF11x: what a module does in `forward` and `__init__` that costs memory, or is silently not done."""

import ast
from collections.abc import Iterator

from fullframe.doctor.lint.program import Call, Frame, FrameKind, Store
from fullframe.doctor.lint.roles import Role
from fullframe.doctor.lint.rule import NOTE, WARNING, Found, rule, said
from fullframe.doctor.lint.rules.graphs import GROWS, is_emptied
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Origin, Value


@rule(
    "FF111", WARNING, "forward collects tensors on the module",
    "What forward appends to an attribute stays there with its graph after the step, and more is added at every call.",
    "Return the tensors, or empty the list at the start of forward.",
    """
      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.conv = nn.Conv2d(3, 8, 3)
    -         self.seen = []

          def forward(self, x):
              x = self.conv(x)
    -         self.seen.append(x)
    -         return x
    +         return x, [x]
    """,
)  # fmt: skip
def grows_in_forward(training: Training) -> Iterator[Found]:
    """`self.x.append(tensor)` in forward, where nothing empties `self.x`."""
    for frame, instance in forwards(training):
        for call in training.program.calls_in(frame, *GROWS, "update"):
            holder = call.value.receiver
            if holder is None or call.followed or not _lies_on(holder, instance) or not _in_training(call.frame, frame):
                continue
            if not any(training.has_graph(a) and a.grad is not False for a in call.value.inputs[1:]):
                continue
            if training.is_a(holder, Role.MODEL) or (call.value.method == "add" and len(call.value.arguments) != 1):
                continue
            is_old = holder.born < frame.start or holder.origin is Origin.ATTRIBUTE
            is_kept = not is_emptied(training, call, frame) and not _is_emptied_elsewhere(training, call, instance)
            if is_old and is_kept:
                yield Found(call.node, f"{said(call.node.func)} keeps tensors of every call with their graph")


@rule(
    "FF112", WARNING, "forward keeps a tensor on the module",
    "The attribute holds the tensor and its graph until the next forward, through the backward pass, the update and "
    "evaluation.",
    "Return the tensor, or keep `x.detach()`.",
    """
      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.conv = nn.Conv2d(3, 8, 3)

          def forward(self, x):
    -         self.features = self.conv(x)
    -         return self.features.relu()
    +         features = self.conv(x)
    +         return features.relu()
    """,
)  # fmt: skip
def cached_in_forward(training: Training) -> Iterator[Found]:
    """`self.x = tensor` in forward, not taken away before it ends."""
    for frame, instance in forwards(training):
        last: dict[object, Store] = {}
        for store in training.program.stores_in(frame):
            if store.holder is instance and store.place[0] == "field" and isinstance(store.place[2], str):
                last[store.place[2]] = store
        for name, store in last.items():
            new = store.new
            if training.has_graph(new) and new.grad is not False and _in_training(store.frame, frame):
                yield Found(store.node, f"self.{name} holds a tensor with its graph until the next forward")


def forwards(training: Training) -> Iterator[tuple[Frame, Value]]:
    """Each run of a module's forward, with the module."""
    runs: dict[int, list[Frame]] = {}
    for frame in training.program.frames:
        if frame.kind is FrameKind.FUNCTION and frame.definition is not None and frame.definition.name == "forward":
            runs.setdefault(id(frame.definition), []).append(frame)
    for definition in training.program.definitions if runs else ():
        instance = training.program.generic.get(id(definition))
        forward = (definition.members or {}).get("forward")
        if instance is None or forward is None or not training.is_a(instance, Role.MODEL):
            continue
        yield from ((frame, instance) for frame in runs.get(id(forward.definition), ()))


def _lies_on(value: Value, instance: Value) -> bool:
    held = (field is member for field in instance.fields.values() for member in value.members())
    return any(held) and value.origin is not Origin.ITEM


def _is_emptied_elsewhere(training: Training, call: Call, instance: Value) -> bool:
    """Whether another method of the class sets the attribute anew."""
    func = call.node.func
    name = func.value.attr if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Attribute) else ""
    for store in training.program.stores:
        if store.holder is instance and store.name == name:
            inside = store.frame.innermost(FrameKind.FUNCTION)
            if inside is not None and inside.definition is not None and inside.definition.name != "__init__":
                return True
    emptied = training.program.calls("clear", "pop")
    return any(isinstance(c.node.func, ast.Attribute) and said(c.node.func.value) == f"self.{name}" for c in emptied)


def _in_training(frame: Frame, outer: Frame) -> bool:
    """Whether no branch around the place says that it is for evaluation."""
    for inner in frame.up_to(outer):
        if inner.kind is FrameKind.IF and inner.value is not None:
            text = said(getattr(inner.node, "test", None))
            if text.endswith(".training") and inner.arm is text.startswith("not "):
                return False
    return True


@rule(
    "FF113", NOTE, "a name keeps what was joined already",
    "Joining, adding and resampling do not keep their inputs for backward; only the name keeps this one until forward "
    "ends.",
    "`del` the name after its last use, or write the call where its result is used.",
    """
      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.left, self.right, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(16, 8, 3)

          def forward(self, x):
    -         a, b = self.left(x), self.right(x)
    -         return self.head(torch.cat([a, b], 1))
    +         return self.head(torch.cat([self.left(x), self.right(x)], 1))
    """,
    default=False,
)  # fmt: skip
def kept_by_name(training: Training) -> Iterator[Found]:
    """A module's result whose name is read only by calls that keep no input, while modules are called after them."""
    for frame, _ in forwards(training):
        results = {id(call.value) for call in training.model_calls_in(frame)}
        for store in training.program.stores_in(frame):
            if store.place[0] != "name" or id(store.new) not in results:
                continue
            readers = [c for c in training.program.calls_in(frame, *_KEEP_NOTHING) if _reads(c.value, store.new)]
            if not readers or _times_read(frame, store.name) != len(readers):
                continue
            later = any(call.index > readers[-1].index for call in training.model_calls_in(frame))
            writes = [s for s in training.program.stores_in(frame) if s.place == store.place and s is not store]
            if later and not writes:
                yield Found(store.node, f"{store.name} is held until forward ends")


_KEEP_NOTHING = ("cat", "concat", "stack", "interpolate", "add")


def _reads(call: Value, value: Value) -> bool:
    given = [part for a in call.inputs[1:] for part in ((a, *a.inputs) if a.origin is Origin.CONTAINER else (a,))]
    return call.path.startswith("torch.") and any(part is value for part in given)


def _times_read(frame: Frame, name: str) -> int:
    names = (n for n in ast.walk(frame.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return sum(n.id == name for n in names)


@rule(
    "FF114", NOTE, "names keep what activations have read",
    "Convolutions, norms and ReLU do not keep these results for backward; only their names keep them until forward "
    "ends. Up to three cost nothing, as backward's own temporaries come to more; each further one of the same size "
    "adds itself to the peak. `inplace=True` saves nothing where no name keeps them.",
    "Give the activation's result the same name, or write one call inside the other.",
    """
      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.a, self.b = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
              self.c, self.d = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

          def forward(self, x):
    -         x1 = self.a(x)
    -         y1 = F.relu(x1)
    -         x2 = self.b(y1)
    -         y2 = F.relu(x2)
    -         x3 = self.c(y2)
    -         y3 = F.relu(x3)
    -         x4 = self.d(y3)
    -         return F.relu(x4)
    +         x = F.relu(self.a(x))
    +         x = F.relu(self.b(x))
    +         x = F.relu(self.c(x))
    +         return F.relu(self.d(x))
    """,
    default=False,
)  # fmt: skip
def kept_before_activation(training: Training) -> Iterator[Found]:
    """Four names or more, each of a result that only one activation reads, which keeps its own result alone."""
    for frame, _ in forwards(training):
        made = {id(call.value) for call in training.model_calls_in(frame) if _is_made_by(call, _KEEP_INPUTS)}
        activations = [*training.program.calls_in(frame, *_KEEP_RESULTS)]
        activations += [call for call in training.model_calls_in(frame) if _is_made_by(call, _ACTIVATIONS)]
        held = []
        for store in training.program.stores_in(frame):
            if store.place[0] != "name" or id(store.new) not in made or _times_read(frame, store.name) != 1:
                continue
            writes = [s for s in training.program.stores_in(frame) if s.place == store.place]
            is_read = any(any(part is store.new for part in call.value.inputs[1:]) for call in activations)
            if is_read and len(writes) == 1 and store.frame is frame:
                held.append(store)
        if len(held) >= _HELD_FOR_NOTHING:
            names = ", ".join(store.name for store in held)
            yield Found(held[0].node, f"{names} are held until forward ends")


_HELD_FOR_NOTHING = 4  # fewer are less than what backward takes by itself
_KEEP_RESULTS = ("relu", "sigmoid", "tanh")
_ACTIVATIONS = ("ReLU", "Sigmoid", "Tanh")
_KEEP_INPUTS = ("Conv", "BatchNorm", "SyncBatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "Linear")


def _is_made_by(call: Call, kinds: tuple[str, ...]) -> bool:
    """Whether the module that is called was made with one of these classes of torch.nn."""
    path = call.value.function.path
    return path.startswith("torch.nn.") and path.removeprefix("torch.nn.").startswith(kinds)


RULES = (grows_in_forward, cached_in_forward, kept_by_name, kept_before_activation)
