"""FF135 to FF139: gradient accumulation, schedules, and parameters that no optimizer has."""

from collections.abc import Iterator, Sequence

from fullframe.doctor.lint.program import Call, Frame, FrameKind
from fullframe.doctor.lint.roles import Role
from fullframe.doctor.lint.rule import ERROR, NOTE, WARNING, Found, rule, said
from fullframe.doctor.lint.rules.gradients import accumulation, of_gradients, optimizers_made
from fullframe.doctor.lint.training import Backward, Training, Update
from fullframe.doctor.lint.values import Origin, Value, cone

_SCALES = ("Div", "FloorDiv", "Mult")
_MASKS = ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE", "Invert", "BitAnd", "BitOr")
_MASKING = ("bool", "isfinite", "logical_and", "logical_not", "eq", "ne", "gt", "ge", "lt", "le")
_ENTRY_BY_ENTRY = ("abs", "square", "pow", "log", "float", "flatten", "reshape", "view", "squeeze", "clamp", "detach")


@rule(
    "FF135", WARNING, "accumulated gradients are not divided",
    "The sum of n microbatches' gradients is n times that of their mean: the learning rate is silently n times as "
    "large.",
    "Divide the loss by the number of microbatches before backward.",
    """
      for i, (x, y) in enumerate(loader):
    -     loss = F.cross_entropy(model(x), y)
    +     loss = F.cross_entropy(model(x), y) / 4
          loss.backward()
          if (i + 1) % 4 == 0:
              optimizer.step()
              optimizer.zero_grad()
    """,
)  # fmt: skip
def not_divided(training: Training) -> Iterator[Found]:
    """Nothing between the criterion and backward divides or multiplies, and nothing is done to the gradients."""
    for loop, _, backward in accumulation(training):
        if _is_divided(backward) or not any(map(training.has_graph, backward.losses)):
            continue
        if backward.call.value.arguments or _scales_gradients(training, loop) or _sums(backward):
            continue
        if any(_is_opaque(loss) for loss in backward.losses):
            continue
        yield Found(backward.call.node, "the loss of each microbatch goes in whole, and the step comes every n-th time")


def _is_divided(backward: Backward) -> bool:
    stack, seen = list(backward.losses), set[int]()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.origin is Origin.OPERATION and value.text in _SCALES:
            return True
        if value.method in ("div", "mul", "div_", "mul_", "__truediv__") or value.path in ("torch.div", "torch.mul"):
            return True
        if value.origin in (Origin.OPERATION, Origin.EITHER):
            stack += value.inputs
        elif value.method == "scale":
            stack += value.inputs[1:]
        elif value.method in ("mean", "sum", "to", "float", "squeeze"):
            stack.append(value.function.inputs[0])
    return False


def _is_opaque(loss: Value) -> bool:
    """Whether the loss comes out of a function whose text is not known, which may have divided."""
    for member in loss.members():
        if member.method == "scale" and member.arguments:
            member = member.arguments[0]
        while member.origin in (Origin.ITEM, Origin.ATTRIBUTE):
            member = member.inputs[0]
        if member.origin is Origin.PARAMETER or member.method in ("training_step", "compute_loss", "forward_step"):
            return True
        if member.origin is Origin.CALL and member.path and not member.path.startswith("torch."):
            return True
    return False


def _scales_gradients(training: Training, loop: Frame) -> bool:
    if any(store.name == "grad" for store in training.program.stores_in(loop)):
        return True
    if any(training.program.calls_in(loop, "_foreach_div_", "_foreach_mul_", "register_hook", "accumulate")):
        return True
    return any(of_gradients(call.receiver) for call in training.program.calls_in(loop, "div_", "mul_"))


def _sums(backward: Backward) -> bool:
    """Whether the criterion sums over its samples, where the sum of sums is meant."""
    for value in cone(backward.losses, 60):
        given = value.keywords.get("reduction")
        if given is not None and given.constant != "mean":
            return True
        if value.method == "sum" or value.path == "torch.sum":
            return True
    return False


@rule(
    "FF136", WARNING, "microbatches count alike though the loss leaves items out",
    "A mean over the items that are not ignored, or that a mask picks, has another count in each microbatch, so the "
    "mean of the means is not the loss of the batch: items of sparse microbatches weigh more.",
    "Use reduction='sum' and divide by the number of counted items of the whole batch.",
    """
    - criterion = nn.CrossEntropyLoss(ignore_index=255)
    + criterion = nn.CrossEntropyLoss(ignore_index=255, reduction="sum")
      for i, (x, y) in enumerate(loader):
    -     loss = criterion(model(x), y) / 4
    +     loss = criterion(model(x), y) / items_of_batch
          loss.backward()
          if (i + 1) % 4 == 0:
              optimizer.step()
              optimizer.zero_grad()
    """,
)  # fmt: skip
def uneven_means(training: Training) -> Iterator[Found]:
    """Accumulation over a mean of what a mask picks, or over a criterion that was given ignore_index or weight."""
    for _, _, backward in accumulation(training):
        for value in cone(backward.losses, 100):
            if value.origin is not Origin.CALL:
                continue
            criterion = value if value.path.startswith("torch.nn.functional.") else value.function
            if not _is_mean(value, criterion):
                continue
            of_classes = _last(criterion).startswith(("crossentropy", "nllloss"))
            ignores = of_classes and {"ignore_index", "weight"} & set(criterion.keywords)
            if ignores or any(map(_is_picked, (value.receiver, *value.arguments))):
                yield Found(backward.call.node, f"{said(value.node)} takes a mean over another count each time")
                break


