"""FF101 to FF105: graphs of autograd that are kept for longer than their step."""

import ast
from collections.abc import Iterator

from fullframe.doctor.lint.program import Call, Frame, FrameKind, Store
from fullframe.doctor.lint.rule import ERROR, WARNING, Found, is_true, rule, said
from fullframe.doctor.lint.training import WITHOUT_GRAPH, Backward, Training
from fullframe.doctor.lint.values import Origin, Value, cone

GROWS = ("append", "extend", "add", "insert", "appendleft", "extendleft", "put")
_ADDS = (Origin.OPERATION, Origin.EITHER, Origin.CONTAINER)


def outlives(value: Value, loop: Frame) -> bool:
    """Whether `value` is there before the loop begins, or lies in what is."""
    for member in value.members():
        while member.origin in (Origin.ATTRIBUTE, Origin.ITEM):
            member = member.inputs[0]
        if member.origin is Origin.PATH or (member.origin is Origin.UNKNOWN and member.text):
            return True
        if member.origin is not Origin.ELEMENT and member.born <= loop.start and member.node is not loop.node:
            return True
    return False


def way_to(training: Training, new: Value, old: Value) -> list[Value] | None:
    """The values with a graph through which `new` is made of `old`, or None."""
    targets = {id(old), *(id(member) for member in old.members())}
    stack: list[tuple[Value, tuple[Value, ...]]] = [(new, ())]
    seen: set[int] = set()
    while stack:
        value, way = stack.pop()
        if id(value) in targets and way:
            return list(way)
        if id(value) in seen or len(seen) > 200 or not _passes(training, value):
            continue
        seen.add(id(value))
        inputs = value.inputs[1:] if value.origin is Origin.CALL and value.receiver is None else value.inputs
        stack += [(i, (*way, value)) for i in inputs]
    return None


def _passes(training: Training, value: Value) -> bool:
    """Whether a graph goes from what `value` is made of into `value`."""
    if training.has_graph(value):
        return True
    if value.origin is Origin.CALL:
        last = value.function.text.rpartition(".")[2]
        return value.grad is not False and last not in WITHOUT_GRAPH and value.path.startswith("torch.")
    return value.origin is Origin.EITHER or (value.origin is Origin.OPERATION and value.grad is not False)


def of_a_step(training: Training, value: Value, loop: Frame) -> bool:
    """Whether `value` holds the graph of a backward pass that runs inside the loop."""
    ends = {id(v) for b in training.backwards_in(loop) for v in cone(b.losses) if training.has_graph(v)}
    return any(id(v) in ends for v in cone([value]) if training.has_graph(v))


def is_run_backward(training: Training, value: Value) -> bool:
    """Whether a backward pass is run from something made of `value`."""
    return any(v is value for b in training.backwards for v in cone(b.losses))


def _kept(training: Training, store: Store) -> tuple[Frame, list[Value]] | None:
    """The training loop over which an assignment carries a graph along, and the way from the old value to the new."""
    if store.old is None or not training.has_graph(store.new):
        return None
    for loop in store.frame.enclosing(FrameKind.LOOP):
        if any(training.backwards_in(loop)) and outlives(store.old, loop):
            way = way_to(training, store.new, store.old)
            anew = _begins_anew(training, store, loop) or _is_cut_after(training, store, loop)
            return (loop, way) if way and not anew else None
    return None


def _begins_anew(training: Training, store: Store, loop: Frame) -> bool:
    """Whether what is written to was set to something else before, each time round."""
    for earlier in training.program.stores_in(loop):
        is_same = earlier.place == store.place and not any(v is earlier.old for v in cone([earlier.new], 50))
        if earlier.index < store.index and is_same and earlier.frame.is_run_before(store.frame, loop):
            return True
    return False


def _is_cut_after(training: Training, store: Store, loop: Frame) -> bool:
    """Whether what was written is detached before the next time round."""
    for later in training.program.stores_in(loop):
        if later.index > store.index and later.place == store.place and later.frame.is_always_run_in(loop):
            return not training.has_graph(later.new)
    cuts = training.program.calls_in(loop, "detach_")
    return any(
        cut.index > store.index and cut.value.receiver is store.new and cut.frame.is_always_run_in(loop) for cut in cuts
    )


def _only_adds(way: list[Value]) -> bool:
    return all(
        v.origin in _ADDS or v.path.startswith(("torch.", "builtins.")) or v.method in ("add", "add_") for v in way
    )


@rule(
    "FF101", WARNING, "loss summed with its graph",
    "A sum of tensors that hold a graph keeps the graph of every step that went into it, so memory grows with every "
    "step.",
    "Add `loss.detach()` (stays on the device, no waiting) or `loss.item()`.",
    """
      total = 0.0
      for x, y in loader:
          loss = F.cross_entropy(model(x), y)
          optimizer.zero_grad()
          loss.backward()
          optimizer.step()
    -     total += loss
    +     total += loss.detach()
    """,
)  # fmt: skip
def summed(training: Training) -> Iterator[Found]:
    """A name, attribute or item that is made of itself and of a step's loss, each time round."""
    for store in training.program.stores:
        kept = _kept(training, store)
        if kept is None or not _only_adds(kept[1]) or is_run_backward(training, store.new):
            continue
        if of_a_step(training, store.new, kept[0]):
            yield Found(store.node, f"{_target(store)} takes in the graph of every step; memory grows")


