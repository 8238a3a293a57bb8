"""FF16x: a training loop that makes the host wait for the device, or does slow things each step."""

import ast
from collections.abc import Iterator

from fullframe.doctor.lint.program import Call, Frame, FrameKind
from fullframe.doctor.lint.rule import NOTE, WARNING, Found, is_true, rule, said
from fullframe.doctor.lint.rules.memory import is_data
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.values import Origin, Value, cone

_READS = ("item", "tolist", "numpy")
_PRINTS = ("builtins.print", "logging.info", "logging.debug", "logging.warning")
_FACTORIES = {f"torch.{name}" for name in ("zeros", "ones", "full", "empty", "arange", "linspace", "eye")}


def _hot_loop(training: Training, frame: Frame) -> Frame | None:
    """The loop around `frame` whose every round is a training step, where `frame` runs in each."""
    loop = training.step_loop(frame)
    return loop if loop is not None and frame.is_always_run_in(loop) else None


@rule(
    "FF161", NOTE, "the host waits for the device every step",
    "`.item()`, `.cpu()`, `.numpy()` and `float()` of a result wait until the device has done all that was asked of "
    "it.",
    "Keep `x.detach()` on the device, sum there, and read it every hundredth step.",
    """
      for x, y in loader:
          optimizer.zero_grad()
          loss = F.cross_entropy(model(x), y)
          loss.backward()
          optimizer.step()
    -     total += loss.item()
    +     total += loss.detach()
    """,
)  # fmt: skip
def read_every_step(training: Training) -> Iterator[Found]:
    """A result is read in each round of a training loop, under no condition."""
    for call in training.program.calls(*_READS, "cpu", "float", "int"):
        value = call.value
        if value.path in ("builtins.float", "builtins.int"):
            source = value.arguments[0] if value.arguments else None
        elif value.method in (*_READS, "cpu"):
            source = value.receiver
        else:
            continue
        if source is None or call.followed or _hot_loop(training, call.frame) is None:
            continue
        if source.method not in ("item", "cpu", "tolist") and _is_result(training, source):
            yield Found(call.node, f"{said(call.node)} waits for the device in every step")


def _is_result(training: Training, value: Value) -> bool:
    """Whether `value` is a tensor with a graph, cut off or not."""
    while value.method in ("detach", "cpu", "sum", "mean", "max") and value.receiver is not None:
        value = value.receiver
    return value.origin is not Origin.CONTAINER and training.has_graph(value)


@rule(
    "FF162", NOTE, "a tensor is printed every step",
    "To print a tensor the host waits for the device, and writing each step is slow on shared file systems.",
    "Print every hundredth step.",
    """
    - for x, y in loader:
    + for i, (x, y) in enumerate(loader):
          optimizer.zero_grad()
          loss = F.cross_entropy(model(x), y)
          loss.backward()
          optimizer.step()
    -     print("loss", loss)
    +     if i % 100 == 0:
    +         print("loss", loss)
    """,
)  # fmt: skip
def printed(training: Training) -> Iterator[Found]:
    """`print` of a tensor, or of text with one, in each round of a training loop."""
    for call in training.program.calls("print", "info", "debug", "warning"):
        is_logger = call.value.receiver is not None and call.value.receiver.path == "logging.getLogger"
        if not (is_logger or call.value.path in _PRINTS) or _hot_loop(training, call.frame) is None:
            continue
        given = [part for a in call.value.inputs[1:] for part in (a.inputs if a.text == "text" else (a,))]
        if any(training.has_graph(part) for part in given if part.origin is not Origin.CONTAINER):
            yield Found(call.node, f"{said(call.node)} reads a tensor in every step")


@rule(
    "FF163", WARNING, "synchronize every step",
    "The host waits until the device is idle, so it cannot prepare the next step meanwhile.",
    "Leave it out; to time steps use events, or read the clock every hundredth step.",
    """
      for x, y in loader:
          optimizer.zero_grad()
          F.cross_entropy(model(x), y).backward()
          optimizer.step()
    -     torch.cuda.synchronize()
    """,
)  # fmt: skip
def synchronized(training: Training) -> Iterator[Found]:
    """`torch.cuda.synchronize()` in each round of a training loop in which no time is taken."""
    for call in training.program.calls("synchronize"):
        loop = _hot_loop(training, call.frame)
        if loop is None or not call.value.path.startswith(("torch.cuda.", "torch.accelerator.", "torch.xpu.")):
            continue
        clocks = training.program.calls_in(loop, "time", "perf_counter", "perf_counter_ns", "monotonic", "elapsed_time")
        if not any(clocks):
            yield Found(call.node, f"{said(call.node)} waits for the device in every step")