def _is_mean(call: Value, criterion: Value) -> bool:
    """Whether a call is that of a criterion of torch's with reduction="mean", or of `mean` itself."""
    if call.method == "mean" or call.path == "torch.mean":
        return True
    given = criterion.keywords.get("reduction")
    is_loss = criterion.path.startswith("torch.nn.") and _last(criterion).endswith(("loss", "entropy", "logits"))
    return is_loss and (given is None or given.constant == "mean")


def _last(criterion: Value) -> str:
    return criterion.path.rpartition(".")[2].lower().replace("_", "")


def _is_picked(value: Value | None) -> bool:
    """Whether a value is what a mask picks, or made of that entry by entry."""
    if value is None:
        return False
    if value.origin is Origin.ITEM:
        keys = value.inputs[1].inputs if value.inputs[1].origin is Origin.CONTAINER else value.inputs[1:]
        return any(map(_is_mask, keys))
    if value.origin is Origin.OPERATION:
        return any(map(_is_picked, value.inputs))
    return value.method == "masked_select" or (value.method in _ENTRY_BY_ENTRY and _is_picked(value.receiver))


def _is_mask(key: Value) -> bool:
    if key.origin is Origin.OPERATION:
        return key.text in _MASKS
    name = key.inputs[1].constant if key.origin is Origin.ITEM else key.text
    is_named = isinstance(name, str) and name.lower().endswith(("mask", "valid"))
    return is_named or key.method in _MASKING or key.path in {f"torch.{name}" for name in _MASKING}


@rule(
    "FF137", NOTE, "last microbatches are left over",
    "Where the batches are no multiple of n, the last gradients are not used, and stay to be added to the next "
    "epoch's.",
    "Take the step also at the last batch: `or i + 1 == len(loader)`.",
    """
      for epoch in range(9):
          for i, (x, y) in enumerate(loader):
              loss = F.cross_entropy(model(x), y) / 4
              loss.backward()
    -         if (i + 1) % 4 == 0:
    +         if (i + 1) % 4 == 0 or i + 1 == len(loader):
                  optimizer.step()
                  optimizer.zero_grad()
    """,
    default=False,
)  # fmt: skip
def left_over(training: Training) -> Iterator[Found]:
    """The test of the branch has a remainder and no length, and no update follows the loop."""
    for loop, update, _ in accumulation(training):
        branch = update.call.frame.innermost(FrameKind.IF)
        assert branch is not None and branch.value is not None and loop.parent is not None
        made_of = list(cone([branch.value], 80))
        is_last = any(v.path == "builtins.len" or v.text == "Or" for v in made_of)
        later = any(u.call.index >= loop.stop for u in training.updates_in(loop.parent))
        if not is_last and not later:
            yield Found(update.call.node, "gradients of the last, incomplete group are neither used nor emptied")


@rule(
    "FF138", WARNING, "scheduler steps before the optimizer",
    "The first learning rate of the schedule is never used; torch warns of it once at run time.",
    "Call `scheduler.step()` after `optimizer.step()`.",
    """
      optimizer = torch.optim.SGD(model.parameters(), 0.1)
      scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
      for x, y in loader:
    -     scheduler.step()
          optimizer.zero_grad()
          F.cross_entropy(model(x), y).backward()
          optimizer.step()
    +     scheduler.step()
    """,
)  # fmt: skip
def scheduled_too_early(training: Training) -> Iterator[Found]:
    """In a loop all updates come after the scheduler's step."""
    for call in training.program.calls("step"):
        receiver = call.value.receiver
        if receiver is None or not training.is_a(receiver, Role.SCHEDULER) or call.followed:
            continue
        loop = call.frame.innermost(FrameKind.LOOP)
        if loop is None or not call.frame.is_always_run_in(loop) or call.value.arguments:
            continue
        updates = list(training.updates_in(loop))
        if updates and min(u.call.index for u in updates) > call.index and not _updates_before(training, loop, updates):
            yield Found(call.node, f"{said(call.node.func)} comes before the first optimizer step")


def _updates_before(training: Training, loop: Frame, updates: Sequence[Update]) -> bool:
    """Whether one of the optimizers was stepped before the loop."""
    same = {id(u.optimizer) for u in updates}
    return any(u.call.index < loop.start and id(u.optimizer) in same for u in training.updates)


@rule(
    "FF139", ERROR, "layer replaced after the optimizer was made",
    "The optimizer holds the parameters of the old layer; those of the new one are never updated.",
    "Make the optimizer after the last change of the model.",
    """
      model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    + model.head = nn.Linear(8, 10)
      optimizer = torch.optim.SGD(model.parameters(), 0.1)
    - model.head = nn.Linear(8, 10)
      model(x).sum().backward()
      optimizer.step()
    """,
)  # fmt: skip
def replaced(training: Training) -> Iterator[Found]:
    """`model.x = nn...` after an optimizer was given the model's parameters, and no optimizer made later."""
    made = list(optimizers_made(training))
    for store in training.program.stores:
        if store.holder is None or not isinstance(store.place[2], str) or not training.is_a(store.holder, Role.MODEL):
            continue
        if not store.new.path.startswith("torch.nn.") or not training.is_a(store.new, Role.MODEL):
            continue
        before = [m for m in made if m.index < store.index and _is_given(training, m, store.holder)]
        after = [m for m in training.program.calls("add_param_group", "parameters") if m.index > store.index]
        if before and not after and any(u.call.index > store.index for u in training.updates):
            yield Found(store.node, f"parameters of {said(store.new.node)} are not in the optimizer made before")


def _is_given(training: Training, made: Call, model: Value) -> bool:
    given = (v for v in cone(made.value.inputs[1:], 100) if v.method in ("parameters", "named_parameters"))
    return any(v.receiver is not None and training.same_model(v.receiver, model) for v in given)


RULES = (not_divided, uneven_means, left_over, scheduled_too_early, replaced)
