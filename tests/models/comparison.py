"""One architecture on split ranks against one process: the verdict of the table and of its test.

The ranks build the model themselves and compare for themselves; only their findings travel.

Loss, gradients and buffers are the same when they differ by at most 1e-9 (`Architecture.tolerance`) of the largest
value of the reference tensor. The floor: sums that cancel (the gradient of a bias or a scale before a normalization is
zero but for the normalization's epsilon) hold the rounding noise of their terms, which are as large as other gradients:
some 1e-15 of them. So a tensor below a thousandth of the model's largest gradient (or buffer) is measured against that
thousandth; what it may differ by is 1e-12 of the largest.
"""

import functools
import math
import os
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.models.architectures import ARCHITECTURES, Architecture
from tests.models.elsewhere import installed
from tests.models.test_models import largest, mesh_of
from tests.rank_group import RankFailure, rank_group

FLOOR = 1e-3  # of the largest gradient or buffer
Mesh = tuple[int, ...]  # height, width; for volumes also depth
_WARNING = re.compile(r"^(\S+) \((.*)\) runs on the gathered .*?\): (.*); at .*$", re.DOTALL)


class Outcome(NamedTuple):
    """What one mesh gave: `verdict` is exact, exact with gather, refused or wrong."""

    verdict: str
    error: float  # the largest relative error of loss, gradients and buffers; NaN when there are none
    details: tuple[str, ...] = ()  # "op (module)" of what was gathered, the reason of a refusal, or what is wrong
    seconds: float = 0.0
    split: float = 0.0  # the part of its layers' output elements that was split


@functools.cache
def entries() -> dict[str, Architecture]:
    """All architectures that build on this machine, by name."""
    more, _ = installed()
    return ARCHITECTURES | {entry.name: entry for group in more.values() for entry in group}


class Trained(nn.Module):
    """Model and loss in one, so that DDP sees the parameters which the loss reads and no others."""

    def __init__(self, entry: Architecture):
        super().__init__()
        self.model = entry.build().double().train()
        varied(self.model)
        for module in self.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0  # some heads drop at a rate that no configuration sets
        self.loss = entry.loss

    def forward(self, **inputs: Any) -> Tensor:
        torch.manual_seed(1)  # some losses draw points
        return self.loss(self.model, inputs)


@torch.no_grad()
def varied(model: nn.Module) -> None:
    """Random weights everywhere: zeros and near-zeros that families start from would hide a wrong gradient."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=max(parameter[0].numel(), 1) ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def one_process(entry: Architecture) -> dict[str, Any]:
    """Loss, gradients and buffers of one step in this process."""
    torch.manual_seed(0)
    with default_dtype(entry):
        model = Trained(entry)
        loss = model(**entry.inputs(*entry.size))
        loss.backward()
    return answers(model, loss)


@contextmanager
def default_dtype(entry: Architecture) -> Iterator[None]:
    """What torch makes without a dtype is float64 for models that mix such tensors with their own."""
    torch.set_default_dtype(torch.float64 if entry.double_defaults else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def answers(model: nn.Module, loss: Tensor) -> dict[str, Any]:
    return {
        "loss": {"loss": loss.detach()},
        "gradient": {key: p.grad for key, p in model.named_parameters() if p.grad is not None},
        "buffer": dict(model.named_buffers()),
        "trained": sum(p.requires_grad for p in model.parameters()),
    }


def layers_output(model: nn.Module) -> Counter[str]:
    """Filled while the model runs: output elements of its innermost modules, "split" and "whole"."""
    import fullframe as ff

    elements: Counter[str] = Counter()

    def count(module: nn.Module, given: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                elements["split" if isinstance(tensor, ff.SpatialTensor) else "whole"] += tensor.shape.numel()

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    return elements


def split_step(name: str, on: Mesh, unsupported: str, path: str) -> dict[str, Any]:
    """On a rank: one split step; the findings, or the refusal."""
    entry = entries()[name]
    with default_dtype(entry):
        return _split_step(entry, on, unsupported, path)


def _split_step(entry: Architecture, on: Mesh, unsupported: str, path: str) -> dict[str, Any]:
    import fullframe as ff
    from fullframe.spatial import operands

    mesh = mesh_of(*on)
    operands._said.clear()  # an earlier model may have said the same
    expected = torch.load(path)
    torch.manual_seed(0)
    plain = Trained(entry)
    elements = layers_output(plain)
    model = ff.parallelize(
        plain,
        mesh,
        unsupported=unsupported,  # type: ignore[arg-type]
        find_unused_parameters=len(expected["gradient"]) < expected["trained"],
    )
    inputs = {
        key: tree_map(lambda part: ff.shard(part, mesh), value) if key in entry.split else value
        for key, value in entry.inputs(*entry.size).items()
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loss = model(**inputs)
            loss.backward()
        except ff.UnsupportedOp as refusal:
            return {"refused": f"{refusal.function} ({shortened(refusal.module)}): {refusal.reason}"}
    said = [_WARNING.match(str(warning.message)) for warning in caught]
    findings, worst = compared(expected, answers(model.module, loss), entry.tolerance)
    return {
        "findings": findings,
        "error": worst,
        "gathered": [match.groups() for match in said if match],
        "split": elements["split"] / max(elements.total(), 1),
    }


def relative_error(actual: Tensor, expected: Tensor, floor: float) -> float:
    """The largest difference over the largest expected value, or over `floor` where that is larger."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    if not actual.isfinite().all():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    difference, scale = largest([actual - expected]), max(largest([expected]), floor)
    return difference / scale if scale else difference


