"""Whether a GradScaler is used as it must be: scale, unscale, clip, step, update, in this order."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from fullframe.doctor.finding import Finding
from fullframe.doctor.probes import kinds
from fullframe.doctor.probes.notes import Notes, Scaling
from fullframe.wording import plural

_FALLS = 4  # in a row


def judged_scaling(notes: Sequence[Notes]) -> Iterator[Finding]:
    """Findings about loss scaling."""
    for rank in notes:
        events = rank.of(Scaling)
        if any(event.action == "scale" for event in events):
            yield from _order(events)
            yield from _updates(events)
            yield from _falling(events)


def _order(events: Sequence[Scaling]) -> Iterator[Finding]:
    is_scaled = False  # the gradients are
    for event in events:
        if event.action == "scale":
            is_scaled = True
        elif event.action in ("unscale", "step"):
            is_scaled = False
        elif event.action == "bare":
            yield kinds.SCALED_STEP.found(
                f"optimizer.step() is called by itself after {event.at_update} updates, while losses are scaled"
            )
        elif event.action == "clip" and is_scaled:
            yield kinds.SCALED_CLIP.found("gradients are clipped after scaler.scale() and before scaler.unscale_()")


def _updates(events: Sequence[Scaling]) -> Iterator[Finding]:
    kept = [event.action for event in events if event.action in ("scale", "step", "update")]
    steps, updates = kept.count("step"), kept.count("update")
    if steps > 1 and not updates:
        yield kinds.SCALER_UPDATES.found(f"scaler.step() was called {steps} times and scaler.update() never")
        return
    runs = [(action, len(list(run))) for action, run in groupby(a for a in kept if a != "step")]
    several = [count for action, count in runs if action == "update" and count > 1]
    if several:
        yield kinds.SCALER_UPDATES.found(
            f"scaler.update() is called {several[0]} times in an iteration, {plural(len(several), 'time')}"
        )


def _falling(events: Sequence[Scaling]) -> Iterator[Finding]:
    scales = [event.scale for event in events if event.action == "update"]  # one of all optimizers' steps
    for falls, run in groupby(pairwise(scales), lambda pair: pair[1] < pair[0]):
        fallen = list(run)
        if falls and len(fallen) >= _FALLS:
            yield kinds.SCALE_FALLS.found(
                f"the scale fell from {fallen[0][0]:g} to {fallen[-1][1]:g} in {len(fallen)} steps, all of them skipped"
            )
            return
