"""FF19x: forms that torch has replaced, and files that are loaded onto the wrong device."""

import ast
from collections.abc import Iterator

from fullframe.doctor.lint.program import Call, FrameKind
from fullframe.doctor.lint.roles import Role
from fullframe.doctor.lint.rule import NOTE, WARNING, Found, is_false, rule, said
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Value, cone


def _calls(training: Training, *names: str) -> Iterator[Call]:
    """Calls of what lies below one of these dotted paths."""
    last = {name.rpartition(".")[2] for name in names}
    for call in training.program.calls(*last):
        if call.value.path in names:
            yield call


def _loads(training: Training) -> Iterator[Call]:
    """Calls of `torch.load` of a file; what the program itself wrote, or holds in memory, is no stranger's."""
    saved = [save.value.argument(1, "f") for save in training.program.calls("save")]
    for call in _calls(training, "torch.load", "torch.serialization.load"):
        source = call.value.argument(0, "f")
        if source is None or not (any(source is own for own in saved) or any(map(_is_in_memory, cone([source], 20)))):
            yield call


def _is_in_memory(value: Value) -> bool:
    annotation = value.node.annotation if isinstance(value.node, ast.arg) else None
    is_told = annotation is not None and "BytesIO" in ast.unparse(annotation)
    return is_told or value.path.rpartition(".")[2] == "BytesIO"


@rule(
    "FF190", NOTE, "Apex mixed precision",
    "Apex's amp is no longer developed; torch has it built in, without patching functions.",
    "Use `torch.autocast` and `torch.amp.GradScaler`.",
    """
    - from apex import amp
    -
    - model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    + scaler = torch.amp.GradScaler()
    + with torch.autocast("cuda", dtype=torch.float16):
    +     loss = model(x)
    """,
)  # fmt: skip
def apex_amp(training: Training) -> Iterator[Found]:
    """`apex.amp.initialize`, `apex.amp.scale_loss`."""
    for call in _calls(training, "apex.amp.initialize", "apex.amp.scale_loss"):
        yield Found(call.node, f"{said(call.node.func)} is of Apex")


