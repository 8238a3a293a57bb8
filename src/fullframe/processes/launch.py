"""A job on this machine: its ranks are started, told to stop, and started again when the machine failed them.

Not by torchrun's agent, which starts a job again whatever ended it, an error in the recipe too, and raises in the
middle of its own work when it is told to stop. Ranks that torchrun starts again resume all the same.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fullframe.processes.exit_reasons import AGAIN, RESTART_REASON, is_programs_fault
from fullframe.processes.rank_processes import Death, Ranks
from fullframe.processes.stop_signals import STOP_SIGNALS, StopSignals

_POLL_SECONDS = 0.1
_CONSEQUENCE_SECONDS = 3.0  # once a rank has failed, the others may say what they saw of it


def launch(
    ranks: int,
    arguments: Sequence[str],
    *,
    restarts: int = 0,
    progress: Callable[[], int] = lambda: 0,
    patience_seconds: float = 60.0,
) -> int:
    """Run `python *arguments` as `ranks` ranks and wait; the exit code of the job.

    Rank 0 shares this terminal; the others' output is shown only when one of them dies without naming an error.
    Ranks that died of a signal, lost another or asked for it are all started again, at most `restarts` times in a row
    without `progress()` (the last step done) having grown; an error is final, and printed on stderr. Ctrl-C, SIGTERM,
    SIGUSR1 and SIGHUP are handed on to the ranks, which end by themselves; a second Ctrl-C, or `patience_seconds`,
    ends them at once.
    """
    # Without this every rank would start a thread for every core of the machine.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // ranks, 1)))
    # The ranks must walk through a set of names in one order.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    reason, furthest, attempt, in_vain = "", progress(), 0, 0
    # What this process ignores, as nohup has it ignore SIGHUP, the ranks need not hear of.
    numbers = [n for n in (*STOP_SIGNALS, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    stop = StopSignals(numbers, interrupts=False)
    with tempfile.TemporaryDirectory(prefix="fullframe-") as folder, stop:
        while True:
            environment = {
                "TORCHELASTIC_RUN_ID": Path(folder).name,
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                RESTART_REASON: reason,
            }
            with Ranks(ranks, arguments, Path(folder) / str(attempt), environment) as processes:
                deaths = _wait(processes, stop, patience_seconds)
                codes = processes.codes()
            if stop.number:
                return _stopped(codes, deaths, stop.number)
            if not deaths:
                return 0
            cause = min(deaths, key=_precedence)
            code = cause.code if cause.code > 0 else 1
            is_final = (cause.code >= 0 and cause.code != AGAIN) or _was_aborted_by_its_program(cause)
            if is_final or not restarts:
                _explain(cause)
                return code
            reached = progress()
            in_vain = 0 if reached > furthest or cause.report.get("changed") else in_vain + 1
            furthest = max(furthest, reached)
            if in_vain > restarts:
                _explain(cause)
                hint = "; unless someone killed it, host memory ran out" if cause.code == -signal.SIGKILL else ""
                _say(f"error: {in_vain} attempts in a row got no further than step {furthest}; giving up{hint}")
                return code
            reason = str(cause)
            _restore_cursor()
            _say(f"warning: {reason}; all ranks start again from the last checkpoint (step {reached} was done)")
            _say(cause.last_words)
            attempt += 1


def _wait(ranks: Ranks, stop: StopSignals, patience_seconds: float) -> list[Death]:
    """The ranks that failed by themselves, once all have ended or need not be waited for."""
    deadline, told = float("inf"), False
    while ranks.running() and time.monotonic() < deadline and not stop.at_once:
        if stop.number and not told:
            told = True
            deadline = min(deadline, time.monotonic() + patience_seconds)
            ranks.send(signal.SIGTERM if stop.number == signal.SIGHUP else stop.number)
        if ranks.deaths():
            deadline = min(deadline, time.monotonic() + _CONSEQUENCE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return ranks.deaths()


def _stopped(codes: Sequence[int | None], deaths: Sequence[Death], number: int) -> int:
    """The exit code of a job that was asked to stop: 0 or 130 where every rank ended as it should."""
    if set(codes) in ({0}, {130}):
        return codes[0] or 0
    errors = [death for death in deaths if death.report]
    if errors:
        _explain(min(errors, key=_precedence))
    _restore_cursor()
    _say("stopped at once; what was done since the last checkpoint is lost")
    return 128 + number


def _explain(death: Death) -> None:
    if death.report:
        _say(death.report["py_callstack"])
        return
    _restore_cursor()
    _say(f"error: {death}")
    _say(death.last_words)


def _precedence(death: Death) -> tuple[int, float]:
    """Sorts deaths so that the cause comes first: ranks lose their connection to one that failed.

    Torch's thread for NCCL aborts a rank that lost another, perhaps before that one's error is known here.
    """
    if death.code == 2:
        kind = 0
    elif death.code < 0 and death.code not in (-signal.SIGTERM, -signal.SIGABRT):
        kind = 1
    elif death.code == -signal.SIGABRT or (death.report and not death.report.get("consequence")):
        kind = 2
    else:
        kind = 3
    return kind, death.seconds


def _was_aborted_by_its_program(death: Death) -> bool:
    """Torch's thread for NCCL may meet what a kernel complains of before Python does, and abort the process."""
    return death.code == -signal.SIGABRT and is_programs_fault(death.last_words)


def _say(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


def _restore_cursor() -> None:
    """Show the terminal's cursor, which a rank hides while it draws a progress bar."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
