"""FF130 to FF134: gradients that are summed for a mean, not emptied, or emptied or clipped in the wrong place."""

import ast
from collections.abc import Iterator

from fullframe.doctor.lint.program import Call, Frame, FrameKind, Program
from fullframe.doctor.lint.roles import Role
from fullframe.doctor.lint.rule import ERROR, WARNING, Found, rule, said
from fullframe.doctor.lint.training import Backward, Training, Update
from fullframe.doctor.lint.values import Origin, Value, cone

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_gradients")


def empties(training: Training, frame: Frame) -> list[Call]:
    """Calls of `zero_grad` inside `frame` that are not followed into this file."""
    return [call for call in training.program.calls_in(frame, "zero_grad") if not call.followed]


def optimizers_made(training: Training) -> Iterator[Call]:
    """Calls that make an optimizer."""
    for event in training.program.events:
        if isinstance(event, Call) and event.value.path and training.is_a(event.value, Role.OPTIMIZER):
            yield event


def of_gradients(value: Value) -> bool:
    """Whether a value is a gradient, or is called one."""
    return any("grad" in v.text.lower() for v in cone([value], 60))


def counted_branch(frame: Frame, loop: Frame) -> Frame | None:
    """The branch between `frame` and `loop` that is taken every n-th time only: its test has a remainder."""
    for inner in frame.up_to(loop):
        test = inner.value if inner.kind is FrameKind.IF and inner.arm else None
        if test is not None and any(v.origin is Origin.OPERATION and v.text == "Mod" for v in cone([test], 60)):
            return inner
    return None


def accumulation(training: Training) -> Iterator[tuple[Frame, Update, Backward]]:
    """Loops with a backward pass each time and an update every n-th time."""
    for update in training.updates:
        loop = update.call.frame.innermost(FrameKind.LOOP)
        if loop is None or counted_branch(update.call.frame, loop) is None:
            continue
        for backward in training.backwards_in(loop):
            if backward.call.frame.is_always_run_in(loop) and backward.call.value.path == "":
                yield loop, update, backward


def owns(training: Training, receiver: Value, update: Update) -> bool:
    """Whether emptying `receiver`'s gradients empties those that `update` reads: the optimizer, or its model."""
    if update.optimizer is None:
        return False
    if any(a is b for a in receiver.members() for b in update.optimizer.members()):
        return True
    made_of = list(cone([update.optimizer], 60))
    return training.is_a(receiver, Role.MODEL) and any(training.same_model(receiver, v) for v in made_of)


@rule(
    "FF130", WARNING, "gradients summed over ranks where their mean is meant",
    "all_reduce adds up: on n ranks the gradient is n times that of one process on the whole batch, and the learning "
    "rate silently n times as large.",
    "Pass `op=dist.ReduceOp.AVG`, or divide by `dist.get_world_size()`, as DistributedDataParallel does.",
    """
      import torch.distributed as dist

      for x, y in loader:
          optimizer.zero_grad()
          F.cross_entropy(model(x), y).backward()
          for p in model.parameters():
              dist.all_reduce(p.grad)
    +         p.grad /= dist.get_world_size()
          optimizer.step()
    """,
)  # fmt: skip
def summed_over_ranks(training: Training) -> Iterator[Found]:
    """`all_reduce` of a gradient over the whole world before an update, where nothing divides gradients or the loss."""
    program = training.program
    if not (training.updates and any(program.calls("all_reduce"))):
        return
    if _divides_gradients(program) or _divides_losses(training):
        return
    for call in program.calls("all_reduce"):
        given, op = call.value.argument(0, "tensor"), call.value.argument(1, "op")
        while given is not None and given.origin is Origin.ATTRIBUTE and given.text == "data":
            given = given.inputs[0]
        if given is None or given.origin is not Origin.ATTRIBUTE or given.text != "grad":
            continue
        is_sum = op is None or op.path.endswith(".SUM")
        of_world = call.value.argument(2, "group") is None and call.value.path.startswith("torch.distributed.")
        if is_sum and of_world:
            yield Found(call.node, f"{said(call.node)} is a sum, and nothing divides it")


