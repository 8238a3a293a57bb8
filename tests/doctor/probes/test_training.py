"""Every planted fault is found and named, by its code and no other; sound loops give nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fullframe.doctor.judgement.judge import judge
from fullframe.doctor.probes import kinds
from fullframe.doctor.probes.notes import End, Event, Failure, Notes, Update
from fullframe.doctor.probes.training import Enough, Probes
from tests.doctor import planted
from tests.rank_group import rank_group


def watched(loop: Callable[[], None], steps: int) -> list[Event]:
    events: list[Event] = []
    probes = Probes(events.append, rank=dist.get_rank(), started=dist.get_world_size(), steps=steps)
    try:
        with probes.attached():
            loop()
    except Enough:
        events.append(End(reason="enough"))
    except RuntimeError as error:
        events.append(Failure(kind=type(error).__name__, text=str(error), trace=""))
    return events


def notes_of(loop: Callable[[], None], steps: int) -> list[Notes]:
    return [Notes(rank, events) for rank, events in enumerate(rank_group(2).run(watched, loop, steps))]


@pytest.mark.parametrize(("loop", "code"), planted.FAULTS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_fault_is_named(loop: Callable[[], None], code: str) -> None:
    notes = notes_of(loop, 5 if loop in planted.GROWING else planted.STEPS)
    found = judge(notes, at_full_size=loop is planted.slow_loader)  # these are too small to wait for their loader
    assert [finding.code for finding in found] == [code]


@pytest.mark.parametrize("loop", planted.SOUND, ids=lambda loop: loop.__name__)
def test_a_sound_loop_gives_nothing(loop: Callable[[], None]) -> None:
    notes = notes_of(loop, 5)
    assert judge(notes, at_full_size=False) == []
    assert all(rank.of(Update) for rank in notes)


def numbers_of(loop: Callable[[], None], probed: bool) -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen: list[float] = []

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append(sum(float(p.double().sum()) for group in optimizer.param_groups for p in group["params"]))
        if len(seen) == 3:
            raise Enough

    handle = register_optimizer_step_post_hook(look)
    try:
        if probed:
            watched(loop, 9)
        else:
            loop()
    except Enough:
        pass
    finally:
        handle.remove()
    return seen


def test_probes_change_no_number() -> None:
    plain = rank_group(2).run(numbers_of, planted.sound, False)
    assert rank_group(2).run(numbers_of, planted.sound, True) == plain
    assert len(plain[0]) == 3


def test_no_two_kinds_have_one_code() -> None:
    codes = [kind.code for kind in kinds.KINDS]
    assert len(set(codes)) == len(codes) >= 20
    assert set(planted.FAULTS.values()) <= set(codes)
