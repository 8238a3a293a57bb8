"""FF185 to FF189: models wrapped for several ranks."""

from collections.abc import Iterator

from fullframe.doctor.lint.program import Call
from fullframe.doctor.lint.roles import Role
from fullframe.doctor.lint.rule import ERROR, NOTE, Found, is_true, rule, said
from fullframe.doctor.lint.rules.gradients import accumulation, of_gradients, optimizers_made
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Origin, cone


@rule(
    "FF185", ERROR, "SyncBatchNorm after DistributedDataParallel",
    "The conversion replaces modules inside the wrapper, which goes on with the old ones' parameters and buffers.",
    "Convert first, then wrap.",
    """
      from torch.nn.parallel import DistributedDataParallel

    + model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
      model = DistributedDataParallel(model)
    - model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    """,
)  # fmt: skip
def converted_late(training: Training) -> Iterator[Found]:
    """`convert_sync_batchnorm` of a wrapped model."""
    for call in training.program.calls("convert_sync_batchnorm"):
        given = call.value.argument(0, "module")
        if given is not None and any(training.roles.of(m) & Role.PARALLEL for m in given.members()):
            yield Found(call.node, f"{said(call.node.args[0] if call.node.args else call.node)} is wrapped already")


@rule(
    "FF186", ERROR, "training past the wrapper",
    "A forward through `.module` does not prepare the wrapper's reduction: gradients are not averaged, and ranks "
    "drift apart.",
    "Call the wrapped model itself.",
    """
      from torch.nn.parallel import DistributedDataParallel

      model = DistributedDataParallel(model)
      for x, y in loader:
          optimizer.zero_grad()
    -     F.cross_entropy(model.module(x), y).backward()
    +     F.cross_entropy(model(x), y).backward()
          optimizer.step()
    """,
)  # fmt: skip
def past_wrapper(training: Training) -> Iterator[Found]:
    """A backward pass of what `model.module(...)` gave, where `model` is a DistributedDataParallel."""
    used = {id(v) for b in training.backwards for v in cone(b.losses)}
    for event in training.program.events:
        if not isinstance(event, Call) or id(event.value) not in used or event.value.method != "module":
            continue
        sums = any(of_gradients(a) for call in training.program.calls("all_reduce") for a in call.value.arguments)
        if training.is_a(event.receiver, Role.PARALLEL) and not sums:
            yield Found(event.node, f"{said(event.node.func)} goes past DistributedDataParallel")


@rule(
    "FF187", ERROR, "optimizer made before the model is sharded",
    "Sharding replaces the parameters; the optimizer holds the old ones, and the model is not trained.",
    "Shard first, then make the optimizer.",
    """
      from torch.distributed.fsdp import fully_shard

      model = nn.Linear(8, 8)
    + fully_shard(model)
      optimizer = torch.optim.AdamW(model.parameters())
    - fully_shard(model)
      model(x).sum().backward()
      optimizer.step()
    """,
)  # fmt: skip
def sharded_late(training: Training) -> Iterator[Found]:
    """`fully_shard` or FullyShardedDataParallel of a model whose parameters an optimizer was given before."""
    made = [e for e in training.program.calls("parameters", "named_parameters") if e.value.receiver is not None]
    for call in training.program.calls("fully_shard", "FullyShardedDataParallel"):
        model = call.value.argument(0, "module")
        if model is None or not call.value.path.startswith("torch.distributed."):
            continue
        for optimizer in optimizers_made(training):
            given = {id(v) for v in cone(optimizer.value.inputs[1:], 100)} if optimizer.index < call.index else ()
            if any(id(m.value) in given and training.same_model(m.receiver, model) for m in made):
                yield Found(call.node, f"{said(call.node)} comes after the optimizer")


@rule(
    "FF188", NOTE, "gradients averaged for every microbatch",
    "DistributedDataParallel sends all gradients after each backward, though only the sum before the step is used.",
    "Run all but the last microbatch within `model.no_sync()`.",
    """
    + from contextlib import nullcontext
      from torch.nn.parallel import DistributedDataParallel

      model = DistributedDataParallel(model)
      for i, (x, y) in enumerate(loader):
    -     loss = F.cross_entropy(model(x), y) / 4
    -     loss.backward()
    -     if (i + 1) % 4 == 0:
    +     is_last = (i + 1) % 4 == 0
    +     with nullcontext() if is_last else model.no_sync():
    +         loss = F.cross_entropy(model(x), y) / 4
    +         loss.backward()
    +     if is_last:
              optimizer.step()
              optimizer.zero_grad()
    """,
)  # fmt: skip
def sent_often(training: Training) -> Iterator[Found]:
    """Accumulation with a DistributedDataParallel model, and no `no_sync` in the file."""
    program = training.program
    if any("no_sync" in line for line in program.lines) or program.sets("require_backward_grad_sync"):
        return
    for _, _, backward in accumulation(training):
        for value in cone(backward.losses):
            if value.origin is Origin.CALL and training.is_a(value.function, Role.PARALLEL):
                yield Found(backward.call.node, "all gradients are sent after each of the microbatches")
                break


@rule(
    "FF189", NOTE, "find_unused_parameters=True",
    "The whole graph is walked after every forward, and reduction starts later; only models with unused parameters "
    "need it.",
    "Leave it out; torch says so where it is needed, and `static_graph=True` is often enough.",
    """
      from torch.nn.parallel import DistributedDataParallel

    - model = DistributedDataParallel(model, find_unused_parameters=True)
    + model = DistributedDataParallel(model)
    """,
    default=False,
)  # fmt: skip
def walks_graph(training: Training) -> Iterator[Found]:
    """The literal True at the wrapper."""
    for call in training.program.calls("DistributedDataParallel"):
        if is_true(call.value.keywords.get("find_unused_parameters")):
            yield Found(call.node, "the graph is searched in every step")


RULES = (converted_late, past_wrapper, sharded_late, sent_often, walks_graph)
