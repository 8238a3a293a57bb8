"""FF180 to FF184: what several ranks must do together, or each for itself."""

import ast
from collections.abc import Iterator

from fullframe.doctor.lint.program import Call, Frame, FrameKind, Program
from fullframe.doctor.lint.roles import Role
from fullframe.doctor.lint.rule import ERROR, WARNING, Found, rule, said
from fullframe.doctor.lint.rules.data import loops_over
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Origin, Value, cone

_COLLECTIVES = frozenset({"all_reduce", "barrier", "broadcast", "all_gather", "all_gather_object",
                          "all_gather_into_tensor", "reduce", "reduce_scatter", "gather", "scatter",
                          "reduce_scatter_tensor", "broadcast_object_list", "gather_object", "all_to_all",
                          "monitored_barrier"})  # fmt: skip
_SENDS = frozenset({"all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "reduce", "gather",
                    "gather_object", "gather_for_metrics", "sync", "synchronize_between_processes", "compute",
                    "reduce_dict", "allreduce", "allreduce_", "allgather"})  # fmt: skip
_METHODS = frozenset({"wait_for_everyone", "gather_for_metrics"})  # of Accelerate's Accelerator, that all ranks call
_HOROVODS = frozenset({"allreduce", "allreduce_", "allgather", "broadcast", "broadcast_", "broadcast_parameters",
                       "broadcast_optimizer_state", "broadcast_object", "alltoall", "barrier"})  # fmt: skip
_RANK_WORDS = ("rank", "is_main", "is_master", "main_process", "is_world", "primary", "is_zero", "master")


def asks_rank(frame: Frame) -> bool:
    """Whether a branch depends on which rank it is."""
    test = getattr(frame.node, "test", None)
    return frame.kind is FrameKind.IF and test is not None and any(w in ast.unparse(test).lower() for w in _RANK_WORDS)


def on_one_rank(call: Call) -> bool:
    """Whether a place is reached by some ranks only: by a branch around it, or a return before it."""
    if any(asks_rank(frame) for frame in call.frame.enclosing()):
        return True
    function = call.frame.innermost(FrameKind.FUNCTION)
    body = getattr(function.node, "body", []) if function is not None else []
    for statement in body if isinstance(body, list) else []:
        if isinstance(statement, ast.If) and statement.lineno < call.node.lineno:
            leaves = isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)
            if leaves and any(w in ast.unparse(statement.test).lower() for w in _RANK_WORDS):
                return True
    decorators = function.definition.decorators if function is not None and function.definition is not None else ()
    return any(any(w in d.text.lower() for w in _RANK_WORDS) for d in decorators)


@rule(
    "FF180", ERROR, "collective that not all ranks reach",
    "All ranks of a group must make the same calls in the same order: those that do wait until a time-out, often for "
    "hours.",
    "Take the call out of the branch; let rank 0 alone do only what sends nothing.",
    """
      import torch.distributed as dist

    + dist.all_reduce(total)
      if dist.get_rank() == 0:
    -     dist.all_reduce(total)
          print(total)
    """,
)  # fmt: skip
def not_reached(training: Training) -> Iterator[Found]:
    """A collective of the whole world in one arm of a branch that compares the rank, or behind one that returns."""
    calls = [c for c in training.program.calls(*_COLLECTIVES, *_METHODS, *_HOROVODS) if _is_of_all(c)]
    for call in calls:
        if "group" in "".join(map(ast.unparse, call.node.args)) or "group" in call.value.keywords:
            continue
        if (left := _left_before(training.program, call)) is not None:
            test = said(getattr(left.node, "test", None))
            yield Found(call.node, f"{said(call.node.func)} is not reached where {test}, which returns before")
            continue
        for frame in call.frame.enclosing(FrameKind.IF):
            if not _compares_rank(frame):
                continue
            others = [c for c in calls for f in c.frame.enclosing() if f.node is frame.node and f.arm is not frame.arm]
            if not others and not _leaves_elsewhere(frame):
                yield Found(
                    call.node, f"{said(call.node.func)} is reached only where {said(getattr(frame.node, 'test', None))}"
                )
            break


def _is_of_all(call: Call) -> bool:
    path, name = call.value.path, call.value.function.text.rpartition(".")[2]
    if name in _METHODS:
        return call.value.receiver is not None and call.receiver.path.endswith("Accelerator")
    return path.startswith("torch.distributed.") if name in _COLLECTIVES else path.startswith("horovod.")