@rule(
    "FF191", WARNING, "DataParallel",
    "One process drives all GPUs: the model is copied at every forward, outputs are gathered on the first GPU, which "
    "runs out of memory first, and Python's lock serialises the rest.",
    "Start one process for each GPU (torchrun) and use DistributedDataParallel.",
    """
    - model = nn.DataParallel(model)
    + from torch.nn.parallel import DistributedDataParallel
    +
    + model = DistributedDataParallel(model)
    """,
)  # fmt: skip
def data_parallel(training: Training) -> Iterator[Found]:
    """`torch.nn.DataParallel(...)`."""
    for call in _calls(training, "torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
        yield Found(call.node, f"{said(call.node.func)} copies the model to every GPU in every step")


@rule(
    "FF192", NOTE, "torch.cuda.amp",
    "torch.cuda.amp's classes are deprecated and warn at every use.",
    'Use `torch.amp.autocast("cuda", ...)` and `torch.amp.GradScaler("cuda", ...)`.',
    """
    - with torch.cuda.amp.autocast():
    + with torch.amp.autocast("cuda"):
          loss = model(x)
    """,
)  # fmt: skip
def cuda_amp(training: Training) -> Iterator[Found]:
    """`torch.cuda.amp.autocast(...)` and `torch.cuda.amp.GradScaler(...)`, however they are imported."""
    places = ("torch.cuda.amp", "torch.cuda.amp.autocast_mode", "torch.cuda.amp.grad_scaler")
    names = [f"{place}.{name}" for place in places for name in ("autocast", "GradScaler")]
    for call in _calls(training, *names):
        branches = (getattr(f.node, "test", None) for f in call.frame.enclosing(FrameKind.IF))
        is_chosen = any("version" in ast.unparse(test).lower() for test in branches if test is not None)
        if not is_chosen and "torch.amp." not in training.program.lines[call.node.lineno - 1]:
            yield Found(call.node, f"{said(call.node.func)} is deprecated")


@rule(
    "FF193", NOTE, "Apex where torch has it",
    "Apex's distributed wrapper, synchronised batch norm and fused optimizers are in torch, and are kept there.",
    "Use torch's DistributedDataParallel, SyncBatchNorm, or its optimizers with `fused=True`.",
    """
    - from apex.parallel import DistributedDataParallel
    + from torch.nn.parallel import DistributedDataParallel

      model = DistributedDataParallel(model)
    """,
)  # fmt: skip
def apex_parallel(training: Training) -> Iterator[Found]:
    """What has a counterpart in torch."""
    parallel = ("DistributedDataParallel", "convert_syncbn_model", "SyncBatchNorm")
    names = [f"apex.parallel.{name}" for name in parallel] + ["apex.optimizers.FusedAdam", "apex.optimizers.FusedSGD"]
    for call in _calls(training, *names):
        yield Found(call.node, f"{said(call.node.func)} is of Apex")


_REPLACED = {
    "torch.nn.utils.clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
    "torch.nn.functional.upsample": "torch.nn.functional.interpolate",
    "torch.nn.functional.upsample_bilinear": "torch.nn.functional.interpolate",
    "torch.nn.functional.upsample_nearest": "torch.nn.functional.interpolate",
    "torch.nn.init.xavier_uniform": "torch.nn.init.xavier_uniform_",
    "torch.nn.init.xavier_normal": "torch.nn.init.xavier_normal_",
    "torch.nn.init.kaiming_uniform": "torch.nn.init.kaiming_uniform_",
    "torch.nn.init.kaiming_normal": "torch.nn.init.kaiming_normal_",
    "torch.nn.init.normal": "torch.nn.init.normal_",
    "torch.nn.init.constant": "torch.nn.init.constant_",
    "torch.nn.init.orthogonal": "torch.nn.init.orthogonal_",
}


@rule(
    "FF194", NOTE, "function that torch has replaced",
    "The old name is deprecated and will be gone one day.",
    "Use the name that the message gives.",
    """
    - torch.nn.utils.clip_grad_norm(model.parameters(), 1.0)
    + torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """,
)  # fmt: skip
def replaced(training: Training) -> Iterator[Found]:
    """A deprecated function that has a successor with the same arguments."""
    for call in _calls(training, *_REPLACED):
        yield Found(call.node, f"{said(call.node.func)} is now {_REPLACED[call.value.path]}")


@rule(
    "FF195", NOTE, "Variable",
    "Tensors have been variables since torch 0.4; the call does nothing, and volatile=True no longer switches "
    "autograd off.",
    "Use the tensor itself; `torch.no_grad()` in place of volatile=True.",
    """
    - from torch.autograd import Variable
    -
    - x = Variable(x)
    + with torch.no_grad():
    +     y = model(x)
    """,
)  # fmt: skip
def variable(training: Training) -> Iterator[Found]:
    """`torch.autograd.Variable(...)`."""
    for call in _calls(training, "torch.autograd.Variable", "torch.autograd.variable.Variable"):
        yield Found(call.node, f"{said(call.node)} does nothing")


@rule(
    "FF196", NOTE, "torch.load without map_location",
    "Tensors go back to the GPU they were saved from: to cuda:0 on all ranks, or to one that this machine does not "
    "have.",
    "Pass `map_location=\"cpu\"`, or the rank's own device.",
    """
    - state = torch.load("model.pt", weights_only=True)
    + state = torch.load("model.pt", map_location="cpu", weights_only=True)
    """,
)  # fmt: skip
def unmapped(training: Training) -> Iterator[Found]:
    """No `map_location`, and no `**` that may hold it."""
    for call in _loads(training):
        given = call.value.keywords
        if call.value.argument(1, "map_location") is None and "**" not in given and not _is_of_the_host(training, call):
            yield Found(call.node, f"{said(call.node)} goes to the device it was saved from")


def _is_of_the_host(training: Training, load: Call) -> bool:
    """Whether what is loaded is the state of a schedule, a scaler or random numbers, which lies on no GPU."""
    for name in ("load_state_dict", "setstate", "set_state", "set_rng_state"):
        for call in training.program.calls(name):
            receiver = call.value.receiver
            is_small = receiver is not None and training.is_a(receiver, Role.SCHEDULER | Role.SCALER)
            if (is_small or name != "load_state_dict") and any(v is load.value for v in cone(call.value.arguments, 30)):
                return True
    return False


@rule(
    "FF197", WARNING, "torch.load that runs what the file says",
    "With weights_only=False a checkpoint is unpickled, and a pickle can run any code.",
    "Pass `weights_only=True`; allow the classes needed with `torch.serialization.add_safe_globals`.",
    """
    - state = torch.load("model.pt", map_location="cpu", weights_only=False)
    + state = torch.load("model.pt", map_location="cpu", weights_only=True)
    """,
)  # fmt: skip
def unpickled(training: Training) -> Iterator[Found]:
    """The literal `weights_only=False`."""
    for call in _loads(training):
        if is_false(call.value.keywords.get("weights_only")):
            yield Found(call.node, f"{said(call.node)} can run any code")


@rule(
    "FF198", NOTE, "torch.load without weights_only",
    "Its default is True since torch 2.6 and was False before: the file is read safely or not, depending on the "
    "version.",
    "Pass `weights_only=True`.",
    """
    - state = torch.load("model.pt", map_location="cpu")
    + state = torch.load("model.pt", map_location="cpu", weights_only=True)
    """,
    default=False,
)  # fmt: skip
def unsaid(training: Training) -> Iterator[Found]:
    """No `weights_only`, and no `**` that may hold it."""
    for call in _loads(training):
        given = call.value.keywords
        if "weights_only" not in given and "**" not in given:
            yield Found(call.node, f"{said(call.node)} depends on the version of torch")


@rule(
    "FF199", NOTE, "--local_rank as an argument",
    "torchrun no longer passes it; the argument keeps its default on every rank, so all use the same GPU.",
    'Read `int(os.environ["LOCAL_RANK"])`.',
    """
    - import argparse
    + import os

    - parser = argparse.ArgumentParser()
    - parser.add_argument("--local_rank", type=int, default=0)
    + local_rank = int(os.environ["LOCAL_RANK"])
    """,
)  # fmt: skip
def local_rank(training: Training) -> Iterator[Found]:
    """`add_argument("--local_rank")` in a file that never reads the variable."""
    if any('"LOCAL_RANK"' in line or "'LOCAL_RANK'" in line for line in training.program.lines):
        return
    for call in training.program.calls("add_argument"):
        if any(a.constant in ("--local_rank", "--local-rank") for a in call.value.arguments):
            yield Found(call.node, "torchrun gives the number in LOCAL_RANK only")


RULES = (
    apex_amp, data_parallel, cuda_amp, apex_parallel, replaced, variable, unmapped, unpickled, unsaid, local_rank,
)  # fmt: skip