def compared(expected: dict[str, Any], actual: dict[str, Any], tolerance: float) -> tuple[list[str], float]:
    """What is beyond the tolerance, and the largest relative error."""
    findings, worst = [], 0.0
    for kind in ("loss", "gradient", "buffer"):
        if expected[kind].keys() != actual[kind].keys():
            findings.append(f"other {kind}s: {sorted(expected[kind].keys() ^ actual[kind].keys())}")
            continue
        floor = FLOOR * largest(value for value in expected[kind].values() if value.is_floating_point())
        for key, value in expected[kind].items():
            error = relative_error(actual[kind][key].detach(), value, floor)
            worst = max(worst, error)
            if not error <= tolerance:
                findings.append(f"{kind} {key} is off by {error:.1e}")
    return findings, worst


def run_on(entry: Architecture, on: Mesh, unsupported: str, path: Path) -> Outcome:
    """One mode on one mesh."""
    group = rank_group(math.prod(on))
    begin = time.monotonic()
    try:
        results = group.run(split_step, entry.name, on, unsupported, os.fspath(path))
    except RankFailure as failure:
        if group.alive:
            group.close()  # its ranks may stand at different messages
        rank, kind, message, _ = failure.errors[0]
        return Outcome("wrong", float("nan"), (f"rank {rank} raised {kind}: {message[:300]}",))
    seconds = time.monotonic() - begin
    refusals = [result for result in results if "refused" in result]
    if refusals and len(refusals) < len(results):
        return Outcome("wrong", float("nan"), ("only some ranks refused: " + refusals[0]["refused"],), seconds)
    if refusals:
        first = refusals[0]
        return Outcome("refused", float("nan"), (first["refused"],), seconds)
    findings = [finding for result in results for finding in result["findings"]]
    worst = max(result["error"] for result in results)
    if findings:
        return Outcome("wrong", worst, tuple(dict.fromkeys(findings)), seconds)
    said = [f"{op} ({shortened(where)})" for result in results for op, where, _ in result["gathered"]]
    said = list(dict.fromkeys(said))
    return Outcome("exact with gather" if said else "exact", worst, tuple(said), seconds, results[0]["split"])


def shortened(where: str) -> str:
    """The path in the user's model; "loss" for what runs outside it."""
    return "loss" if where == "Trained" else where.removeprefix("model.")


def verdicts_of(name: str, meshes: tuple[Mesh, ...]) -> dict[Mesh, Outcome]:
    """For each mesh what it gives with `unsupported="error"`, and where that refuses with "gather"."""
    entry = entries()[name]
    outcomes = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "expected.pt"
        torch.save(one_process(entry), path)
        for on in meshes:
            outcome = run_on(entry, on, "error", path)
            if outcome.verdict == "refused":
                outcome = run_on(entry, on, "gather", path)
            outcomes[on] = outcome
    return outcomes
