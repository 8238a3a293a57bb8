"""The ranks of one process set at work: what they ask for in any order is agreed on, fused, and done in one order.

The ranks take rounds. In a round each says what it newly asks for; what all ranks have asked for is then done, on all
alike. A rank begins a round when it has news, and as long as any rank waits for anything. A thread takes the rounds; a
caller that would only wait takes one itself, which saves two changes of thread.
"""

import math
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fullframe.horovod.collectives import Collectives
from fullframe.horovod.exceptions import HorovodInternalError, RequestError
from fullframe.horovod.execution import Job, batches, execute
from fullframe.horovod.forecast import Forecast
from fullframe.horovod.settings import Settings
from fullframe.horovod.submission import Submission
from fullframe.horovod.table import Due, Key, Table
from fullframe.horovod.timeline import Timeline
from fullframe.processes.background import in_background
from fullframe.wording import first_line

_LONGEST_CYCLE_SECONDS = 0.005  # while ranks wait for one that is late
_WATCH_SECONDS = 0.5
_JOIN_SECONDS = 10.0
_TURN_SECONDS = 0.0005  # the thread that has just done the last collective may still be about to end its turn


class Engine:
    """The collectives of `size` ranks that meet in `store`, of which this process is `rank`.

    `check` is called now and then while a caller waits, and raises HorovodInternalError where that is in vain. So does
    this, where the ranks do not meet.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        settings: Settings,
        timeline: Timeline,
        check: Callable[[], None] = lambda: None,
    ):
        self.rank, self.size = rank, size
        self._check = check
        self._settings, self._timeline = settings, timeline
        seconds = settings.connect_seconds, settings.timeout_seconds
        self._collectives = _connected(lambda: Collectives(store, rank, size, *seconds), check)
        self._table = Table(size)
        self._forecast = Forecast(self._collectives)
        self._turn = threading.Lock()  # who holds it takes rounds
        self._changed = threading.Condition()  # guards the fields below
        self._news: list[Submission] = []
        self._mine: dict[Key, Submission] = {}
        self._doing: list[Submission] = []  # no longer in `_mine`, as who hears that one is done may ask for it again
        self._joining: Submission | None = None
        self._said_join = False
        self._gpu: int | None = None  # the current one of who asks; each thread has its own, at first the first
        self._error: HorovodInternalError | None = None
        self._thread = threading.Thread(target=self._serve, name="horovod", daemon=True)
        self._thread.start()

    def attempt(self, submission: Submission) -> bool:
        """Do a collective right here if all ranks may come to it now, as they did before; else it is for `submit`.

        What most allreduces of a training loop come to, so it does as little else as can be.
        """
        by_memory = self._collectives.asks_quickly
        if not (by_memory or self._forecast.expected is not None) or not self._turn.acquire(blocking=False):
            return False
        try:
            if not self._is_idle() or self._error is not None:
                return False
            if self._forecast.expected is not None:
                expects = self._forecast.expects(submission.request)
                return expects and self._guarded(lambda: self._attempt(submission))
            said = self._table.short(submission.request, submission.number) if by_memory else None
            if said is None:
                return False
            self._register(submission, news=False)
            self._guarded(lambda: self._ask(submission, said))
            return True
        finally:
            self._turn.release()
            if by_memory and not self._is_idle():
                self._wake()

    def submit(self, submission: Submission, waits: bool = False) -> None:
        """Ask for a collective. With `waits` the caller is about to wait for it, so it may be done right here."""
        if waits and self._turn.acquire(timeout=_TURN_SECONDS):
            try:
                here = self._is_idle()
                self._register(submission, news=not here)
                if here:
                    self._guarded(lambda: self._round([submission], eager=True))
            finally:
                self._turn.release()
            if not self._is_idle():
                self._wake()
        else:
            self._register(submission, news=True)

    def join(self, submission: Submission) -> None:
        """Ask for no more; ended once all ranks have joined, with the last of them. Zeros stand in until then."""
        with self._changed:
            self._raise_error()
            self._gpu = _current_gpu()
            self._joining = submission
            self._changed.notify_all()

    def wait(self, submission: Submission) -> Any:
        """The outcome of a submission; warns, naming the ranks that are missing, when it takes long."""
        stall = self._settings.stall_seconds or float("inf")
        begin, warned = time.monotonic(), False
        while not submission.wait(_WATCH_SECONDS):
            try:
                self._check()
            except HorovodInternalError as error:
                self.fail(error)
            if time.monotonic() - begin > stall and not warned:
                warned = True
                warnings.warn(self._stalled(submission, stall), stacklevel=3)
        return submission.outcome()

    def fail(self, error: Exception) -> None:
        """End with an error all that is asked for, now and later."""
        known = isinstance(error, HorovodInternalError)
        problem = error if known else HorovodInternalError(f"a collective failed, a rank may be gone: {error}")
        assert isinstance(problem, HorovodInternalError)
        with self._changed:
            if self._error is None:
                self._error = problem
            pending = [*self._mine.values(), *self._doing, *([self._joining] if self._joining else [])]
            self._mine, self._news, self._doing, self._joining = {}, [], [], None
            self._changed.notify_all()
        for submission in pending:
            if not submission.has_ended:
                submission.fail(problem)

    @property
    def is_sound(self) -> bool:
        """Whether no collective has failed so far."""
        return self._error is None

    def close(self) -> None:
        """Leave: what is not done fails here, and on the ranks that ask for more."""
        self.fail(HorovodInternalError("Horovod has been shut down"))
        self._collectives.close()
        if threading.current_thread() is not self._thread:  # one that comes back from torch as Python ends aborts
            self._thread.join(_JOIN_SECONDS)

    def _attempt(self, submission: Submission | None) -> bool:
        done = self._forecast.attempt(submission)
        if done and submission is not None and self._timeline.is_on:
            self._timeline.record(submission.label, "ALLREDUCE", submission.begun)
        return done

    def _register(self, submission: Submission, news: bool) -> None:
        with self._changed:
            self._raise_error()
            if submission.key in self._mine:
                kind, name = submission.request.kind, submission.request.name
                raise RequestError(
                    f"Requested to {kind} a tensor with the same name as another tensor that is currently being "
                    f"processed: '{name}'. If you want to request another tensor, use a different tensor name."
                )
            self._mine[submission.key], self._gpu = submission, _current_gpu()
            if news:
                self._news.append(submission)
                self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._joining is not None:
            raise RequestError("this rank has joined; it can ask for nothing until all ranks have")

    def _is_idle(self) -> bool:
        return self._table.is_empty and not self._news and self._joining is None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _serve(self) -> None:
        pause = self._settings.cycle_seconds
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._must_take_part() or self._error)
                if not self._has_news() and self._joining is None:  # it waits for other ranks: not too eagerly
                    self._changed.wait_for(lambda: self._has_news() or self._error, timeout=pause)
                if self._error is not None:
                    break
            with self._turn:
                with self._changed:
                    news, self._news = self._news, []
                if news or self._must_take_part():  # or a caller has just taken the round
                    if self._gpu is not None:
                        torch.cuda.set_device(self._gpu)
                    longest = max(self._settings.cycle_seconds, _LONGEST_CYCLE_SECONDS)
                    done = self._guarded(partial(self._round, news, eager=False))
                    pause = self._settings.cycle_seconds if done else min(2 * pause, longest)
        self._collectives.close()  # so that the others, who may wait for this rank, hear of it

    def _must_take_part(self) -> bool:
        """A rank that has joined is there for all rounds; the others come to it when they have something to do."""
        return self._has_news() or self._table.is_waiting or self._joining is not None

    def _guarded(self, run: Callable[[], bool]) -> bool:
        try:
            return run()
        except Exception as error:  # whatever it is, this rank is out of step with the others
            self.fail(error)
            return False

    def _has_news(self) -> bool:
        return bool(self._news) or (self._joining is not None and not self._said_join)

    def _round(self, news: list[Submission], eager: bool) -> bool:
        """One round, by whoever has the turn; whether anything was done. `eager`: a caller waits for it."""
        joins = self._joining is not None and not self._said_join
        if self._forecast.expected is not None and self._table.is_empty:
            alone = len(news) == 1 and not joins and self._forecast.expects(news[0].request)
            mine = self._take(news[0].key) if alone else None
            if self._attempt(mine):
                self._doing = []
                return True
            if mine is not None:
                self._register(mine, news=False)
        with self._timeline.span("", "CYCLE"):
            asked = [(submission.request, submission.number) for submission in news]
            messages = self._collectives.exchange(self._table.encode(asked, joins), eager)
        self._said_join = self._said_join or joins
        return self._answer(messages)

    def _ask(self, submission: Submission, said: bytes) -> bool:
        """A round for one collective that was done before, by the caller that waits for it."""
        messages = self._collectives.exchange(said, eager=True)
        if messages.count(said) < self.size:
            return self._answer(messages)
        self._take(submission.key)
        due = Due(submission.key, (submission.request,) * self.size)
        self._forecast.learn([due])
        execute([Job(due, submission)], self._collectives)
        self._doing = []
        if self._timeline.is_on:
            self._timeline.record(submission.label, submission.request.kind.upper(), submission.begun)
        return True

    @torch.inference_mode(False)  # a caller's mode is not that of what others get, and of what is kept
    def _answer(self, messages: list[bytes]) -> bool:
        """Do what is due now that the ranks have said this; whether anything was."""
        due, last = self._table.add(messages)
        self._forecast.learn(due)
        jobs = [Job(item, self._take(item.key)) for item in due if self._concerns(item)]
        for job in jobs:
            if job.submission is not None:
                name = job.submission.label
                self._timeline.record(name, f"NEGOTIATE_{job.request.kind.upper()}", job.submission.begun)
        for batch in batches(jobs, self._settings.fusion_bytes):
            names = [job.submission.label for job in batch if job.submission is not None]
            with self._timeline.span(names, batch[0].request.kind.upper()):
                execute(batch, self._collectives)
        self._doing = []
        if last is not None:
            joining, self._joining, self._said_join = self._joining, None, False
            if joining is not None:
                joining.finish(last)
        return bool(due)

    def _concerns(self, due: Due) -> bool:
        """All ranks take part in what is done; an error is only for those who asked."""
        return due.error is None or due.requests[self.rank] is not None

    def _take(self, key: Key) -> Submission | None:
        """This rank's part in what is about to be done."""
        with self._changed:
            found = self._mine.pop(key, None)
            if found is not None:
                self._doing.append(found)
            return found

    def _stalled(self, submission: Submission, seconds: float) -> str:
        missing = self._table.missing(submission.key)
        who = f"ranks {missing} have not asked for it" if missing else "the other ranks are busy or wait elsewhere"
        return f"{submission.request.kind} '{submission.label}' waits for more than {seconds:g} s: {who}"


def _connected(connect: Callable[[], Collectives], check: Callable[[], None]) -> Collectives:
    def asked() -> int:
        check()
        return 0

    try:
        return in_background(connect, math.inf, asked)
    except HorovodInternalError:
        raise
    except RuntimeError as error:
        raise HorovodInternalError(f"the ranks did not meet, one may be gone: {first_line(error)}") from error


def _current_gpu() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None
