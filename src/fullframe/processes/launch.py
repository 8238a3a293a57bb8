"""A job on this machine: its ranks are started, told to stop, and started again when the machine failed them.

Not by torchrun's agent, which starts a job again whatever ended it, an error in the recipe too, and raises in the
middle of its own work when it is told to stop. Ranks that torchrun starts again resume all the same.
"""

import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fullframe.processes.deaths import (
    CONSEQUENCE_SECONDS,
    cause_of,
    exit_code,
    explain,
    gave_up,
    is_final,
    restore_cursor,
    say,
    stopped,
)
from fullframe.processes.exit_reasons import AGAIN, STOPPED
from fullframe.processes.rank_processes import Death, Ranks, environment_of, set_defaults
from fullframe.processes.stop_signals import StopSignals, for_ranks

_POLL_SECONDS = 0.1


def launch(
    ranks: int,
    arguments: Sequence[str],
    *,
    restarts: int = 0,
    progress: Callable[[], int] = lambda: 0,
    patience_seconds: float = 60.0,
    on_failure: Callable[[str], None] = lambda reason: None,
    before_restart: Callable[[Callable[[], bool]], None] = lambda is_asked_to_stop: None,
) -> int:
    """Run `python *arguments` as `ranks` ranks and wait; the exit code of the job.

    Rank 0 shares this terminal; the others' output is shown only when one of them dies without naming an error.
    Ranks that end with STOPPED have been asked to stop, and that is the job's exit code, too. Those that died of a
    signal, lost another or asked for it are all started again, at most `restarts` times in a row without `progress()`
    (the last step done) having grown; an error is final, and printed on stderr. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP
    are handed on to the ranks, which end by themselves; a second Ctrl-C, or `patience_seconds`, ends them at once.
    `on_failure` is told why, where a rank may not have been able to say it. `before_restart` may take its time, until
    the function it is given says that the job is asked to stop.
    """
    set_defaults(ranks)
    reason, furthest, attempt, in_vain = "", progress(), 0, 0
    with tempfile.TemporaryDirectory(prefix="fullframe-") as folder, for_ranks() as stop:
        while True:
            environment = environment_of(Path(folder).name, attempt, reason)
            with Ranks(ranks, arguments, Path(folder) / str(attempt), environment) as processes:
                deaths = _wait(processes, stop, patience_seconds)
                codes = processes.codes()
            if stop.number:
                return stopped(codes, deaths, stop.number, on_failure)
            if not deaths:
                return STOPPED if STOPPED in codes else 0
            cause = cause_of(deaths)
            if is_final(cause) or not restarts:
                explain(cause, on_failure)
                return exit_code(cause)
            reached = progress()
            in_vain = 0 if reached > furthest or cause.report.get("changed") else in_vain + 1
            furthest = max(furthest, reached)
            if in_vain > restarts:
                explain(cause, on_failure)
                say(gave_up(cause, in_vain, furthest))
                return AGAIN  # another machine may be sound
            reason = str(cause)
            restore_cursor()
            say(f"warning: {reason}; all ranks start again from the last checkpoint (step {reached} was done)")
            say(cause.last_words)
            before_restart(lambda: bool(stop.number))
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
            deadline = min(deadline, time.monotonic() + CONSEQUENCE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return ranks.deaths()
