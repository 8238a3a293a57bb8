"""Events and the frames around them."""

from fullframe.doctor.lint.program import FrameKind
from tests.doctor.lint.test_values import run

SOURCE = """
def inner(x):
    with lock:
        work(x)

for x in xs:
    if x:
        inner(x)
    done()
"""


def test_a_call_lies_in_the_frames_of_its_caller_too() -> None:
    program = run(SOURCE)
    (work,) = program.calls("work")
    kinds = [frame.kind for frame in work.frame.enclosing()]
    assert kinds == [FrameKind.WITH, FrameKind.FUNCTION, FrameKind.IF, FrameKind.LOOP, FrameKind.MODULE]
    loop = work.frame.innermost(FrameKind.LOOP)
    assert loop is not None and work.frame.inside(loop)
    assert [f.kind for f in work.frame.up_to(loop)] == kinds[:3]


def test_a_frame_holds_its_own_events_and_no_others() -> None:
    program = run(SOURCE + "work(after)\nafter = 1\n")
    loop = next(f for f in program.frames if f.kind is FrameKind.LOOP)
    assert len(list(program.calls("work"))) == 2
    assert [c.node.lineno for c in program.calls_in(loop, "work", "done")] == [4, 9]
    assert {s.name for s in program.stores_in(loop)} == {"x"}
    assert [e.index for e in program.events_in(loop)] == list(range(loop.start, loop.stop))
