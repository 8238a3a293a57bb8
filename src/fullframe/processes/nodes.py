"""A job over several machines, each with a launcher like this: what one of them meets, all act on alike.

Machines that fail, or are not heard of, are waited for; where fewer may do, the job goes on without them, and takes
them in again when they are back.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fullframe.processes.background import AskedToStop
from fullframe.processes.deaths import (
    CONSEQUENCE_SECONDS,
    cause_of,
    exit_code,
    explain,
    gave_up,
    is_consequence,
    is_final,
    restore_cursor,
    say,
    stopped,
)
from fullframe.processes.exit_reasons import AGAIN, STOPPED
from fullframe.processes.rank_processes import Death, Ranks, environment_of, set_defaults
from fullframe.processes.rendezvous import News, Nodes, Rendezvous, Round
from fullframe.processes.stop_signals import StopSignals, for_ranks

_POLL_SECONDS = 0.1


def launch_on_nodes(
    nodes: Nodes,
    arguments: Callable[[int], Sequence[str]],
    *,
    restarts: int = 0,
    progress: Callable[[], int] = lambda: 0,
    patience_seconds: float = 60.0,
    on_failure: Callable[[str], None] = lambda reason: None,
) -> int:
    """Run `python *arguments(machines)` as this machine's ranks and wait; the exit code of the job, alike on all.

    Every machine calls it. As `launch` does: deaths of ranks start those of all machines again, errors are final,
    signals are handed on. So does a machine that is silent; one that comes later is taken in after a checkpoint.

    Raises StartAgain, RunError or MeshError as `Rendezvous.join` does. `on_failure` is told why a job ends,
    where a rank may not have been able to say it.
    """
    reason, furthest, attempt, in_vain, leader = "", progress(), 0, 0, 0
    set_defaults(nodes.processes)
    with (
        tempfile.TemporaryDirectory(prefix="fullframe-") as folder,
        for_ranks() as asked,
        Rendezvous(nodes) as rendezvous,
    ):
        while True:
            try:
                met = rendezvous.join(lambda: asked.number)
            except AskedToStop:
                rendezvous.close()
                return 130 if asked.number == signal.SIGINT else STOPPED
            if met.leader.node != leader:
                leader = met.leader.node
                say(f"node {leader} leads now, at {met.leader.address}")
            environment = environment_of(Path(folder).name, attempt, reason)
            if met.interface:
                environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", met.interface)
            here = Path(folder) / str(attempt)
            with Ranks(nodes.processes, arguments(met.place.nodes), here, environment, met.place) as processes:
                news, deaths = _Attempt(processes, met, asked, patience_seconds).outcome()
                codes = processes.codes()
            met.end()
            if news is None or news.kind in ("stop", "final") or (news.kind != "grow" and not restarts):
                rendezvous.close()
                return _ended(nodes, codes, deaths, asked, news, on_failure)
            reached = progress()
            in_vain = 0 if reached > furthest or news.changed else in_vain + 1
            furthest, reason = max(furthest, reached), news.text
            restore_cursor()
            if in_vain > restarts:
                rendezvous.close()
                on_failure(news.text)
                say(f"error: {news.text}")
                say(gave_up(cause_of(deaths) if deaths else None, in_vain, furthest))
                return news.code
            say(f"warning: {news.text}; all ranks start again from the last checkpoint (step {reached} was done)")
            if deaths and news.node == nodes.rank:
                say(cause_of(deaths).last_words)
            attempt += 1


def _ended(
    nodes: Nodes,
    codes: Sequence[int | None],
    deaths: Sequence[Death],
    asked: StopSignals,
    news: News | None,
    on_failure: Callable[[str], None],
) -> int:
    """The exit code of the job; what ended it is said."""
    if news is None:
        return STOPPED if STOPPED in codes else 0
    if news.kind == "stop":
        return stopped(codes, deaths, asked.number or news.code, on_failure)
    if deaths and news.node == nodes.rank:
        explain(cause_of(deaths), on_failure)
    else:
        restore_cursor()
        say(f"error: {news.text}")
    return news.code


class _Attempt:
    """The ranks of this machine until they have ended, or need not be waited for."""

    def __init__(self, ranks: Ranks, met: Round, asked: StopSignals, patience_seconds: float):
        self._ranks, self._met, self._asked, self._patience = ranks, met, asked, patience_seconds

    def outcome(self) -> tuple[News | None, list[Death]]:
        """What ended it, None where all ranks of all machines ended well; and the deaths on this machine."""
        news = self._watched()
        deaths = self._ranks.deaths()
        if deaths and news is None and self._asked.number:  # they ended before it was heard
            news = self._stop()
        if self._asked.number or (news is not None and news.kind == "stop"):
            return news, deaths
        if deaths and (news is None or news.kind == "grow" or is_final(cause_of(deaths))):
            return self._told(cause_of(deaths)), deaths
        if news is None and not self._ranks.running():
            news = self._waited()
        if news is not None and news.kind == "grow" and set(self._ranks.codes()) == {0}:
            news = self._waited()  # the run was at its end when the machine came
        return news, deaths

    def _watched(self) -> News | None:
        """Until the ranks have ended, or there is news that they need not be waited for."""
        deadline, handed_on, found = float("inf"), False, None
        while self._ranks.running() and time.monotonic() < deadline and not self._asked.at_once and self._met.leads():
            found = self._met.news()
            number = self._asked.number or (signal.SIGUSR1 if found is not None and found.kind == "grow" else 0)
            if self._asked.number and (found is None or found.kind == "grow"):
                found = self._stop()
            if number and not handed_on:
                handed_on, deadline = True, min(deadline, time.monotonic() + self._patience)
                self._ranks.send(signal.SIGTERM if number == signal.SIGHUP else number)
            if found is not None and found.kind == "stop":
                deadline = min(deadline, time.monotonic() + self._patience)
            if self._ranks.deaths() or (found is not None and found.kind in ("again", "final")):
                deadline = min(deadline, time.monotonic() + CONSEQUENCE_SECONDS)
            time.sleep(_POLL_SECONDS)
        return found or self._met.news()

    def _stop(self) -> News:
        """Tell the others that this machine was asked to."""
        text = f"node {self._met.node} was asked to stop"
        return self._met.tell(News(kind="stop", text=text, node=self._met.node, code=self._asked.number))

    def _told(self, cause: Death) -> News:
        """Tell the others of a death here; one that follows from another machine's waits for what that has to say."""
        deadline = time.monotonic() + 2 * CONSEQUENCE_SECONDS
        while is_consequence(cause) and time.monotonic() < deadline:
            found = self._met.news()
            if found is not None and found.kind != "grow":
                return found
            time.sleep(_POLL_SECONDS)
        final = is_final(cause)
        return self._met.tell(
            News(
                kind="final" if final else "again",
                text=f"node {self._met.node}, {cause}",
                node=self._met.node,
                code=exit_code(cause) if final or cause.code > 0 else AGAIN,
                changed=bool(cause.report.get("changed")),
            )
        )

    def _waited(self) -> News | None:
        """All ranks here have ended well: those of the other machines may still meet an error."""
        while not self._met.all_done():
            found = self._met.news()
            if found is not None and found.kind != "grow":
                return found
            if self._asked.at_once:
                return None
            time.sleep(_POLL_SECONDS)
        return None
