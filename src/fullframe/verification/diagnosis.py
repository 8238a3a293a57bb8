"""From what all ranks found to a verdict: is it exact, and if not, which module's work is the first that differs?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fullframe.errors import UnsupportedOp
from fullframe.verification.verdict import (
    NARROW,
    Difference,
    FirstDifference,
    Found,
    Loss,
    Place,
    Refusal,
    Value,
    Verdict,
    middle,
    named_differences,
)
from fullframe.wording import some

_KINK = (
    "; the forward pass and the loss agree, so values may sit on a kink (whole pixels in grid_sample, zeros in relu or "
    "abs, ties in max), where rounding decides between two right gradients: compare with --noise 0.01, which moves the "
    "weights; where that is exact, it was the kink"
)
_DRAWS = (
    "the loss depends on the seed also without dropout: what torch draws is equal in both runs, but for F.rrelu's "
    "slopes; what is drawn for a rank's x.local, and by other libraries for it, is not"
)
_ROUNDING = 1e-2  # relative; what is further off is no rounding


@dataclass(frozen=True, kw_only=True)
class PartEvidence:
    """One replica's step: what one process did in order, and how far the split step was off."""

    places: Sequence[tuple[Place, int]]  # in order of execution, with the number of the value
    values: Sequence[Value]
    forward: dict[tuple[str, str, int, int], Found]  # by kind, path, call, leaf
    backward: dict[int, Found]  # by the number of the value
    unexpected: list[Place]  # only the split step has them