def _divides_gradients(program: Program) -> bool:
    names = ("div_", "mul_", "div", "mul", "copy_", "_foreach_div_", "_foreach_mul_", "register_hook")
    return any(program.calls(*names)) or program.sets("grad", "data")


def _divides_losses(training: Training) -> bool:
    made_of = (value for backward in training.backwards for value in cone(backward.losses, 60))
    return any(value.origin is Origin.OPERATION and value.text in ("Div", "Mult") for value in made_of)


@rule(
    "FF131", ERROR, "gradients are never emptied",
    "backward adds to the gradients, so each update uses the sum of all steps so far.",
    "Call `optimizer.zero_grad()` once for every update, before backward or after the step.",
    """
      for x, y in loader:
    +     optimizer.zero_grad()
          loss = F.cross_entropy(model(x), y)
          loss.backward()
          optimizer.step()
    """,
)  # fmt: skip
def never_emptied(training: Training) -> Iterator[Found]:
    """A loop with backward pass and update, in which nothing empties gradients."""
    for update in training.updates:
        loop = training.step_loop(update.call.frame)
        if loop is None or update.optimizer is None or _empties_by_hand(training, loop):
            continue
        if _may_be_emptied(training, loop, update):
            continue
        models = [c.value.function for c in training.model_calls_in(loop)]
        if training.escapes([update.optimizer, *models], loop) or _may_empty(training, loop):
            continue
        outer = next((f for f in loop.enclosing() if f is not loop and _may_be_emptied(training, f, update)), None)
        what = "only outside the loop" if outer is not None and outer.kind is FrameKind.LOOP else "nowhere in the loop"
        yield Found(update.call.node, f"gradients of {said(_object(update))} are emptied {what}")


def _may_be_emptied(training: Training, frame: Frame, update: Update) -> bool:
    return any(not _is_of_another(training, call.receiver, update) for call in empties(training, frame))


def _is_of_another(training: Training, receiver: Value, update: Update) -> bool:
    """Whether both optimizers, or optimizer and model, were made in this file and share no model."""
    assert update.optimizer is not None
    known = [m for value in (receiver, update.optimizer) for m in value.members()]
    if not all(m.path.startswith("torch.optim.") or training.is_a(m, Role.MODEL) for m in known):
        return False
    theirs, ours = (
        {id(v) for v in cone([value]) if training.is_a(v, Role.MODEL)} for value in (receiver, update.optimizer)
    )
    return bool(theirs and ours) and not theirs & ours


def _object(update: Update) -> ast.AST:
    func = update.call.node.func
    return func.value if isinstance(func, ast.Attribute) and update.scaler is None else update.call.node


def _empties_by_hand(training: Training, frame: Frame) -> bool:
    if any(store.name == "grad" for store in training.program.stores_in(frame)):
        return True
    return any(c.value.receiver is not None and c.receiver.text == "grad"
               for c in training.program.calls_in(frame, "zero_", "fill_", "copy_", "mul_"))  # fmt: skip


def _may_empty(training: Training, frame: Frame) -> bool:
    """Whether a method whose text is not in the file, or a callback, may do it."""
    for event in training.program.events_in(frame):
        if not isinstance(event, Call) or event.followed or event.value.path:
            continue
        base = event.value.receiver
        is_own = base is not None and base.origin in (Origin.INSTANCE, Origin.PARAMETER) and base.text == "self"
        name = event.value.function.text.lower()
        if name == "zero_grad":  # is asked about by itself
            continue
        is_ours = base is not None and base.origin is Origin.INSTANCE
        is_suspect = is_ours or any(word in name for word in ("zero", "reset", "clear"))
        if is_suspect and not training.is_a(event.value.function, Role.MODEL | Role.CRITERION):
            return True
        if is_own or (event.value.function.origin is Origin.PARAMETER and not event.value.arguments):
            return True
    return False