@rule(
    "FF102", WARNING, "output collected with its graph",
    "A list, dict or queue that outlives the loop keeps every tensor put into it, and each tensor keeps the graph of "
    "its step.",
    "Collect `x.detach()`, or `x.detach().cpu()` where many are collected.",
    """
      losses = []
      for x, y in loader:
          loss = F.cross_entropy(model(x), y)
          optimizer.zero_grad()
          loss.backward()
          optimizer.step()
    -     losses.append(loss)
    +     losses.append(loss.detach())
    """,
)  # fmt: skip
def collected(training: Training) -> Iterator[Found]:
    """`x.append(loss)` and its likes, and `x[key] = loss` with another key each time."""
    for call in training.program.calls(*GROWS):
        loop = training.in_loop(call.frame)
        if loop is None or call.value.receiver is None or call.followed or not outlives(call.receiver, loop):
            continue
        if call.receiver.path.startswith(("torch.", "torchmetrics.")) or "maxlen" in call.receiver.keywords:
            continue
        given = [a for a in call.value.inputs[1:] if training.has_graph(a) and of_a_step(training, a, loop)]
        if given and not is_run_backward(training, call.receiver) and not is_emptied(training, call, loop):
            yield Found(call.node, f"{said(call.node.func)} keeps the graph of every step; memory grows")
    for store in training.program.stores:
        loop = training.in_loop(store.frame)
        if loop is None or store.holder is None or store.place[2] != ("item",) or not training.has_graph(store.new):
            continue
        is_kept = outlives(store.holder, loop) and not training.has_graph(store.holder) and _varies(store)
        if is_kept and of_a_step(training, store.new, loop) and not is_run_backward(training, store.holder):
            yield Found(store.node, f"{_target(store)} keeps the graph of every step; memory grows")


def is_emptied(training: Training, call: Call, loop: Frame) -> bool:
    """Whether what is collected in is emptied inside the frame."""
    emptied = (c for c in training.program.calls_in(loop, "clear", "pop", "popleft", "popitem"))
    return any(c.value.receiver is call.receiver for c in emptied)


def _varies(store: Store) -> bool:
    """Whether the key of `x[key] = ...` can be another one each time."""
    target = store.node.targets[0] if isinstance(store.node, ast.Assign) else None
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Name | ast.BinOp | ast.JoinedStr)


def _target(store: Store) -> str:
    node = store.node
    return said(node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node))


@rule(
    "FF103", ERROR, "state carried to the next step with its graph",
    "The next step's backward pass goes on into this step's graph: it fails, or with retain_graph=True takes longer "
    "with every step.",
    "Detach the state before the next step: `state = state.detach()`.",
    """
      state = torch.zeros(1, 8, 64)
      for x, y in loader:
    -     out, state = model(x, state)
    +     out, state = model(x, state.detach())
          loss = F.mse_loss(out, y)
          optimizer.zero_grad()
          loss.backward()
          optimizer.step()
    """,
)  # fmt: skip
def carried(training: Training) -> Iterator[Found]:
    """A name that a model is given and that then stands for what the model gave."""
    for store in training.program.stores:
        kept = _kept(training, store)
        if kept is None or _only_adds(kept[1]) or any(v.path.startswith("torch.") for v in kept[1][:1]):
            continue
        if isinstance(store.place[2], tuple):  # an item: often there for the next round to set anew
            continue
        if of_a_step(training, store.new, kept[0]) and store.frame.innermost(FrameKind.LOOP) is kept[0]:
            yield Found(store.node, f"{store.name} goes into the next step with this step's graph")


@rule(
    "FF104", WARNING, "retain_graph=True in a loop",
    "The graph's tensors stay in memory after the backward pass, until the next step has built its own: two graphs at "
    "the peak.",
    "Leave retain_graph out; where a second backward pass needs the graph, keep it for all but the last.",
    """
      for x, y in loader:
          loss = F.cross_entropy(model(x), y)
          optimizer.zero_grad()
    -     loss.backward(retain_graph=True)
    +     loss.backward()
          optimizer.step()
    """,
)  # fmt: skip
def retained(training: Training) -> Iterator[Found]:
    """The last backward pass of a loop's body, on a graph that was built inside the loop."""
    for backward in training.backwards:
        loop = backward.call.frame.innermost(FrameKind.LOOP)
        if loop is None or not _asks_for(backward, 1, "retain_graph"):
            continue
        later = [b for b in training.backwards_in(loop) if b.call.index > backward.call.index]
        later_grads = [c for c in training.program.calls_in(loop, "grad") if c.index > backward.call.index]
        old = any(training.has_graph(v) and v.born <= loop.start for v in cone(backward.losses))
        is_new = any(v.origin is Origin.CALL and v.born > loop.start for v in cone(backward.losses, 200))
        if is_new and not later and not later_grads and not old:
            yield Found(backward.call.node, "no later backward pass of this loop needs the graph that is kept")


@rule(
    "FF105", WARNING, "create_graph=True in backward()",
    "Gradients then hold the graph and the graph holds the parameters: a circle that is not freed, so memory leaks "
    "every step.",
    "Use `torch.autograd.grad(loss, parameters, create_graph=True)`, or set every `p.grad = None` after the step.",
    """
      for x, y in loader:
          loss = F.cross_entropy(model(x), y)
    -     loss.backward(create_graph=True)
    +     grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    +     penalty = sum(g.square().sum() for g in grads)
    +     (loss + penalty).backward()
          optimizer.step()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def circle(training: Training) -> Iterator[Found]:
    """`backward(create_graph=True)` wherever it stands; torch warns of it at run time."""
    for backward in training.backwards:
        if _asks_for(backward, 2, "create_graph"):
            yield Found(backward.call.node, "gradients and graph hold each other and are not freed")


def _asks_for(backward: Backward, position: int, name: str) -> bool:
    """Whether an option of `loss.backward` is set; torch.autograd.backward is given the tensors before it."""
    call = backward.call.value
    return is_true(call.argument(position + bool(call.path), name))


RULES = (summed, collected, carried, retained, circle)
