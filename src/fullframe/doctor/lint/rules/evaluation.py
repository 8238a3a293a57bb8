"""FF12x: evaluation that costs a graph, or runs in the wrong mode."""

from collections.abc import Iterator

from fullframe.doctor.lint.program import Call, Frame, FrameKind
from fullframe.doctor.lint.roles import Role
from fullframe.doctor.lint.rule import ERROR, WARNING, Found, is_false, rule, said
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Origin, Value, cone


def _modes(training: Training, mode: str) -> Iterator[Call]:
    """Calls that put a model into "train" or "eval" mode."""
    for call in training.program.calls("train", "eval"):
        receiver = call.value.receiver
        if receiver is not None and not call.followed and training.is_a(receiver, Role.MODEL):
            given = call.value.argument(0, "mode")
            is_train = call.value.method == "train" and not is_false(given)
            may_be_either = given is not None and given.constant not in (True, False)
            if may_be_either or is_train is (mode == "train"):
                yield call


def _asks_for_gradients(training: Training) -> bool:
    """Whether gradients are taken by other ways than a backward pass, or weights are frozen."""
    names = ("grad", "jacobian", "hessian", "vjp", "jvp", "requires_grad_", "grad_and_value")
    return any(training.program.calls(*names)) or training.program.sets("requires_grad")


@rule(
    "FF121", WARNING, "evaluation builds a graph",
    "Without no_grad or inference_mode each forward keeps all activations for a backward pass that never comes.",
    "Put the loop into `with torch.inference_mode():`, or `@torch.inference_mode()` above the function.",
    """
    + @torch.inference_mode()
      def evaluate(model, loader):
          model.eval()
          correct = 0
          for x, y in loader:
              correct += (model(x).argmax(1) == y).sum().item()
          return correct
    """,
)  # fmt: skip
def no_grad_missing(training: Training) -> Iterator[Found]:
    """A model in eval mode is called in a loop with autograd on, and no backward pass follows."""
    if _asks_for_gradients(training):
        return
    needed = {id(v) for b in training.backwards for v in cone(b.losses)}
    changes = sorted([*_modes(training, "eval"), *_modes(training, "train")], key=lambda call: call.index)
    evals = {id(call) for call in _modes(training, "eval")} - {id(call) for call in _modes(training, "train")}
    for call in training.model_calls:
        loop = call.frame.innermost(FrameKind.LOOP, FrameKind.COMPREHENSION)
        if loop is None or call.value.grad is not True or id(call.value) in needed or any(training.backwards_in(loop)):
            continue
        model = call.value.function
        before = [c for c in changes if c.index < call.index and training.same_model(c.receiver, model)]
        if not before or id(before[-1]) not in evals or not _is_read(training, call):
            continue
        if not any(v.origin is Origin.ELEMENT for v in cone(call.value.inputs[1:])):
            continue
        if not _same_run(before[-1], call) or training.roles.of(model) & Role.CRITERION:
            continue
        yield Found(call.node, f"{said(call.node.func)} is in eval mode and its graph is never used")


def _same_run(mode: Call, call: Call) -> bool:
    """Whether the mode is set in the run of the function that holds the call, or around it."""
    inside = mode.frame.innermost(FrameKind.FUNCTION, FrameKind.MODULE)
    branch = any(frame.kind is FrameKind.IF for frame in mode.frame.up_to(inside))
    return inside is not None and call.frame.inside(inside) and not branch


def _is_read(training: Training, call: Call) -> bool:
    """Whether anything is done with what the model gives."""
    for event in training.program.events[call.index + 1 :]:
        new = event.value if isinstance(event, Call) else event.new
        if any(v is call.value for v in cone([new], 300)):
            return True
    return False


@rule(
    "FF122", ERROR, "evaluation in train mode",
    "Dropout drops and batch norm takes statistics of the evaluation data and learns from them: the figures are wrong.",
    "Call `model.eval()` before the loop, and `model.train()` before training goes on.",
    """
      for epoch in range(9):
    +     model.train()
          for x, y in loader:
              loss = F.cross_entropy(model(x), y)
              optimizer.zero_grad()
              loss.backward()
              optimizer.step()
    +     model.eval()
          with torch.no_grad():
              for x, y in val_loader:
                  error = F.cross_entropy(model(x), y).item()
    """,
)  # fmt: skip
def eval_missing(training: Training) -> Iterator[Found]:
    """A model that was trained is called in a loop without autograd, and was not put into eval mode in between."""
    evals = list(_modes(training, "eval"))
    if any(training.program.calls("update_bn")) or training.program.sets("training"):
        return
    for call in training.model_calls:
        loop = call.frame.innermost(FrameKind.LOOP)
        if loop is None or call.value.grad is not False or any(training.backwards_in(loop)):
            continue
        model = call.value.function
        before = (b for b in training.backwards if b.call.index < call.index)
        trained = [b for b in before if _holds_call(training, b.losses, model)]
        if not trained or trained[-1].call.frame.inside(loop) or not _is_read(training, call):
            continue
        between = (c for c in evals if trained[-1].call.index < c.index < call.index)
        is_set = any(training.same_model(c.receiver, model) for c in between)
        if not is_set and not _is_set_elsewhere(training, trained[-1].call, call):
            yield Found(call.node, f"{said(call.node.func)} was trained before and is still in train mode")