@dataclass(frozen=True, kw_only=True)
class Named:
    """Gradients or buffers by name; `missing` are those there is nothing to compare of, with the reason."""

    found: Mapping[str, Found]
    missing: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What all ranks found, together."""

    parts: Sequence[PartEvidence]  # one a replica
    losses: tuple[float, float]  # in one process, split
    parameters: Named
    buffers: Named
    classes: Mapping[str, str]  # class name by module path
    narrow: Mapping[str, str] = field(default_factory=dict)  # as `Answers.narrow`
    draws: bool = False  # as `Answers.draws`


def refused(
    error: UnsupportedOp, mesh: Mapping[str, int], device: str, tolerance: float, notes: Sequence[str]
) -> Verdict:
    """The verdict on a step that met an op without an exact rule."""
    said = {name: getattr(error, name) for name in ("function", "module", "placements", "fix")}
    refusal = Refusal(message=str(error), **said)
    return Verdict(exact=False, refused=refusal, mesh=mesh, device=device, tolerance=tolerance, notes=tuple(notes))


def judged(evidence: Evidence, mesh: Mapping[str, int], device: str, tolerance: float, notes: Sequence[str]) -> Verdict:
    """The verdict on a step that ran."""
    one, split = evidence.losses
    apart = abs(one - split) if math.isfinite(split) else math.inf
    loss = Loss(
        one_process=one, split=split, max_abs=apart, relative=apart / abs(one) if one else math.inf if apart else 0.0
    )
    parameters, buffers = _differences(evidence.parameters), _differences(evidence.buffers)
    searches = (
        _first_forward(evidence, tolerance),
        _first_unexpected(evidence),
        _first_named("buffer", buffers, evidence.buffers, evidence.classes, tolerance),
        _loss_difference(loss, tolerance),
        _first_backward(evidence, tolerance),
        _first_named("parameter", parameters, evidence.parameters, evidence.classes, tolerance),
    )
    first = next((difference for difference in searches if difference is not None), None)
    if first is not None and first.relative < _ROUNDING and f"torch.{first.dtype}" not in NARROW:
        first = replace(first, message=first.message + _rounding_within(evidence))
    if first is not None and first.phase in ("backward", "parameter") and math.isfinite(first.relative):
        first = replace(first, message=first.message + _KINK)
    if first is not None and evidence.draws:
        notes = [*notes, _DRAWS]
    return Verdict(
        exact=first is None,
        loss=loss,
        first_difference=first,
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        values=sum(len(part.forward) for part in evidence.parts),
        gradients=sum(len(part.backward) for part in evidence.parts),
        mesh=mesh,
        device=device,
        tolerance=tolerance,
        notes=(*notes, *_unused(evidence.parameters)),
    )


def _rounding_within(evidence: Evidence) -> str:
    """What computes in less than double precision somewhere on the way."""
    if not evidence.narrow:
        return ""
    inside = [f"{_described(path, evidence.classes.get(path, ''))} in {kind.removeprefix('torch.')}"
              for path, kind in evidence.narrow.items()]  # fmt: skip
    return (
        f"; some of it is computed in less than double precision ({some(inside)}), whose rounding may "
        "be all of it: compute that in the dtype of its input, or use a wider --tolerance"
    )


def _differences(named: Named) -> list[Difference]:
    return named_differences(named.found, named.shapes, named.missing)


def _unused(parameters: Named) -> Iterator[str]:
    if parameters.missing:
        names = parameters.missing
        yield (
            f"{len(names)} parameters get no gradient from this batch ({some(names)}): "
            "they are trained by none, in one process and in many"
        )


def _first_forward(evidence: Evidence, tolerance: float) -> FirstDifference | None:
    peers = middle(f.scale for part in evidence.parts for f in part.forward.values() if f.floating)
    absent = Found(math.inf, 0.0, problem="the split step never gets there")
    candidates = [
        (position, place, part.values[number], found)
        for part in evidence.parts
        for position, (place, number) in enumerate(part.places)
        if (found := part.forward.get(place[:4], absent)).relative(peers) > tolerance
    ]
    if not candidates:
        return None
    _, place, value, found = min(candidates, key=lambda candidate: candidate[0])
    name = _described(place.path, place.class_name)
    relative = found.relative(peers)
    if place.kind == "output":
        what = f"{name} is the first module whose output differs; everything before agrees"
        return _first("forward", place.path, place.class_name, "output", value, found, relative, what)
    what = "what the recipe's loss passes to the model differs already"
    if place.caller is not None:
        caller = _described(place.caller, place.caller_class)
        what = f"code in the forward of {caller} differs first: what it passes to {name}"
    return _first("forward", place.caller, place.caller_class, f"input of {name}", value, found, relative, what)


def _first_unexpected(evidence: Evidence) -> FirstDifference | None:
    place = next((place for part in evidence.parts for place in part.unexpected), None)
    if place is None:
        return None
    name = _described(place.path, place.class_name)
    found = Found(math.inf, 0.0, problem=f"call {place.call} of the module is only made when split")
    value = Value(shape=(), dtype="")
    what = f"{name} has an {place.kind} that it does not have in one process"
    return _first("forward", place.path, place.class_name, place.kind, value, found, math.inf, what)


def _loss_difference(loss: Loss, tolerance: float) -> FirstDifference | None:
    if loss.relative <= tolerance:
        return None
    value, found = Value(shape=(), dtype="torch.float64"), Found(loss.max_abs, abs(loss.one_process))
    what = "the recipe's loss differs, though everything that goes into and comes out of the modules agrees"
    return _first("loss", None, "", "loss", value, found, loss.relative, what)


def _first_backward(evidence: Evidence, tolerance: float) -> FirstDifference | None:
    peers = middle(f.scale for part in evidence.parts for f in part.backward.values() if f.floating)
    candidates = [
        (part.values[number], number, part, found)
        for part in evidence.parts
        for number, found in part.backward.items()
        if found.relative(peers) > tolerance
    ]
    if not candidates:
        return None
    value, number, part, found = min(candidates, key=lambda candidate: _order(candidate[0]))
    places = [place for place, value in part.places if value == number]
    made = [place for place in places if place.kind == "output"]  # innermost first
    passed_on = {place[1:3] for place in places if place.kind == "output"}  # by modules that return their input
    users = _innermost([place for place in places if place.kind == "input" and place[1:3] not in passed_on])
    at = (made or users)[0]
    tensor = f"gradient at the {at.kind} of {_described(at.path, at.class_name)}"
    if users:
        module, class_name = users[0].path, users[0].class_name
        work = " or ".join(_described(user.path, user.class_name) for user in users)
    elif made and made[-1].caller is not None:
        module, class_name = made[-1].caller, made[-1].caller_class
        work = f"the code in the forward of {_described(module, class_name)} behind it"
    else:
        module, class_name, work = None, "", "the recipe's loss"
    what = f"in backward, {tensor} is the first that differs: look at the backward of {work}"
    return _first("backward", module, class_name, tensor, value, found, found.relative(peers), what)


def _order(value: Value) -> float:
    """When its gradient was complete, counted in backward; those that have none come last."""
    return math.inf if value.gradient_order is None else value.gradient_order


def _first_named(
    phase: str, differences: Sequence[Difference], named: Named, classes: Mapping[str, str], tolerance: float
) -> FirstDifference | None:
    worst = next((d for d in differences if d.relative > tolerance), None)
    if worst is None:
        return None
    module, _, leaf = worst.name.rpartition(".")
    class_name = classes.get(module, "")
    kind = "gradient of parameter" if phase == "parameter" else "buffer"
    agree = "every gradient that flows through the modules agrees" if phase == "parameter" else "all outputs agree"
    what = f"the {kind} '{leaf}' of {_described(module, class_name)} differs, though {agree}"
    value = Value(shape=named.shapes[worst.name], dtype=named.dtypes[worst.name])
    return _first(phase, module, class_name, f"{kind} '{leaf}'", value, named.found[worst.name], worst.relative, what)


def _first(
    phase: str, module: str | None, class_name: str, tensor: str, value: Value, found: Found, relative: float, what: str
) -> FirstDifference:
    if found.problem:
        how = found.problem
    else:
        here = f", {found.local_shape} on rank {found.rank}" if found.local_shape not in ((), value.shape) else ""
        of = f"shape {value.shape}{here}; " if value.shape else ""
        how = f"{of}off by {found.max_abs:.2g}, {relative:.2g} of the largest value"
    message = f"{what} ({how})"
    if value.dtype in NARROW and relative < _ROUNDING:
        message += (
            f"; it is computed in {value.dtype.removeprefix('torch.')}, whose rounding may be all of it: "
            "compute it in the dtype of its input, or use a wider --tolerance"
        )
    return FirstDifference(
        phase=phase,
        module=module,
        class_name=class_name,
        tensor=tensor,
        shape=value.shape,
        local_shape=found.local_shape,
        rank=found.rank,
        dtype=value.dtype.removeprefix("torch."),
        max_abs=found.max_abs,
        relative=relative,
        message=message,
    )


def _described(path: str, class_name: str) -> str:
    return f"'{path}' ({class_name})" if path else f"the model itself ({class_name})"


def _innermost(places: Sequence[Place]) -> list[Place]:
    """The places of modules that contain none of the other places' modules; each module once."""
    inner = {
        place.path: place
        for place in places
        if not any(other.path != place.path and _inside(other.path, place.path) for other in places)
    }
    return list(inner.values())


def _inside(path: str, module: str) -> bool:
    return module == "" or path.startswith(f"{module}.")
