"""FF15x: recompute that is wrong or does nothing, and handling of memory that makes it worse."""

import ast
from collections.abc import Iterator

from fullframe.doctor.lint.program import Call, Frame, FrameKind
from fullframe.doctor.lint.rule import ERROR, NOTE, WARNING, Found, is_false, is_true, rule, said
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Origin, Value, cone

_CHECKPOINTS = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")


def _checkpoints(training: Training) -> Iterator[Call]:
    for call in training.program.calls("checkpoint", "checkpoint_sequential"):
        if call.value.path in _CHECKPOINTS:
            yield call


def is_data(value: Value) -> bool:
    """Whether `value` is part of what a loop takes from an iterable, moved or cast at most."""
    for _ in range(20):
        if value.origin is Origin.ELEMENT:
            return True
        if value.origin in (Origin.ITEM, Origin.ATTRIBUTE):
            value = value.inputs[0]
        elif value.method in ("to", "cuda", "float", "half", "contiguous") and value.receiver is not None:
            value = value.receiver
        else:
            return value.path == "builtins.next"
    return False


@rule(
    "FF151", WARNING, "checkpoint without use_reentrant",
    "The old, reentrant form loses gradients where no input needs one, and does not go with autograd.grad, hooks and "
    "nested inputs; torch asks to choose, and advises use_reentrant=False.",
    "Pass `use_reentrant=False`.",
    """
      from torch.utils.checkpoint import checkpoint


      class Net(nn.Module):
          def forward(self, x):
    -         return checkpoint(self.block, x)
    +         return checkpoint(self.block, x, use_reentrant=False)
    """,
)  # fmt: skip
def reentrant(training: Training) -> Iterator[Found]:
    """Torch's checkpoint without the word, and without a `**` that may hold it."""
    for call in _checkpoints(training):
        given = call.value.keywords
        if "use_reentrant" not in given and "**" not in given:
            yield Found(call.node, f"{said(call.node.func)} is not told which form to use")


@rule(
    "FF152", WARNING, "checkpoint around batch norm",
    "The block runs forward twice each step, so running statistics are updated twice: their momentum is another one.",
    "Leave batch norm out of the block, use another norm, or set its momentum to 1 - sqrt(1 - momentum).",
    """
      from torch.utils.checkpoint import checkpoint

    - block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    + block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
      y = checkpoint(block, x, use_reentrant=False)
    """,
)  # fmt: skip
def around_batch_norm(training: Training) -> Iterator[Found]:
    """What is recomputed was made with `nn.BatchNorm...`."""
    for call in _checkpoints(training):
        block = call.value.argument(0, "function")
        if block is not None and _holds_batch_norm(block):
            yield Found(call.node, f"{said(call.node.args[0]) if call.node.args else 'the block'} holds batch norm")


def _holds_batch_norm(block: Value, depth: int = 0) -> bool:
    for value in cone([block], 200):
        if value.path.startswith("torch.nn.BatchNorm") or value.path == "torch.nn.SyncBatchNorm":
            return True
        if value.origin is Origin.INSTANCE and value is block and value.fields and depth < 3:
            return any(_holds_batch_norm(field, depth + 1) for field in value.fields.values())
        if value.origin is Origin.FUNCTION and value is block and value.definition is not None and value.inputs:
            names = {n.attr for n in ast.walk(value.definition.node) if isinstance(n, ast.Attribute)}
            fields = value.inputs[0].fields
            return any(_holds_batch_norm(fields[n], depth + 1) for n in sorted(names) if n in fields and depth < 3)
    return False


@rule(
    "FF153", ERROR, "reentrant checkpoint on the input",
    "No input needs a gradient there, so the reentrant form gives none to the block's own weights: they are not "
    "trained.",
    "Pass `use_reentrant=False`.",
    """
      from torch.utils.checkpoint import checkpoint

      for x, y in loader:
    -     loss = F.cross_entropy(head(checkpoint(stem, x, use_reentrant=True)), y)
    +     loss = F.cross_entropy(head(checkpoint(stem, x, use_reentrant=False)), y)
          optimizer.zero_grad()
          loss.backward()
          optimizer.step()
    """,
)  # fmt: skip
def on_the_input(training: Training) -> Iterator[Found]:
    """All that the block is given comes straight from a loader."""
    needs = any(training.program.calls("requires_grad_")) or training.program.sets("requires_grad")
    for call in _checkpoints(training):
        given = call.value.keywords
        if needs or ("use_reentrant" in given and not is_true(given["use_reentrant"])) or "**" in given:
            continue
        arguments = call.value.arguments[1 if call.value.path.endswith("checkpoint") else 2 :]
        if arguments and all(is_data(a) for a in arguments):
            yield Found(call.node, f"{said(call.node)} gets nothing that needs a gradient")