def _holds_call(training: Training, losses: tuple[Value, ...], model: Value) -> bool:
    return any(v.origin is Origin.CALL and training.same_model(v.function, model) for v in cone(losses))


def _is_set_elsewhere(training: Training, first: Call, last: Call) -> bool:
    """Whether a function whose text is not known may set the mode in between."""
    model = last.value.function
    for event in training.program.events[first.index + 1 : last.index]:
        if isinstance(event, Call) and not event.followed and event is not last:
            names = event.value.function.text.lower()
            if "eval" in names or "train" in names or "mode" in names:
                return True
            is_unknown = not event.value.path.startswith(("torch.", "builtins."))
            if is_unknown and any(training.same_model(a, model) for a in event.value.arguments):
                return True
    return False


@rule(
    "FF123", ERROR, "training goes on in eval mode",
    "After the first evaluation dropout is off and batch norm no longer learns its statistics, for all later epochs.",
    "Call `model.train()` at the start of every epoch.",
    """
    - model.train()
      for epoch in range(9):
    +     model.train()
          for x, y in loader:
              loss = F.cross_entropy(model(x), y)
              optimizer.zero_grad()
              loss.backward()
              optimizer.step()
          model.eval()
          with torch.no_grad():
              for x, y in val_loader:
                  error = F.cross_entropy(model(x), y).item()
    """,
)  # fmt: skip
def train_missing(training: Training) -> Iterator[Found]:
    """An epoch loop trains a model, evaluates it in eval mode, and never sets train mode again."""
    trains = list(_modes(training, "train"))
    for call in _modes(training, "eval"):
        if any(call is other for other in trains):
            continue
        for loop in call.frame.enclosing(FrameKind.LOOP):
            if training.trains(loop, call.receiver):
                if not _is_set(training, trains, loop, call) and _evaluates_after(training, loop, call):
                    name = said(call.node.func)
                    yield Found(call.node, f"{name}() holds for all later epochs: no train() in the loop")
                break


def _is_set(training: Training, trains: list[Call], loop: Frame, call: Call) -> bool:
    for event in training.program.events_in(loop):
        if isinstance(event, Call) and event is not call:
            if any(event is t for t in trains) and training.same_model(event.receiver, call.receiver):
                return True
            name = event.value.function.text.lower()
            if not event.followed and event not in trains and "train" in name and event.value.method:
                return True
    return False


def _evaluates_after(training: Training, loop: Frame, call: Call) -> bool:
    needed = {id(v) for b in training.backwards_in(loop) for v in cone(b.losses)}
    later = (c for c in training.model_calls_in(loop) if c.index > call.index)
    return any(training.same_model(c.value.function, call.receiver) and id(c.value) not in needed for c in later)


@rule(
    "FF124", ERROR, "backward pass of a loss made without autograd",
    "Under no_grad or inference_mode nothing is recorded, so the loss has no graph and backward fails.",
    "Take the forward pass out of the no_grad block.",
    """
      for x, y in loader:
    -     with torch.no_grad():
    -         loss = F.cross_entropy(model(x), y)
    +     loss = F.cross_entropy(model(x), y)
          loss.backward()
    """,
)  # fmt: skip
def without_autograd(training: Training) -> Iterator[Found]:
    """The loss is the result of a call or an operation that ran with autograd off."""
    for backward in training.backwards:
        for loss in backward.losses if not backward.call.value.arguments else ():
            made = [m for m in loss.members() if m.origin in (Origin.CALL, Origin.OPERATION)]
            is_off = made and all(m.grad is False and m.method != "requires_grad_" for m in made)
            if is_off and not any("requires_grad_" in m.uses for m in made):
                yield Found(backward.call.node, "the loss was made where autograd is off and has no graph")


_CALLED = {
    "backward": Role.NONE,
    "step": Role.OPTIMIZER | Role.SCHEDULER | Role.SCALER,
    "zero_grad": Role.OPTIMIZER | Role.MODEL,
    "eval": Role.MODEL,
    "train": Role.MODEL,
    "update": Role.SCALER,
}


@rule(
    "FF125", ERROR, "method named but not called",
    "Without parentheses the line does nothing, and says nothing.",
    "Write the parentheses.",
    """
      model = nn.Linear(2, 2)
    - model.eval
    + model.eval()
      with torch.no_grad():
          print(model(x))
    """,
)  # fmt: skip
def not_called(training: Training) -> Iterator[Found]:
    """`optimizer.step` as a statement of its own."""
    for node, base in training.program.bare:
        role = _CALLED.get(node.attr)
        if role is not None and (training.is_a(base, role) or (node.attr == "backward" and training.has_graph(base))):
            yield Found(node, f"{said(node)} is only named")


RULES = (no_grad_missing, eval_missing, train_missing, without_autograd, not_called)
