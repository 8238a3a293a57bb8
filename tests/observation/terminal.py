"""A real terminal of a given size, by tmux: what a person would see, and the keys they would press."""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

TMUX = shutil.which("tmux")


class Terminal:
    """One window of a tmux server of its own."""

    def __init__(self, socket: Path):
        self._socket = socket

    def __call__(self, *words: str) -> str:
        """A command of tmux."""
        assert TMUX is not None
        done = subprocess.run([TMUX, "-S", str(self._socket), *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def lines(self) -> list[str]:
        """What stands there now."""
        return [line.rstrip() for line in self("capture-pane", "-p").splitlines()]

    def press(self, *keys: str) -> None:
        """Press keys, by tmux's names of them."""
        self("send-keys", *keys)

    def wait_for(self, condition: Callable[[list[str]], bool], seconds: float = 120.0) -> list[str]:
        """The lines, once they are as they should be: a screen may be seen while it is drawn."""
        deadline = time.monotonic() + seconds
        while not condition(lines := self.lines()):
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.1)
        return lines


@contextlib.contextmanager
def terminal(
    folder: Path, width: int, height: int, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Terminal]:
    """A terminal that runs `command` and then says "ended" with its exit code."""
    script = f"{shlex.join(command)}; echo ended $?; exec sleep 600"
    socket = folder / "tmux"
    window = Terminal(socket)
    names = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
    assert TMUX is not None
    start = [TMUX, "-S", str(socket), "-u", "-f", os.devnull, "new-session", "-d", "-x", str(width), "-y", str(height)]
    subprocess.run([*start, *names, "sh", "-c", script], check=True, timeout=60)
    try:
        yield window
    finally:
        window("kill-server")
