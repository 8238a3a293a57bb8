"""Which of many deaths is the cause, whether another attempt may help, and what is said."""

import signal

import pytest

from fullframe.processes.deaths import cause_of, exit_code, explain, gave_up, is_consequence, is_final, stopped
from fullframe.processes.exit_reasons import AGAIN, STOPPED
from fullframe.processes.rank_processes import Death

LOST = {"summary": "lost rank 1", "py_callstack": "lost rank 1", "consequence": True}
KILLED = Death(1, -signal.SIGKILL, 5.0, {}, "last words")
FOLLOWED = Death(0, AGAIN, 4.0, LOST, "")
OF_USER = Death(2, 2, 9.0, {"summary": "error: wrong", "py_callstack": "error: wrong"}, "")
LEFT = Death(2, 0, 9.0, {}, "last words")
SILENT = Death(1, 1, 9.0, {}, "last words")
FAILED = Death(2, 1, 9.0, {"summary": "KeyError: 3", "py_callstack": "KeyError: 3"}, "")
ENDED = Death(0, -signal.SIGTERM, 1.0, {}, "")
ABORTED = Death(3, -signal.SIGABRT, 1.0, {}, "CUDA error: device-side assert triggered")


def test_the_cause_is_found_among_what_it_led_to() -> None:
    assert cause_of([FOLLOWED, KILLED]) is KILLED
    assert cause_of([FOLLOWED, KILLED, OF_USER]) is OF_USER
    assert cause_of([FOLLOWED, LEFT]) is LEFT and cause_of([LEFT, KILLED]) is KILLED
    assert cause_of([FOLLOWED, SILENT]) is SILENT, "it ended without a word, and the other reports that it did"
    assert cause_of([FOLLOWED, FAILED]) is FAILED and cause_of([SILENT, FAILED, KILLED]) is KILLED
    assert cause_of([ABORTED, KILLED]) is KILLED and cause_of([ENDED, ABORTED, SILENT]) is ABORTED
    assert cause_of([ENDED, SILENT]) is SILENT, "SIGTERM is what ends a rank that was told to"
    told = [FOLLOWED, KILLED, FAILED, SILENT, ABORTED, LEFT, ENDED]
    assert [death for death in told if is_consequence(death)] == [FOLLOWED, ENDED]


@pytest.mark.parametrize(
    ("death", "final", "code"),
    [
        (KILLED, False, 1),
        (FOLLOWED, False, 75),
        (OF_USER, True, 2),
        (ABORTED, True, 1),
        (LEFT, True, 1),
        (SILENT, True, 1),
        (Death(3, -signal.SIGABRT, 1.0, {}, "terminate called"), False, 1),
        (Death(3, -signal.SIGSEGV, 1.0, {}, ABORTED.last_words), False, 1),
    ],
)
def test_what_another_attempt_would_meet_again_is_final(death: Death, final: bool, code: int) -> None:
    assert is_final(death) is final
    assert exit_code(death) == code


def test_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    explain(KILLED, told.append)
    explain(OF_USER, told.append)
    assert capsys.readouterr().err == "error: rank 1 died (SIGKILL)\nlast words\nerror: wrong\n"
    assert told == ["rank 1 died (SIGKILL)", "rank 2: error: wrong"]
    assert gave_up(KILLED, 3, 7).endswith("unless someone killed it, host memory ran out")
    assert gave_up(None, 3, 7) == "error: 3 attempts in a row got no further than step 7; giving up"


def test_a_job_that_was_asked_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert [stopped([code, code], [], signal.SIGTERM) for code in (0, 130, STOPPED)] == [0, 130, STOPPED]
    assert capsys.readouterr().err == ""
    told: list[str] = []
    assert stopped([STOPPED, -9], [KILLED], signal.SIGUSR1, told.append) == 128 + signal.SIGUSR1
    assert "stopped at once" in capsys.readouterr().err and told == ["stopped at once by SIGUSR1"]
    assert stopped([STOPPED, 1], [FAILED], signal.SIGTERM, told.append) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.startswith("KeyError: 3\n") and told[1:] == ["rank 2: KeyError: 3"]
    assert stopped([0, STOPPED], [], signal.SIGTERM) == 128 + signal.SIGTERM, "some had written nothing"
