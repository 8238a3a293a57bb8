"""FF14x: autocast and loss scaling."""

from collections.abc import Iterator

from fullframe.doctor.lint.program import Call, Frame, FrameKind
from fullframe.doctor.lint.roles import Role
from fullframe.doctor.lint.rule import ERROR, NOTE, WARNING, Found, is_false, rule, said
from fullframe.doctor.lint.rules.gradients import CLIPS
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Origin, Value, cone


def _is_autocast(context: Value) -> bool:
    return context.path.rpartition(".")[2] == "autocast" or context.method == "autocast"


def _scaler_calls(training: Training, frame: Frame, name: str, scaler: Value) -> list[Call]:
    """Calls of `scaler.name` inside `frame`."""
    return [c for c in training.program.calls_in(frame, name) if c.value.receiver is scaler and not c.followed]


def _scalers(training: Training, name: str) -> Iterator[tuple[Call, Value, Frame]]:
    """Calls of a scaler's method, with the scaler and the loop or function they stand in."""
    for call in training.program.calls(name):
        scaler = call.value.receiver
        if scaler is not None and not call.followed and training.is_a(scaler, Role.SCALER):
            yield call, scaler, _step_around(call)


def _step_around(call: Call) -> Frame:
    """The loop a call stands in, else its function."""
    kinds = FrameKind.FUNCTION, FrameKind.MODULE
    return call.frame.innermost(FrameKind.LOOP) or call.frame.innermost(*kinds) or call.frame


def _never_both(a: Frame, b: Frame) -> bool:
    """Whether two frames lie in different arms of one `if`."""
    arms = {id(frame.node): frame.arm for frame in a.enclosing(FrameKind.IF)}
    return any(arms.get(id(f.node), f.arm) is not f.arm for f in b.enclosing(FrameKind.IF))


@rule(
    "FF140", WARNING, "float16 without loss scaling",
    "Gradients below 6e-8 are zero in float16, and those of most activations are: what lies far from the loss learns "
    "little or nothing, without an error.",
    "Scale the loss by `torch.amp.GradScaler`, or use bfloat16, which has float32's range.",
    """
      for x, y in loader:
          optimizer.zero_grad()
    -     with torch.autocast("cuda", dtype=torch.float16):
    +     with torch.autocast("cuda", dtype=torch.bfloat16):
              loss = F.cross_entropy(model(x), y)
          loss.backward()
          optimizer.step()
    """,
)  # fmt: skip
def never_scaled(training: Training) -> Iterator[Found]:
    """A loss from within autocast that is told float16 goes backward plainly, and nothing in the file scales one."""
    program = training.program
    if any(program.calls("GradScaler", "ShardedGradScaler", "scale", "scale_loss", "unscale_")):
        return
    blocks = [f for f in program.frames if f.kind is FrameKind.WITH and f.value is not None and _is_half(f.value)]
    for backward in training.backwards:
        loop = training.step_loop(backward.call.frame)
        if loop is None or backward.call.value.arguments:
            continue
        born = [v.born for v in cone(backward.losses, 200) if v.origin is Origin.CALL and training.has_graph(v)]
        if any(block.inside(loop) and block.start <= at < block.stop for block in blocks for at in born):
            name = said(backward.call.node.func)
            yield Found(backward.call.node, f"{name} is not scaled, and autocast is told float16")


def _is_half(context: Value) -> bool:
    return _is_autocast(context) and "enabled" not in context.keywords and _names_half(context)


def _names_half(call: Value) -> bool:
    return any(v.path in ("torch.float16", "torch.half") for v in call.inputs[1:])


@rule(
    "FF141", WARNING, "backward pass inside autocast",
    "Autocast is for the forward pass and the loss; backward uses each op's own dtype, and torch advises against it "
    "inside.",
    "End the autocast block after the loss.",
    """
      for x, y in loader:
          optimizer.zero_grad()
          with torch.autocast("cuda", dtype=torch.bfloat16):
              loss = F.cross_entropy(model(x), y)
    -         loss.backward()
    +     loss.backward()
          optimizer.step()
    """,
)  # fmt: skip
def inside_autocast(training: Training) -> Iterator[Found]:
    """A backward pass within an autocast block that is not switched off."""
    for backward in training.backwards:
        for frame in backward.call.frame.enclosing(FrameKind.WITH):
            if frame.value is not None and _is_autocast(frame.value):
                if not is_false(frame.value.keywords.get("enabled")):
                    yield Found(backward.call.node, f"{said(backward.call.node.func)} runs under autocast")
                break


