"""Whether every rank's model learns: gradients that reach it, updates that change it, graphs that are let go."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite, nan

from fullframe.doctor.finding import Finding
from fullframe.doctor.probes import kinds
from fullframe.doctor.probes.notes import (
    Backward,
    Job,
    Notes,
    Oddity,
    Repeated,
    Scaling,
    Sketch,
    Untrained,
    Update,
    Weights,
)
from fullframe.wording import plural, some

_PART = re.compile(r"(\[\d+:\d+\])+$")  # which one of a sharded parameter a rank holds
_NOT_THERE = Sketch(0, nan, ())
_FEWEST = 4  # steps that show growth
_ODDITIES = {
    "statistics of evaluation": (kinds.STATISTICS_OF_EVALUATION, "{text} runs without gradients in training mode"),
    "evaluation keeps a graph": (kinds.EVALUATION_KEEPS_GRAPH, "{text} runs in eval mode with grad mode on"),
    "nothing updated": (kinds.NOT_FINITE, "{text}, so nothing was updated"),
    "statistics of a frozen part": (
        kinds.FROZEN_STATISTICS,
        "{text} with frozen weights took statistics of the batches",
    ),
    "pixels as bytes": (kinds.PIXELS_AS_BYTES, "{where} is given {text}"),
    "few values in a batch norm": (kinds.FEW_VALUES, "{where} takes its statistics of {text} values a channel"),
}


def judged_learning(notes: Sequence[Notes]) -> Iterator[Finding]:
    """Findings of one rank; the first rank that has one of a kind speaks for all."""
    for rank in notes:
        yield from _gradients(rank)
        yield from _optimizer(rank)
        yield from _graphs(rank)
        yield from _modes(rank)
        yield from _repeated(rank)
    yield from _zero_gradients(notes)


def _zero_gradients(notes: Sequence[Notes]) -> Iterator[Finding]:
    """Of parameters of which no rank's part ever gets another; a rank may hold no row of a sharded one."""
    steps = [updates for rank in notes for updates in _steps(rank).values() if len(updates) > 1]
    zero, others = dict[str, int](), set[str]()
    for updates in steps:
        for name in dict.fromkeys(name for update in updates for name in update.gradients):
            parts = [update.gradients.get(name, _NOT_THERE) for update in updates]
            if any(part.norm != 0.0 for part in parts):
                others.add(_PART.sub("", name))
            elif any(part.sample for part in parts):
                zero.setdefault(_PART.sub("", name), len(updates))
    if found := sorted(zero.keys() - others):
        yield kinds.ZERO_GRADIENT.found(
            f"{plural(len(found), 'parameter')} had a gradient of zeros in {plural(zero[found[0]], 'step')}: "
            f"{some(found)}"
        )


def _steps(rank: Notes) -> dict[int, list[Update]]:
    found: dict[int, list[Update]] = {}
    for update in rank.of(Update):
        found.setdefault(update.optimizer, []).append(update)
    return found


def _gradients(rank: Notes) -> Iterator[Finding]:
    if any(not event.attached for event in rank.of(Backward)):
        yield kinds.NO_GRADIENT.found("backward is called on a loss without a graph", evidence="loss.grad_fn is None")
    job = rank.one(Job)
    sought = job is not None and job.unused_are_sought
    for updates in _steps(rank).values():
        missing = set[str].intersection(*(set(update.missing) for update in updates))
        got = {name for update in updates for name in update.gradients}
        if missing and not got:
            yield kinds.NO_GRADIENT.found(
                f"no parameter got a gradient in {plural(len(updates), 'step')}",
                evidence="the loss does not depend on what is trained",
            )
        # Without those that the model does not have.
        missing = {_PART.sub("", name) for name in missing if not name.startswith("optimizer")}
        if missing and got and not sought:
            yield kinds.UNUSED.found(
                f"{plural(len(missing), 'trainable parameter')} had no gradient in {plural(len(updates), 'step')}: "
                f"{some(sorted(missing))}"
            )
        if sought and not any(update.missing for update in updates):
            yield kinds.SOUGHT_IN_VAIN.found(
                f"all {plural(len(got), 'parameter')} had a gradient in each of {plural(len(updates), 'step')}"
            )
    yield from _not_finite(rank)


def _not_finite(rank: Notes) -> Iterator[Finding]:
    for number, event in enumerate(rank.of(Backward), start=1):
        if not event.scaled and not isfinite(event.loss):
            yield kinds.NOT_FINITE.found(f"the loss of backward {number} is {event.loss} on rank {rank.rank}")
            return
    for update in rank.of(Update):
        broken = [name for name, sketch in update.gradients.items() if not isfinite(sketch.norm)]
        if broken:
            yield kinds.NOT_FINITE.found(
                f"in step {update.number} {plural(len(broken), 'gradient')} of {len(update.gradients)} "
                f"{'is' if len(broken) == 1 else 'are'} not finite on rank {rank.rank}: {some(broken)}"
            )
            return


