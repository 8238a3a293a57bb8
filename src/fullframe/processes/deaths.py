"""What ended the ranks, and what is said of it: the cause among many deaths, and whether another attempt may help."""

import signal
import sys
from collections.abc import Callable, Sequence

from fullframe.processes.exit_reasons import AGAIN, STOPPED, is_programs_fault
from fullframe.processes.rank_processes import Death

CONSEQUENCE_SECONDS = 3.0  # once a rank has failed, the others may say what they saw of it


def cause_of(deaths: Sequence[Death]) -> Death:
    """The death that led to the others: ranks lose their connection to one that failed."""
    return min(deaths, key=_precedence)


def is_consequence(death: Death) -> bool:
    """Whether it says no more than that another rank is gone."""
    return _precedence(death)[0] == _CONSEQUENCE


def is_final(death: Death) -> bool:
    """Whether another attempt would meet the same end."""
    return (death.code >= 0 and death.code != AGAIN) or _was_aborted_by_its_program(death)


def exit_code(death: Death) -> int:
    """The exit code of a job that ends with it."""
    return death.code if death.code > 0 else 1


def gave_up(death: Death | None, attempts: int, step: int) -> str:
    """What is said when so many attempts in a row got no further than `step`."""
    killed = death is not None and death.code == -signal.SIGKILL
    hint = "; unless someone killed it, host memory ran out" if killed else ""
    return f"error: {attempts} attempts in a row got no further than step {step}; giving up{hint}"


def stopped(
    codes: Sequence[int | None],
    deaths: Sequence[Death],
    number: int,
    on_failure: Callable[[str], None] = lambda reason: None,
) -> int:
    """The exit code of a job that was asked to stop: the ranks' where every one ended as it should."""
    if set(codes) in ({0}, {130}, {STOPPED}):
        return codes[0] or 0
    errors = [death for death in deaths if death.report]
    if errors:
        explain(cause_of(errors), on_failure)
    else:
        on_failure(f"stopped at once by {signal.Signals(number).name}")
    restore_cursor()
    say("stopped at once, without writing a checkpoint")
    return 128 + number


def explain(death: Death, on_failure: Callable[[str], None]) -> None:
    """Say it on stderr: the rank's own account, or its last words; and to `on_failure` in a line."""
    on_failure(str(death))
    if death.report:
        say(death.report["py_callstack"])
        return
    restore_cursor()
    say(f"error: {death}")
    say(death.last_words)


def say(text: str) -> None:
    """A line on stderr; nothing for ""."""
    if text:
        print(text, file=sys.stderr, flush=True)


def restore_cursor() -> None:
    """Show the terminal's cursor, which a rank hides while it draws a progress bar."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


_CONSEQUENCE = 4


def _precedence(death: Death) -> tuple[int, float]:
    """Sorts deaths so that the cause comes first: ranks lose their connection to one that failed.

    Torch's thread for NCCL aborts a rank that lost another, perhaps before that one's error is known here. A rank that
    left without a word, as a library's `exit(1)` ends it, has not lost another: that is reported.
    """
    if death.code == 2:
        kind = 0
    elif death.code < 0 and death.code not in (-signal.SIGTERM, -signal.SIGABRT):
        kind = 1
    elif death.code == -signal.SIGABRT or (death.report and not death.report.get("consequence")):
        kind = 2
    elif death.code >= 0 and not death.report:
        kind = 3
    else:
        kind = _CONSEQUENCE
    return kind, death.seconds


def _was_aborted_by_its_program(death: Death) -> bool:
    """Torch's thread for NCCL may meet what a kernel complains of before Python does, and abort the process."""
    return death.code == -signal.SIGABRT and is_programs_fault(death.last_words)