def _left_before(program: Program, call: Call) -> Frame | None:
    """The branch before a call in one of its functions that compares the rank and returns, having sent nothing."""
    for branch in program.frames:
        body = getattr(branch.node, "body", []) if branch.kind is FrameKind.IF and branch.arm else []
        if not body or not isinstance(body[-1], ast.Return) or branch.stop > call.index or branch.parent is None:
            continue
        is_before = call.frame.inside(branch.parent) and branch.parent.innermost(FrameKind.FUNCTION) is not None
        sends = any(c for c in program.events_in(branch) if isinstance(c, Call) and not c.followed and _may_send(c))
        if is_before and not sends and _compares_rank(branch):
            return branch
    return None


def _may_send(call: Call) -> bool:
    """Whether what is called is a collective, or unknown."""
    path = call.value.path
    return not path.startswith(("builtins.", "logging.", "time.", "os.")) and path != "torch.save"


def _compares_rank(frame: Frame) -> bool:
    """`rank == 0` and its likes, by where the value comes from or, for a parameter, by its name."""
    value = frame.value
    if value is not None and value.origin is Origin.ATTRIBUTE and value.text == "is_main_process":
        return value.inputs[0].path.endswith("Accelerator")
    if value is None or value.origin is not Origin.OPERATION or value.text not in ("Eq", "NotEq", "Not", "Gt"):
        return False
    if value.text != "Not" and not any(isinstance(m.constant, int) for i in value.inputs for m in i.members()):
        return False  # of a rank that has a name, more is known elsewhere
    for operand in value.inputs:
        for member in operand.members():
            if member.path in ("torch.distributed.get_rank", "horovod.torch.rank"):
                return True
            is_named = member.origin in (Origin.PARAMETER, Origin.ATTRIBUTE, Origin.UNKNOWN)
            if is_named and member.text.lower() in ("rank", "global_rank", "world_rank"):
                return True
            if any(v.constant == "RANK" for v in cone([member], 6)):
                return True
    return False


def _leaves_elsewhere(frame: Frame) -> bool:
    """Whether the other arm ends the function, so that what follows it may hold the other ranks' calls."""
    node = frame.node
    other = getattr(node, "orelse" if frame.arm else "body", [])
    mine = getattr(node, "body" if frame.arm else "orelse", [])
    return any(b and isinstance(b[-1], ast.Return | ast.Raise) for b in (other, mine))


@rule(
    "FF181", ERROR, "all ranks use the same GPU",
    "A fixed device number puts every rank of a machine onto one GPU: it runs out of memory, and NCCL refuses it.",
    'Use `int(os.environ["LOCAL_RANK"])` as the number.',
    """
    + import os
      import torch.distributed as dist

      dist.init_process_group("nccl")
    - model = nn.Linear(8, 8).to("cuda:0")
    + torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    + model = nn.Linear(8, 8).to("cuda")
    """,
)  # fmt: skip
def one_gpu(training: Training) -> Iterator[Found]:
    """A literal device number for a model or as the current device, in a program of several ranks."""
    if not any(training.program.calls("init_process_group")):
        return
    for call in training.program.calls("to", "cuda", "set_device", "device"):
        given = call.value.argument(0, "device")
        if given is None or on_one_rank(call):
            continue
        is_number = isinstance(given.constant, int) and not isinstance(given.constant, bool)
        is_name = isinstance(given.constant, str) and given.constant.startswith("cuda:")
        is_device = call.value.path in ("torch.device", "torch.cuda.set_device")
        if not is_device and (call.value.receiver is None or not training.is_a(call.value.receiver, Role.MODEL)):
            continue
        if (is_number and call.value.path != "torch.device") or is_name:
            yield Found(call.node, f"{said(call.node)} is the same on every rank")