@rule(
    "FF154", WARNING, "empty_cache every step",
    "It gives blocks back that the next step asks for again, waits for the device each time, and frees nothing in use.",
    "Leave it out; against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    """
      for x, y in loader:
          optimizer.zero_grad()
          F.cross_entropy(model(x), y).backward()
          optimizer.step()
    -     torch.cuda.empty_cache()
    """,
)  # fmt: skip
def cache_emptied(training: Training) -> Iterator[Found]:
    """`empty_cache` in the same loop as a model's call or a backward pass, each time round."""
    for call in training.program.calls("empty_cache"):
        loop = call.frame.innermost(FrameKind.LOOP)
        if loop is None or not call.frame.is_always_run_in(loop) or call.followed:
            continue
        work = [*(c.frame for c in training.model_calls_in(loop)), *(b.call.frame for b in training.backwards_in(loop))]
        if any(frame.innermost(FrameKind.LOOP) is loop for frame in work):
            yield Found(call.node, f"{said(call.node)} runs in every step")


@rule(
    "FF155", WARNING, "retry inside the handler of an out-of-memory",
    "While the handler runs, the exception holds the frames of the failed step and all their tensors: the retry has "
    "less room.",
    "Note in the handler that it failed, leave it, and retry after it.",
    """
      for x, y in loader:
    +     failed = False
          try:
              F.cross_entropy(model(x), y).backward()
          except torch.cuda.OutOfMemoryError:
    -         torch.cuda.empty_cache()
    +         failed = True
    +     if failed:
    +         optimizer.zero_grad()
              F.cross_entropy(model(x[:1]), y[:1]).backward()
          optimizer.step()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def retried_in_handler(training: Training) -> Iterator[Found]:
    """A model's call or a backward pass in a handler that is about memory."""
    for frame in training.program.frames:
        if frame.kind is not FrameKind.EXCEPT or not _is_about_memory(frame):
            continue
        work = [*(c.node for c in training.model_calls_in(frame)), *(b.call.node for b in training.backwards_in(frame))]
        if work:
            yield Found(work[0], "the failed step's tensors are still held while this runs")


def _is_about_memory(frame: Frame) -> bool:
    kinds = [] if frame.value is None else [v.path.rpartition(".")[2] for v in cone([frame.value], 10)]
    if "OutOfMemoryError" in kinds:
        return True
    texts = (n.value for n in ast.walk(frame.node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return "RuntimeError" in kinds and any("out of memory" in text for text in texts)


@rule(
    "FF156", NOTE, "gradients set to zero in place of None",
    "Zeros keep the gradients' memory between steps and cost a write and an add; None, the default, does not.",
    "Leave `set_to_none=False` out.",
    """
      for x, y in loader:
    -     optimizer.zero_grad(set_to_none=False)
    +     optimizer.zero_grad()
          F.cross_entropy(model(x), y).backward()
          optimizer.step()
    """,
)  # fmt: skip
def kept_as_zeros(training: Training) -> Iterator[Found]:
    """`zero_grad(set_to_none=False)`."""
    for call in training.program.calls("zero_grad"):
        given = call.value.argument(0, "set_to_none")
        is_literal = given is not None and any(given.node is node for node in ast.walk(call.node))
        if not call.followed and is_literal and is_false(given):
            yield Found(call.node, f"{said(call.node.func)} keeps all gradients allocated")


@rule(
    "FF157", NOTE, "last step's results are held during the next forward",
    "The names keep the model's output, and what it was made of, until they are set anew: after the next forward's "
    "peak.",
    "`del` them at the end of the loop's body, or put the step into a function.",
    """
      for x, y in loader:
          out = model(x)
          loss = F.cross_entropy(out, y)
          optimizer.zero_grad()
          loss.backward()
          optimizer.step()
    +     del out, loss
    """,
    default=False,
)  # fmt: skip
def held_over(training: Training) -> Iterator[Found]:
    """A name of the loop's own function that stands for a model's result and is not deleted."""
    for store in training.program.stores:
        loop = training.step_loop(store.frame)
        if loop is None or store.place[0] != "name" or store.frame.innermost(FrameKind.LOOP) is not loop:
            continue
        if store.frame.innermost(FrameKind.FUNCTION) is not loop.innermost(FrameKind.FUNCTION):
            continue
        is_output = any(c.value is store.new for c in training.model_calls_in(loop))
        later = (s for s in training.program.stores_in(loop) if s.place == store.place and s.index > store.index)
        if is_output and not any(later):
            yield Found(store.node, f"{store.name} is held until the next forward has run")


RULES = (
    reentrant, around_batch_norm, on_the_input, cache_emptied, retried_in_handler, kept_as_zeros, held_over,
)  # fmt: skip
