"""What lived at the peak and of what kind, on traces drawn by hand."""

from fullframe.simulation.memory.account import account
from fullframe.simulation.memory.trace import Block, Phase, Trace
from fullframe.simulation.prediction import Moment


def block(bytes: int, phase: Phase, born: int, died: int | None, module: str = "", **facts: object) -> Block:
    return Block(bytes, (bytes // 4,), "float32", module, phase, born, died, **facts)  # type: ignore[arg-type]


def trace(*blocks: Block, backward: range | None = None, ends: tuple[int, ...] = ()) -> Trace:
    count = 1 + max(max(b.born, b.died or 0) for b in blocks)
    events = {b.born: b for b in blocks} | {b.died: b for b in blocks if b.died is not None}
    assert sorted(events) == list(range(count)), "each event is one birth or one end"
    backwards = [] if backward is None else [backward]
    return Trace([events[number] for number in range(count)], backwards, list(ends))


#   number     0    1    2    3    4    5    6    7    8    9
#   weight     [--------------------------------------------    build, marked
#   kept            [-----------------------]                   forward, lives into backward
#   gone                 [----]                                 forward, dies before it
#   gradient                       [----]                       backward, dies within the step
#   again                                    (6 is kept's end)
#   state                                         [--------     update, lives on
#   late                                               [----]
STEP = trace(
    block(100, "build", 0, None, mark="parameter"),
    block(40, "forward", 1, 6, "a"),
    block(80, "forward", 2, 3, "b"),
    block(20, "backward", 4, 5, "a"),
    block(60, "update", 7, None),
    block(8, "update", 8, 9),
    backward=range(4, 7),
    ends=(10,),
)


def test_kinds_follow_from_lives() -> None:
    found = account(STEP)
    assert found.peak_bytes == 100 + 40 + 80
    assert found.bytes == {"parameter": 100, "temporary": 80, "activation": 40}
    assert found.moment == Moment(step=1, phase="forward", module="b")
    assert [(t.bytes, t.category, t.module) for t in found.largest] == [
        (100, "parameter", ""),
        (80, "temporary", "b"),
        (40, "activation", "a"),
    ]
    assert found.modules == {"a": 40}


def test_what_stays_after_the_update_is_the_optimizer_s() -> None:
    found = account(
        trace(block(10, "update", 0, 1), block(60, "update", 2, None), block(50, "update", 3, 4), ends=(5,))
    )
    assert found.bytes == {"optimizer": 60, "temporary": 50}
    assert found.moment.phase == "update"


def test_what_a_recompute_makes_lives_until_its_module_is_done() -> None:
    kept, gone = block(30, "recompute", 1, 4, "r", region_end=3), block(20, "recompute", 2, 3, "r", region_end=4)
    found = account(trace(block(5, "build", 0, None), kept, gone, backward=range(1, 5), ends=(5,)))
    assert found.bytes == {"activation": 30, "temporary": 20, "parameter": 5}
    assert found.moment == Moment(step=1, phase="recompute", module="r")
    assert found.modules == {"r": 30}


def test_forward_without_a_backward_is_the_update() -> None:
    found = account(trace(block(5, "build", 0, None), block(30, "forward", 1, 2), ends=(3,)))
    assert found.moment.phase == "update"
    assert account(trace(block(5, "build", 0, None))).moment == Moment(step=0, phase="build", module="")