@rule(
    "FF182", ERROR, "no device chosen for the rank",
    '"cuda" without a number is the current device, which is cuda:0 on every rank unless each one sets its own.',
    'Call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before anything is put on the GPU.',
    """
    + import os
      import torch.distributed as dist

    + torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
      dist.init_process_group("nccl")
      model = nn.Linear(8, 8).cuda()
    """,
)  # fmt: skip
def no_device(training: Training) -> Iterator[Found]:
    """A group is made for NCCL, a model is moved to "cuda", and nothing in the file chooses a device."""
    starts = [c for c in training.program.calls("init_process_group") if _uses_nccl(c)]
    if not starts or any(training.program.calls("set_device", "set_device_index", "init_device_mesh")):
        return
    is_hidden = any("CUDA_VISIBLE_DEVICES" in line for line in training.program.lines)
    if is_hidden or any("device_id" in c.value.keywords for c in starts):
        return
    for call in training.program.calls("cuda", "to"):
        receiver, given = call.value.receiver, call.value.argument(0, "device")
        is_bare = call.value.method == "cuda" and given is None
        if receiver is None or not training.is_a(receiver, Role.MODEL):
            continue
        if is_bare or (given is not None and _is_current(given)):
            yield Found(call.node, f"{said(call.node)} is cuda:0 on every rank")


def _uses_nccl(call: Call) -> bool:
    backend = call.value.argument(0, "backend")
    return backend is not None and any(isinstance(m.constant, str) and "nccl" in m.constant for m in backend.members())


def _is_current(place: Value) -> bool:
    """Whether a place is, or may be, a GPU without a number."""
    for member in place.members():
        of_device = member.path == "torch.device" and len(member.inputs) == 2
        if (member.inputs[1] if of_device else member).constant == "cuda":
            return True
    return False


@rule(
    "FF183", WARNING, "validation figures of one rank",
    "Each rank sums over its own samples only; what is printed or used to choose a model is one rank's part.",
    "Sum counts and totals over the ranks with `all_reduce` before dividing.",
    """
    + import torch.distributed as dist
      from torch.nn.parallel import DistributedDataParallel
      from torch.utils.data import DataLoader, DistributedSampler

      model = DistributedDataParallel(model)
      loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=False))
      model.eval()
    - correct = 0
    + correct = torch.zeros((), device="cuda")
      with torch.no_grad():
          for x, y in loader:
    -         correct += (model(x).argmax(1) == y).sum().item()
    +         correct += (model(x).argmax(1) == y).sum()
    + dist.all_reduce(correct)
      print(correct / len(data))
    """,
)  # fmt: skip
def not_reduced(training: Training) -> Iterator[Found]:
    """Something is summed in a loop without autograd over a DistributedSampler's loader, and never sent."""
    if any(training.program.calls(*_SENDS)):
        return
    for call in training.program.calls("DataLoader"):
        sampler = call.value.argument(3, "sampler")
        if sampler is None or not training.is_a(sampler, Role.SAMPLER):
            continue
        for loop in loops_over(training, call.value):
            evaluated = {id(c.value) for c in training.model_calls_in(loop) if c.value.grad is False}
            for store in training.program.stores_in(loop) if evaluated else ():
                is_summed = isinstance(store.node, ast.AugAssign) and any(
                    id(v) in evaluated for v in cone([store.new], 200)
                )
                if is_summed and not training.escapes([store.new], loop):
                    yield Found(store.node, f"{store.name} is one rank's part and is never put together")


@rule(
    "FF184", WARNING, "every rank writes the file",
    "Ranks write the same file at the same time, which can leave it broken, and takes as many times the bandwidth.",
    "Save on rank 0 only, or give each rank its own name.",
    """
      import torch.distributed as dist

      dist.init_process_group("nccl")
    - torch.save(model.state_dict(), "model.pt")
    + if dist.get_rank() == 0:
    +     torch.save(model.state_dict(), "model.pt")
    """,
)  # fmt: skip
def saved_by_all(training: Training) -> Iterator[Found]:
    """`torch.save` to a literal path under no branch that asks the rank, where the file starts a process group."""
    starts = (*training.program.calls("init_process_group", "Accelerator"), *training.program.calls("init"))
    if not any(c.value.path.startswith(("torch.distributed.", "accelerate.", "horovod.")) for c in starts):
        return
    for call in training.program.calls("save"):
        target = call.value.argument(1, "f")
        if call.value.path != "torch.save" or target is None or on_one_rank(call):
            continue
        plain = (Origin.CONSTANT, Origin.OPERATION, Origin.PATH)
        is_fixed = all(v.origin in plain or v.path.startswith(("os.path", "pathlib")) for v in cone([target], 40))
        if is_fixed:
            yield Found(call.node, f"{said(call.node)} runs on every rank")


RULES = (not_reached, one_gpu, no_device, not_reduced, saved_by_all)