@rule(
    "FF132", ERROR, "gradients are emptied between backward and step",
    "The update then has no gradients, so nothing is trained; no error is raised.",
    "Call `zero_grad` before backward or after the step.",
    """
      for x, y in loader:
          loss = F.cross_entropy(model(x), y)
    +     optimizer.zero_grad()
          loss.backward()
    -     optimizer.zero_grad()
          optimizer.step()
    """,
)  # fmt: skip
def emptied_too_early(training: Training) -> Iterator[Found]:
    """backward, zero_grad, step in this order, with no further backward pass in between."""
    for update in training.updates:
        loop = update.call.frame.innermost(FrameKind.LOOP, FrameKind.MODULE) or update.call.frame
        for call in empties(training, loop):
            if call.index >= update.call.index or not owns(training, call.receiver, update):
                continue
            before = [b for b in training.backwards_in(loop) if b.call.index < call.index]
            between = [b for b in training.backwards_in(loop) if call.index < b.call.index < update.call.index]
            earlier = [u for u in training.updates_in(loop) if u.optimizer is update.optimizer and u is not update]
            if any(before and before[-1].call.index < u.call.index < call.index for u in earlier):
                continue
            rounds = loop.kind is FrameKind.LOOP and update.call.frame.is_always_run_in(loop)
            last = any(b.call.frame.is_always_run_in(loop) for b in training.backwards_in(loop))  # of the round before
            if (before or (rounds and last)) and not between and call.frame.is_run_before(update.call.frame, loop):
                name = said(call.node.func)
                yield Found(call.node, f"{name} throws away what backward made before the step reads it")


@rule(
    "FF133", ERROR, "gradients are emptied more often than used",
    "The update comes every n-th time but gradients are emptied every time, so those of n - 1 microbatches are lost.",
    "Call `zero_grad` in the same branch as the step.",
    """
      for i, (x, y) in enumerate(loader):
    -     optimizer.zero_grad()
          loss = F.cross_entropy(model(x), y) / 4
          loss.backward()
          if (i + 1) % 4 == 0:
              optimizer.step()
    +         optimizer.zero_grad()
    """,
)  # fmt: skip
def emptied_every_time(training: Training) -> Iterator[Found]:
    """zero_grad outside the branch that the update stands in."""
    for loop, update, _ in accumulation(training):
        for call in empties(training, loop):
            if call.frame.is_always_run_in(loop) and owns(training, call.receiver, update):
                yield Found(call.node, f"{said(call.node.func)} runs every time, the step only every n-th")


@rule(
    "FF134", ERROR, "clipping that changes nothing",
    "Gradients are clipped after the update has read them, or before backward has made them.",
    "Clip between backward and step.",
    """
      for x, y in loader:
          optimizer.zero_grad()
          F.cross_entropy(model(x), y).backward()
    +     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
          optimizer.step()
    -     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """,
)  # fmt: skip
def clipped_too_late(training: Training) -> Iterator[Found]:
    """In the loop no update follows the clipping, or no backward pass of this round comes before it."""
    for call in training.program.calls(*CLIPS):
        loop = training.step_loop(call.frame)
        if loop is None or call.followed or call.frame.innermost(FrameKind.LOOP) is not loop:
            continue
        emptied = any(c.index < call.index for c in empties(training, loop))
        before = any(b.call.index < call.index for b in training.backwards_in(loop))
        after = any(u.call.index > call.index for u in training.updates_in(loop))
        if not after or (not before and emptied):
            when = "before backward made the gradients" if after else "after the step has read the gradients"
            yield Found(call.node, f"{said(call.node.func)} stands {when}")


RULES = (summed_over_ranks, never_emptied, emptied_too_early, emptied_every_time, clipped_too_late)