@rule(
    "FF142", ERROR, "gradients unscaled twice",
    "The scaler refuses a second `unscale_` for one optimizer before `update()`, with a RuntimeError.",
    "Call `unscale_` once for each optimizer and step.",
    """
      scaler = torch.amp.GradScaler()
      for x, y in loader:
          scaler.scale(F.cross_entropy(model(x), y)).backward()
          scaler.unscale_(optimizer)
          torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    -     scaler.unscale_(optimizer)
          scaler.step(optimizer)
          scaler.update()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def unscaled_twice(training: Training) -> Iterator[Found]:
    """Two `unscale_` of one optimizer with no `update` between, the second one not in another branch."""
    yield from _twice(training, "unscale_")


@rule(
    "FF143", ERROR, "scaler steps twice",
    "The scaler refuses a second `step` of one optimizer before `update()`, with a RuntimeError.",
    "Call `scaler.step(optimizer)` once, then `scaler.update()`.",
    """
      scaler = torch.amp.GradScaler()
      for x, y in loader:
          scaler.scale(F.cross_entropy(model(x), y)).backward()
          scaler.step(optimizer)
    -     scaler.step(optimizer)
          scaler.update()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def stepped_twice(training: Training) -> Iterator[Found]:
    """Two `step` of one optimizer with no `update` between."""
    yield from _twice(training, "step")


def _twice(training: Training, name: str) -> Iterator[Found]:
    for call, scaler, around in _scalers(training, name):
        updates = [c.index for c in _scaler_calls(training, around, "update", scaler)]
        for earlier in _scaler_calls(training, around, name, scaler):
            is_same = earlier.value.argument(0, "optimizer") is call.value.argument(0, "optimizer")
            if earlier.index >= call.index or not is_same or _never_both(earlier.frame, call.frame):
                continue
            if not any(earlier.index < u < call.index for u in updates):
                update = f"{said(call.node.func)[: -len(name)]}update()"
                yield Found(call.node, f"{said(call.node)} comes a second time before {update}")


@rule(
    "FF144", WARNING, "scaler updated once for each optimizer",
    "The scale is changed between the optimizers of one step, so gradients scaled before are unscaled with another "
    "factor.",
    "Call `scaler.update()` once, after the last optimizer's step.",
    """
      scaler = torch.amp.GradScaler()
      for x, y in loader:
          scaler.scale(F.cross_entropy(model(x), y)).backward()
          scaler.step(first)
    -     scaler.update()
          scaler.step(second)
          scaler.update()
          first.zero_grad()
          second.zero_grad()
    """,
)  # fmt: skip
def updated_often(training: Training) -> Iterator[Found]:
    """A second `update` in one round with no further scaled backward pass in between."""
    for call, scaler, around in _scalers(training, "update"):
        backwards = [b.call.index for b in training.backwards_in(around)]
        for earlier in _scaler_calls(training, around, "update", scaler):
            steps = [c.index for c in _scaler_calls(training, around, "step", scaler)]
            between = earlier.index < call.index and any(earlier.index < s < call.index for s in steps)
            is_one_step = between and backwards and not any(earlier.index < b < call.index for b in backwards)
            if is_one_step and not _never_both(earlier.frame, call.frame):
                yield Found(call.node, f"{said(call.node)} runs a second time in one step")


@rule(
    "FF145", ERROR, "scaled gradients are clipped",
    "Before `unscale_` gradients are thousands of times as large, so clipping at a usual norm all but removes them.",
    "Call `scaler.unscale_(optimizer)` before clipping.",
    """
      scaler = torch.amp.GradScaler()
      for x, y in loader:
          optimizer.zero_grad()
          scaler.scale(F.cross_entropy(model(x), y)).backward()
    +     scaler.unscale_(optimizer)
          torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
          scaler.step(optimizer)
          scaler.update()
    """,
)  # fmt: skip
def clipped_scaled(training: Training) -> Iterator[Found]:
    """Clipping between a scaled backward pass and the scaler's step, with no `unscale_` before it."""
    for call in training.program.calls(*CLIPS):
        around = _step_around(call)
        scaled = [b for b in training.backwards_in(around) if b.scaler is not None and b.call.index < call.index]
        if call.followed or not scaled or _never_both(scaled[-1].call.frame, call.frame):
            continue
        scaler = scaled[-1].scaler
        assert scaler is not None
        steps = [c.index for c in _scaler_calls(training, around, "step", scaler)]
        names = [c.index for c in training.program.calls_in(around, "unscale_", "unscale_gradients", "unscale")]
        if any(s > call.index for s in steps) and not any(scaled[-1].call.index < n < call.index for n in names):
            yield Found(call.node, f"{said(call.node.func)} is given gradients that are still scaled")


@rule(
    "FF146", ERROR, "scaled gradients go into a plain step",
    "`optimizer.step()` takes the scaled gradients as they are: an update thousands of times too large.",
    "Call `scaler.step(optimizer)`.",
    """
      scaler = torch.amp.GradScaler()
      for x, y in loader:
          optimizer.zero_grad()
          scaler.scale(F.cross_entropy(model(x), y)).backward()
    -     optimizer.step()
    +     scaler.step(optimizer)
          scaler.update()
    """,
)  # fmt: skip
def plain_step(training: Training) -> Iterator[Found]:
    """After a scaled backward pass the optimizer's own `step`, with no `unscale_` before it."""
    for update in training.updates:
        around = update.call.frame.innermost(FrameKind.LOOP, FrameKind.FUNCTION, FrameKind.MODULE)
        if update.scaler is not None or around is None:
            continue
        before = [b for b in training.backwards_in(around) if b.call.index < update.call.index]
        if not before or before[-1].scaler is None or _never_both(before[-1].call.frame, update.call.frame):
            continue
        if any(training.program.calls_in(around, "unscale_")):
            continue
        if not any(u.scaler is not None and u.optimizer is update.optimizer for u in training.updates_in(around)):
            yield Found(update.call.node, f"{said(update.call.node.func)} is given gradients that are scaled")


@rule(
    "FF147", ERROR, "scaler is never updated",
    "The scale stays as it is after an overflow, so the same steps are skipped again, and a second `unscale_` is "
    "refused.",
    "Call `scaler.update()` after the last `scaler.step(...)`.",
    """
      scaler = torch.amp.GradScaler()
      for x, y in loader:
          optimizer.zero_grad()
          scaler.scale(F.cross_entropy(model(x), y)).backward()
          scaler.step(optimizer)
    +     scaler.update()
    """,
)  # fmt: skip
def never_updated(training: Training) -> Iterator[Found]:
    """`scaler.step` in a loop that never calls `update`."""
    for call, scaler, around in _scalers(training, "step"):
        if around.kind is not FrameKind.LOOP or not any(training.backwards_in(around)):
            continue
        if not list(training.program.calls_in(around, "update")) and not training.escapes([scaler], around):
            yield Found(call.node, f"no update() follows {said(call.node)}")


@rule(
    "FF148", WARNING, "weights trained in half precision",
    "Updates smaller than a thousandth of a weight round to nothing in float16, and small gradients to zero.",
    "Keep the weights in float32 and use `torch.autocast`, or `model.bfloat16()` with an optimizer that rounds well.",
    """
    - model = nn.Linear(8, 8).cuda().half()
    + model = nn.Linear(8, 8).cuda()
      for x, y in loader:
          optimizer.zero_grad()
    -     F.mse_loss(model(x), y).backward()
    +     with torch.autocast("cuda", dtype=torch.bfloat16):
    +         loss = F.mse_loss(model(x), y)
    +     loss.backward()
          optimizer.step()
    """,
)  # fmt: skip
def half_weights(training: Training) -> Iterator[Found]:
    """`model.half()` of a model from whose result a backward pass is run and an update made."""
    for call in training.program.calls("half", "to"):
        receiver = call.value.receiver
        if receiver is None or not training.is_a(receiver, Role.MODEL):
            continue
        if call.value.method == "to" and not _names_half(call.value):
            continue
        updated = (b for b in training.backwards if b.call.index > call.index and _is_followed(training, b.call.frame))
        needed = (v for b in updated for v in cone(b.losses))
        if any(v.origin is Origin.CALL and training.same_model(v.function, receiver) for v in needed):
            yield Found(call.node, f"{said(call.node)} is trained with float16 weights")


def _is_followed(training: Training, frame: Frame) -> bool:
    """Whether the outermost function around a backward pass makes an update too."""
    functions = list(frame.enclosing(FrameKind.FUNCTION, FrameKind.MODULE))
    return any(training.updates_in(functions[max(len(functions) - 2, 0)]))


@rule(
    "FF149", NOTE, "loss scaling for bfloat16",
    "bfloat16 has float32's range, so nothing underflows; scaling only costs a check of all gradients each step.",
    "Leave the scaler out, or make it with `enabled=False`.",
    """
    - scaler = torch.amp.GradScaler()
      for x, y in loader:
          with torch.autocast("cuda", dtype=torch.bfloat16):
              loss = F.cross_entropy(model(x), y)
    -     scaler.scale(loss).backward()
    -     scaler.step(optimizer)
    -     scaler.update()
    +     loss.backward()
    +     optimizer.step()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def needless_scaler(training: Training) -> Iterator[Found]:
    """A scaled backward pass in a program whose only autocast dtype is bfloat16."""
    contexts = [c.value for c in training.program.calls("autocast") if not c.followed]
    dtypes = [c.keywords.get("dtype") for c in contexts]
    if not dtypes or not all(d is not None and d.path == "torch.bfloat16" for d in dtypes):
        return
    for backward in training.backwards:
        scaler = backward.scaler
        if scaler is not None and scaler.path and "enabled" not in scaler.keywords and not scaler.arguments[1:]:
            yield Found(backward.call.node, f"{said(backward.call.node.func)} is scaled, and autocast runs in bfloat16")


RULES = (
    never_scaled, inside_autocast, unscaled_twice, stepped_twice, updated_often, clipped_scaled, plain_step,
    never_updated, half_weights, needless_scaler,
)  # fmt: skip
