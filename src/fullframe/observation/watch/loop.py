"""Looking at a run again and again until it ends or somebody has seen enough."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fullframe.observation.run_files import RunFiles, RunReader
from fullframe.observation.summary import Finding, summarize
from fullframe.observation.watch.drawing import ASCII, Glyphs
from fullframe.observation.watch.screen import screen
from fullframe.observation.watch.snapshot import as_line

_GONE_SECONDS = 20.0  # a run that died may be started again by its launcher
_LINE_SECONDS = 5.0
_HEIGHT = 40  # of a screen that need not fit
_QUIT = b"qQ\x1b\x03"
Draw = Callable[[int, int, Glyphs], Sequence[Text]]


def glyphs_for(console: Console) -> Glyphs:
    """What this terminal can show."""
    glyphs = Glyphs() if console.encoding.startswith("utf") else ASCII
    return glyphs._replace(has_colours=console.color_system is not None and not console.no_color)


def is_over(run: RunFiles, now: float | None = None) -> bool:
    """Whether nothing more is to be expected of a run."""
    now = time.time() if now is None else now
    if run.state == "running":
        return False
    if run.state in ("died", "unknown"):
        return run.written is None or now - run.written > _GONE_SECONDS
    return True


def watch_screen(reader: RunReader, console: Console, every: float, troubles: Callable[[], list[Finding]]) -> None:
    """Draw the run over the whole terminal until it ends, or q is pressed; its last screen stays below."""
    run = reader.read()
    if not is_over(run):
        with _drawn(console) as show, _keys(sys.stdin) as pressed:
            while not is_over(run):
                show(lambda width, height, glyphs: _lines(run, troubles(), width, height, glyphs, "q quits"))  # noqa: B023
                if pressed(every):
                    break
                run = reader.read()
    show_once(run, console, troubles())


def show_once(run: RunFiles, console: Console, troubles: list[Finding]) -> None:
    """Print one screen as it is now."""
    # Where the next prompt is to stand below it, all of it should still be seen.
    height = max(console.height - 3, 20) if console.is_terminal else _HEIGHT
    for line in _lines(run, troubles, console.width, height, glyphs_for(console), ""):
        console.print(line, no_wrap=True, crop=True)


def watch_lines(reader: RunReader, stream: TextIO, every: float) -> None:
    """Print a line every few seconds until the run ends, and each finding once."""
    said, step, spoke = set[str](), -1, -_LINE_SECONDS
    while True:
        run = reader.read()
        summary, over = summarize(run), is_over(run)
        for finding in summary.findings:
            if finding.level != "info" and finding.text not in said:
                said.add(finding.text)
                print(f"warning: {finding.text}", file=stream, flush=True)
        now = time.monotonic()
        if over or (summary.step != step and now - spoke >= _LINE_SECONDS):
            step, spoke = summary.step, now
            print(as_line(run, summary), file=stream, flush=True)
        if over:
            return
        time.sleep(every)


def redraw(draw: Draw, console: Console, every: float) -> None:
    """Draw over the whole terminal until q is pressed."""
    with _drawn(console) as show, _keys(sys.stdin) as pressed:
        while True:
            show(draw)
            if pressed(every):
                return


def _lines(run: RunFiles, troubles: list[Finding], width: int, height: int, glyphs: Glyphs, foot: str) -> list[Text]:
    summary = summarize(run)
    summary = replace(summary, findings=(*troubles, *summary.findings))
    return screen(run, summary, width, height, glyphs, foot)


@contextlib.contextmanager
def _drawn(console: Console) -> Iterator[Callable[[Draw], None]]:
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show(draw: Draw) -> None:
            # One line less than there are, and one column: some terminals scroll or wrap at the very last.
            lines = draw(console.width - 1, console.height - 1, glyphs_for(console))
            live.update(Group(*lines), refresh=True)

        yield show


@contextlib.contextmanager
def _keys(stream: TextIO) -> Iterator[Callable[[float], bool]]:
    """Waits a while for a key; whether it was one to quit by. Without a keyboard it only waits."""
    if not stream.isatty():

        def wait(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield wait
        return
    import termios
    import tty

    number = stream.fileno()
    before = termios.tcgetattr(number)

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select([number], [], [], seconds)
        return bool(ready) and os.read(number, 1) in _QUIT  # not through a buffer, whose rest would not be waited for

    try:
        tty.setcbreak(number)
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