def _optimizer(rank: Notes) -> Iterator[Finding]:
    weights, untrained = rank.one(Weights), rank.one(Untrained)
    if weights is not None and weights.frozen_in_optimizer:
        frozen = weights.frozen_in_optimizer
        yield kinds.FROZEN_IN_OPTIMIZER.found(
            f"the optimizer holds {plural(len(frozen), 'parameter')} with requires_grad=False: {some(frozen)}"
        )
    if untrained is not None and untrained.names:
        yield kinds.IN_NO_OPTIMIZER.found(
            f"{plural(len(untrained.names), 'parameter')} get gradients and are in no optimizer: "
            f"{some(untrained.names)}",
            evidence=_strangers(weights),
        )
    for updates in _steps(rank).values():
        stale = {name for update in updates[1:] for name in update.stale}
        if stale:
            yield kinds.STALE_GRADIENT.found(
                f"the gradients of {plural(len(stale), 'parameter')} were still there when the next backward began: "
                f"{some(sorted(stale))}"
            )
        yield from _unchanged(updates)


def _strangers(weights: Weights | None) -> str:
    if weights is None or not weights.unknown_to_model:
        return ""
    return f"the optimizer holds {plural(weights.unknown_to_model, 'parameter')} that the model does not have"


def _unchanged(updates: Sequence[Update]) -> Iterator[Finding]:
    if len(updates) < 2:
        return
    still = set[str].intersection(*(set(update.unchanged) for update in updates))
    held = {name for update in updates for name in update.parameters}
    rates = {rate for update in updates for rate in update.rates}
    if still and 2 * len(still) >= len(held):  # a bias before a norm may well get updates below its rounding
        yield kinds.NEVER_CHANGES.found(
            f"{len(still)} of {plural(len(held), 'parameter')} with gradients are the same to the bit after "
            f"{plural(len(updates), 'step')}: {some(sorted(still))}",
            evidence=f"learning rates {', '.join(f'{rate:g}' for rate in sorted(rates))}",
        )


def _graphs(rank: Notes) -> Iterator[Finding]:
    nodes = [event.nodes for event in rank.of(Backward)]
    if len(nodes) >= _FEWEST and all(b > a for a, b in pairwise(nodes)):
        yield kinds.GRAPH_GROWS.found(
            f"backward walks {nodes[0]} nodes the first time and {nodes[-1]} the {len(nodes)}th",
            evidence=f"nodes: {', '.join(map(str, nodes))}",
        )
    for updates in _steps(rank).values():
        alive = [update.alive for update in updates[1:]]
        if len(alive) >= _FEWEST - 1 and all(b > a for a, b in pairwise(alive)):
            holder = next((update.held_by for update in reversed(updates) if update.held_by), "")
            yield kinds.GRAPH_KEPT.found(
                f"{(alive[-1] - alive[0]) // (len(alive) - 1)} more graph nodes are alive after each step"
                + (f", held by {holder}" if holder else ""),
                evidence=f"alive after each step: {', '.join(map(str, alive))}",
            )


def _modes(rank: Notes) -> Iterator[Finding]:
    passes = rank.of(Backward)
    evaluating = [event for event in passes if event.evaluating]
    if evaluating and len(evaluating) >= len(passes) - 1:
        yield kinds.TRAINS_IN_EVAL_MODE.found(
            f"{some(evaluating[0].evaluating)} is in eval mode in {len(evaluating)} of {len(passes)} backward passes"
        )
    counted = dict.fromkeys(name for event in passes for name in event.modules)
    if counted:
        yield kinds.COUNTED_TWICE.found(
            f"{plural(len(counted), 'batch norm')} saw the batch again in backward: {some(counted)}"
        )
    for oddity in rank.of(Oddity):
        kind, text = _ODDITIES[oddity.kind]
        yield kind.found(text.format(text=oddity.text, where=oddity.where), evidence=oddity.where)
    yield from _sent_too_often(rank)


def _sent_too_often(rank: Notes) -> Iterator[Finding]:
    job = rank.one(Job)
    if job is None or job.ranks == 1 or "DistributedDataParallel" not in job.frameworks:
        return
    passes: list[list[int]] = [[]]  # of each step: how many send, of those that add to the same gradients
    for event in rank.events:
        if isinstance(event, Backward) and event.adds and passes[-1]:
            passes[-1][-1] += event.synchronizes
        elif isinstance(event, Backward):  # else a closure's next trial, say, or another model's
            passes[-1].append(int(event.synchronizes))
        elif passes[-1] and (isinstance(event, Update) or (isinstance(event, Scaling) and event.action == "step")):
            passes.append([])  # once, where a scaler steps and then its optimizer, or several optimizers do
    several = [max(each) for each in passes[:-1]]
    if several and min(several) > 1:
        yield kinds.SENT_EVERY_MICROBATCH.found(
            f"gradients are averaged over the ranks {several[0]} times a step, in each backward"
        )


def _repeated(rank: Notes) -> Iterator[Finding]:
    for event in rank.of(Repeated):
        if event.contents is not None and event.contents[0] != event.contents[1]:
            yield kinds.DATA_NOT_REPEATABLE.found(
                "the first batch was read twice from the same seed, with different contents"
            )
            return
        for name, value in event.first.items():
            if str(value) != str(event.second[name]):  # text: NaN equals NaN
                yield kinds.NOT_REPEATABLE.found(
                    f"the first step was taken twice from the same seed: {name.replace('_', ' ')} {value!r}, then "
                    f"{event.second[name]!r}"
                )
                return
