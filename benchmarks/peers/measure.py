"""The part that runs on the ranks: one case on one library, compared with one process, counted and timed."""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.communication.traffic import counted
from benchmarks.peers.cases import BY_NAME, Case, Size, built
from benchmarks.peers.libraries import LIBRARIES, OURS, Library, columns, leaf
from benchmarks.timing import slowest

TOLERANCE = 1e-11
NOISE = 1e-3  # of the largest gradient: below it a gradient that is zero in theory has only rounding to show

Answers = dict[str, Tensor]


def weighted(output: Tensor) -> Tensor:
    """A loss whose gradient differs from value to value."""
    return (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).cos().view_as(output)).sum()


def expected(case: Case, size: Size) -> Answers:
    """Output, gradients and buffers of one process; of the image's gradient this rank's columns."""
    module = built(case, size.dtype)
    inputs = [leaf(value) for value in case.inputs(size)]
    output = module(*inputs)
    weighted(output).backward()
    answers = {"output": output.detach()}
    answers |= {f"gradient of input {n}": columns(x.grad) for n, x in enumerate(inputs) if x.grad is not None}
    answers |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return answers | {f"buffer {name}": value for name, value in module.named_buffers()}


def answered(library: Library, case: Case, size: Size) -> Answers:
    """The same, from the library."""
    module = built(case, size.dtype)
    run = library.prepare(module)
    split = [library.split(value) for value in case.inputs(size)]
    output = library.whole(run(*(value for value, _ in split)))
    weighted(output).backward()
    library.settle(module)
    answers = {"output": output.detach()}
    for number, ((_, gradient), full) in enumerate(zip(split, case.inputs(size), strict=True)):
        if full.is_floating_point():
            answers[f"gradient of input {number}"] = library.plain(gradient())
    parameters = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    answers |= {f"gradient of {name}": library.plain(value) for name, value in parameters.items()}
    return answers | {f"buffer {name}": library.plain(value) for name, value in module.named_buffers()}


def largest_error(reference: Answers, got: Answers) -> tuple[float, str]:
    """The largest relative difference, and of what; infinite for what is missing, NaN or of another shape."""
    floor = NOISE * max(float(value.abs().max()) for name, value in reference.items() if name.startswith("gradient"))
    worst = 0.0, ""
    for name, value in reference.items():
        other = got.get(name)
        if other is None or other.shape != value.shape:
            return float("inf"), name
        value, other = value.double(), other.detach().double()
        scale = max(float(value.abs().max()), floor if name.startswith("gradient") else 0.0, 1e-30)
        error = float((value - other).abs().max()) / scale
        worst = max(worst, (error if error == error else float("inf"), name))  # NaN is as bad as it gets
    return worst


def exactness(library_name: str, case_name: str, width: int) -> tuple[float, str]:
    """How far the library is from one process at this width."""
    warnings.simplefilter("ignore")
    case = BY_NAME[case_name]
    size = case.exact(width)
    return largest_error(expected(case, size), answered(LIBRARIES[library_name][1](), case, size))


class Step:
    """Forward and backward of a case on a library; the output's gradient is given, so no loss sends anything."""

    def __init__(self, library: Library, case: Case, size: Size):
        self.library = library
        self.full = case.inputs(size)
        self.module = built(case, size.dtype)
        self.run = library.prepare(self.module)
        self.split: list[Any] = []

    def begin(self) -> None:
        """What is not timed: gradients dropped, the image split as a loader would."""
        self.module.zero_grad(set_to_none=True)
        self.split = [self.library.split(value)[0] for value in self.full]

    def __call__(self) -> None:
        output = self.library.local(self.run(*self.split))
        torch.autograd.backward(output, torch.ones_like(output))
        self.library.settle(self.module)


def timed(begin: Callable[[], None], run: Callable[[], object]) -> float:
    """Seconds of one call on the slowest rank."""
    begin()
    dist.barrier()
    start = time.perf_counter()
    run()
    return slowest(time.perf_counter() - start)


def sent_bytes(step: Step) -> int:
    """Bytes handed to communication by all ranks in one step; the first steps set things up."""
    for _ in range(2):
        step.begin()
        step()
    step.begin()
    total = torch.tensor(counted(step).total())
    dist.all_reduce(total)
    return int(total)


def performance(library_name: str, case_name: str, rounds: int) -> dict[str, Any]:
    """Bytes of a step, its time over ours in turns, and microseconds of a forward call on a tiny tensor."""
    warnings.simplefilter("ignore")
    case = BY_NAME[case_name]
    library, ours = LIBRARIES[library_name][1](), LIBRARIES[OURS][1]()
    step = Step(library, case, case.timed)
    found: dict[str, Any] = {"bytes": sent_bytes(step)}
    if library_name != OURS:
        reference = Step(ours, case, case.timed)
        sent_bytes(reference)  # warm-up
        pairs = [(timed(step.begin, step), timed(reference.begin, reference)) for _ in range(rounds)]
        theirs, mine = zip(*pairs, strict=True)
        found["seconds"] = statistics.median(theirs)
        found["ratio"] = statistics.median(theirs) / statistics.median(mine)
    if case.tiny is not None:
        found["microseconds"] = microseconds(Step(library, case, case.tiny), rounds)
    return found


def microseconds(step: Step, rounds: int, count: int = 50) -> float:
    """Of a forward call that builds its graph and drops it; of the op, without DDP around it."""
    step.begin()

    def calls() -> None:
        for _ in range(count):
            step.module(*step.split)

    calls()
    return statistics.median(timed(lambda: None, calls) for _ in range(rounds)) / count * 1e6


def plain_microseconds(case_name: str, rounds: int, count: int = 50) -> float | None:
    """The same call in plain torch on this rank's part of the tiny tensor."""
    case = BY_NAME[case_name]
    if case.tiny is None:
        return None
    module = built(case, case.tiny.dtype)
    parts = [leaf(columns(value)) for value in case.inputs(case.tiny)]

    def calls() -> None:
        for _ in range(count):
            module(*parts)

    calls()
    return statistics.median(timed(lambda: None, calls) for _ in range(rounds)) / count * 1e6
