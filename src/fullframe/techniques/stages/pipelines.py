"""In which order a stage goes forward and back through microbatches, and when the stages wait for one another.

Three stages, four microbatches a to d, small letters forward, capital ones back, both as long; `.` is a wait:

    GPipe   abcd....ABCD        1F1B   abc..AdB.C.D
            .abcd..ABCD.               .ab.AcBdC.D.
            ..abcdABCD..               ..aAbBcCdD..

Both wait alike; 1F1B holds the graphs of as many microbatches as there are stages at most, GPipe those of all
(Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019).
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]


class Action(NamedTuple):
    """One microbatch, one way through one stage."""

    kind: Kind
    microbatch: int


class Timed(NamedTuple):
    """An action with its place, in seconds since the first began."""

    stage: int
    action: Action
    start: float
    stop: float


Order = Callable[[int, int, int], tuple[Action, ...]]  # of (stage, stages, microbatches)


def gpipe(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """All microbatches forward, then all back."""
    numbers = range(microbatches)
    return (*(Action("forward", n) for n in numbers), *(Action("backward", n) for n in numbers))


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """As many forward as there are stages behind; then one forward, one back; then the rest back."""
    ahead = min(stages - 1 - stage, microbatches)
    actions = [Action("forward", n) for n in range(ahead)]
    for n in range(microbatches - ahead):
        actions += [Action("forward", ahead + n), Action("backward", n)]
    return (*actions, *(Action("backward", n) for n in range(microbatches - ahead, microbatches)))


def with_coming(actions: Sequence[Action]) -> list[tuple[Action, tuple[int, ...]]]:
    """Each action, and of one that goes back the microbatch that goes forward right after it, if there is one.

    The stage before sends that one's state before it waits for the gradient, so it is to be received before the
    gradient is sent: two ranks' messages by NCCL come one after the other, and each would wait for the other's.
    """
    after = [(then.microbatch,) if then.kind == "forward" else () for then in actions[1:]]
    pairs = zip(actions, [*after, ()], strict=True)
    return [(one, coming if one.kind == "backward" else ()) for one, coming in pairs]


def timeline(order: Order, microbatches: int, forward: Sequence[float], backward: Sequence[float]) -> list[Timed]:
    """When each action runs, by the seconds that one microbatch takes on each stage, forward and back."""
    stages = len(forward)
    waiting = [list(order(stage, stages, microbatches)) for stage in range(stages)]
    done: dict[tuple[int, Action], float] = {}
    free = [0.0] * stages
    timed: list[Timed] = []
    while any(waiting):
        before = len(timed)
        for stage, actions in enumerate(waiting):
            while actions:
                action = actions[0]
                other = stage - 1 if action.kind == "forward" else stage + 1
                needs = [(other, action)] if 0 <= other < stages else []
                if action.kind == "backward":
                    needs.append((stage, Action("forward", action.microbatch)))
                if not all(need in done for need in needs):
                    break
                start = max([free[stage], *(done[need] for need in needs)])
                stop = start + (forward if action.kind == "forward" else backward)[stage]
                free[stage] = done[stage, action] = stop
                timed.append(Timed(stage, action, start, stop))
                actions.pop(0)
        assert len(timed) > before, "the stages wait for one another"
    return timed


def bubble(timed: Sequence[Timed]) -> float:
    """The share of the stages' time in which they wait."""
    stages, length = max(each.stage for each in timed) + 1, max(each.stop for each in timed)
    return 1 - sum(each.stop - each.start for each in timed) / (stages * length)