@rule(
    "FF164", NOTE, "tensor made on the CPU and then moved",
    "The tensor is filled by the host and copied, which waits; made on the device it costs one kernel.",
    "Pass `device=` to the function that makes it.",
    """
      class Net(nn.Module):
          def forward(self, x):
    -         return x + torch.zeros(8, 8).to(x.device)
    +         return x + torch.zeros(8, 8, device=x.device)
    """,
)  # fmt: skip
def moved(training: Training) -> Iterator[Found]:
    """`torch.zeros(...).to(device)` in forward or in a loop."""
    for call in training.program.calls("to", "cuda"):
        made = call.value.receiver
        if made is None or made.path not in _FACTORIES or made.origin is not Origin.CALL or "device" in made.keywords:
            continue
        if not isinstance(call.node.func, ast.Attribute) or not isinstance(call.node.func.value, ast.Call):
            continue
        function = call.frame.innermost(FrameKind.FUNCTION)
        is_forward = function is not None and function.definition is not None and function.definition.name == "forward"
        if (is_forward or call.frame.innermost(FrameKind.LOOP) is not None) and _names_a_device(call):
            yield Found(call.node, f"{said(call.node)} is filled on the host and copied")


def _names_a_device(call: Call) -> bool:
    if call.value.method == "cuda":
        return True
    given = call.value.argument(0, "device")
    if given is None:
        return False
    if isinstance(given.constant, str):
        return given.constant != "cpu"
    return given.text == "device" or given.path == "torch.device"


@rule(
    "FF165", NOTE, "a branch on a tensor every step",
    "To know which way to go the host reads the tensor, and waits for the device.",
    "Test every hundredth step, or keep the answer on the device (`torch.where`).",
    """
    - for x, y in loader:
    + for i, (x, y) in enumerate(loader):
          optimizer.zero_grad()
          loss = F.cross_entropy(model(x), y)
    -     if torch.isnan(loss):
    +     if i % 100 == 0 and torch.isnan(loss):
              break
          loss.backward()
          optimizer.step()
    """,
    default=False,
)  # fmt: skip
def branched(training: Training) -> Iterator[Found]:
    """An `if` on something computed of a tensor that holds a graph, in each round of a training loop."""
    for frame in training.program.frames:
        if frame.kind is not FrameKind.IF or frame.value is None or not frame.arm or frame.parent is None:
            continue
        made_of = list(cone([frame.value], 60))
        reads = any(
            v.method in _READS or v.path.startswith("builtins.") or v.text in ("Is", "IsNot", "Mod") for v in made_of
        )
        if not reads and _hot_loop(training, frame.parent) and any(map(training.has_graph, made_of[:8])):
            yield Found(frame.node, f"the test {said(getattr(frame.node, 'test', None))} reads a tensor in every step")


@rule(
    "FF166", NOTE, "copy from pinned memory that waits",
    "Pinned memory is paid for so that copies can run beside computation; without non_blocking=True each copy waits.",
    "Pass `non_blocking=True`.",
    """
      from torch.utils.data import DataLoader

      loader = DataLoader(data, num_workers=4, pin_memory=True)
      for x, y in loader:
    -     x, y = x.cuda(), y.cuda(non_blocking=True)
    +     x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
          F.cross_entropy(model(x), y).backward()
          optimizer.step()
          optimizer.zero_grad()
    """,
)  # fmt: skip
def blocking(training: Training) -> Iterator[Found]:
    """`.cuda()` or `.to(device)` of what a loader with pin_memory=True gives."""
    for call in training.program.calls("cuda", "to"):
        receiver = call.value.receiver
        if receiver is None or not is_data(receiver) or "non_blocking" in call.value.keywords:
            continue
        loaders = (v for v in cone([receiver], 60) if v.path.rpartition(".")[2] == "DataLoader")
        if any(is_true(v.keywords.get("pin_memory")) for v in loaders) and _names_a_device(call):
            yield Found(call.node, f"{said(call.node)} waits for a copy that need not wait")


@rule(
    "FF167", WARNING, "anomaly detection left on",
    "It stores a stack trace with every op and checks every gradient: training is several times slower.",
    "Switch it on behind an option, while looking for a NaN.",
    """
    - torch.autograd.set_detect_anomaly(True)
    + torch.autograd.set_detect_anomaly(args.debug)
      for x, y in loader:
          optimizer.zero_grad()
          F.cross_entropy(model(x), y).backward()
          optimizer.step()
    """,
)  # fmt: skip
def anomaly(training: Training) -> Iterator[Found]:
    """`set_detect_anomaly(True)` under no condition, and not for one block, in a program that trains."""
    for call in training.program.calls("set_detect_anomaly", "detect_anomaly"):
        is_on = call.value.path.endswith(".detect_anomaly") or is_true(call.value.argument(0, "mode"))
        is_meant = call.frame.innermost(FrameKind.IF) is not None
        is_meant = is_meant or any(f.kind is FrameKind.WITH and f.value is call.value for f in training.program.frames)
        if call.value.path.startswith("torch.autograd.") and is_on and not is_meant and training.updates:
            yield Found(call.node, f"{said(call.node)} is on for the whole run")


RULES = (read_every_step, printed, synchronized, moved, branched, blocking, anomaly)
