"""A page that is run: its files are written, its commands executed in order, and what they print held to what it shows.

    ```python title="recipe.py"     the file recipe.py, written into the folder of the page
    ```console                      `$ command`, then what it prints; `...` stands for any lines
    ```text                         shown, not run

Numbers, times, bars and widths of columns differ from run to run and are masked. `export`, `ulimit` and `cd` hold for
the commands after them. A comment before a block may say more: `<!-- not run: why -->`; `<!-- held to: 1 first, 2 last
-->`, where the lines between may differ, as the order of plans does; `<!-- on a terminal -->` of 100 columns.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- ([^>]+) -->\n+\Z")
HELD = re.compile(r"held to: (\d+) first, (\d+) last")
ANY = "..."
STICKY = ("export ", "ulimit ", "cd ")


@dataclass(frozen=True)
class Shown:
    """A command and the lines that the page says it prints."""

    command: str
    lines: list[str]


@dataclass(frozen=True)
class Block:
    """A fenced block: `start` and `end` are those of its text in the page."""

    language: str
    title: str
    text: str
    start: int
    end: int
    comment: str

    @property
    def runs(self) -> bool:
        """Whether it can be run here."""
        return not self.comment.startswith("not run:")

    @property
    def on_terminal(self) -> bool:
        """Whether standard output is a terminal."""
        return "on a terminal" in self.comment


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for m in BLOCK.finditer(page):
        comment = COMMENT.search(page[: m.start()])
        found.append(Block(m[1], m[2] or "", m[3], m.start(3), m.end(3), comment[1] if comment else ""))
    return found


def commands(text: str) -> list[Shown]:
    """The commands of a console block; a line that ends in a backslash goes on."""
    found: list[Shown] = []
    going_on = False
    for line in text.splitlines():
        if going_on:
            found[-1] = Shown(f"{found[-1].command}\n{line}", [])
        elif line.startswith("$ "):
            found.append(Shown(line[2:], []))
        else:
            found[-1].lines.append(line)
            continue
        going_on = line.endswith("\\")
    return found


def masked(line: str) -> str:
    """`line` without what differs from run to run."""
    line = re.sub(r"[─━═┄]+", "-", line.rstrip())
    line = re.sub(r"[\u2800-\u28ff█▉▊▋▌▍▎▏░▒▓]+|\b[a-z]*([a-z])\1{5}[a-z]*", "", line)  # curves and bars
    line = re.sub(r"\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", line)
    line = re.sub(r"\b(KiB|MiB|GiB|ms|us)\b", "UNIT", line)
    line = re.sub(r"[-+]#", "#", line)
    line = re.sub(r"\b(height|width) #", "AXIS #", line)  # as fast as each other, or nearly
    return re.sub(r"\s+", " ", line)


def agrees(shown: list[str], printed: list[str], comment: str = "") -> bool:
    """Whether the lines that were printed are those that are shown, numbers aside; `...` is any number of lines."""
    if held := HELD.search(comment):
        first, last = int(held[1]), int(held[2])
        ends = [[*lines[:first], *lines[len(lines) - last :]] for lines in (shown, printed)]
        return agrees(*ends)
    if not shown:
        return not printed
    if shown[0].strip() == ANY:
        return any(agrees(shown[1:], printed[n:]) for n in range(len(printed) + 1))
    return bool(printed) and masked(shown[0]) == masked(printed[0]) and agrees(shown[1:], printed[1:])


def abridged(shown: list[str], printed: list[str]) -> list[str]:
    """What was printed, cut where the page cuts it: as many lines before the first `...` and after the last."""
    cuts = [at for at, line in enumerate(shown) if line.strip() == ANY]
    if not cuts or len(printed) < len(shown):
        return printed
    after = len(shown) - cuts[-1] - 1
    return [*printed[: cuts[0]], ANY, *printed[len(printed) - after :]]


def environment(folder: Path) -> dict[str, str]:
    """What a reader's shell has: `fullframe` and `python` are those that run the tests."""
    tools = folder / ".tools"
    if not tools.exists():
        tools.mkdir()
        for name, what in (("fullframe", "-m fullframe.cli"), ("python", ""), ("torchrun", "-m torch.distributed.run")):
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
            (tools / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COLUMNS", "LINES")}
    return kept | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),  # nothing that was calibrated here before
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "COLUMNS": "80",
        "LINES": "24",
        "NO_COLOR": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


class Run:
    """The commands of a page, executed one after the other in `folder`."""

    def __init__(self, folder: Path):
        self.folder, self.held = folder, ""

    def printed(self, command: str, on_terminal: bool = False) -> list[str]:
        """What `command` prints to either stream, line by line; to standard output alone where that is a terminal."""
        if command.startswith(STICKY):
            self.held += f"{command}\n"
        script = f"{self.held}{'' if command.startswith(STICKY) else command}"
        shell, env = ["bash", "-c", script], environment(self.folder)
        if on_terminal:
            del env["COLUMNS"], env["LINES"]
            shell = [
                "script",
                "--quiet",
                "--return",
                "--command",
                f"stty rows 30 cols 100; {script} 2>/dev/null",
                "/dev/null",
            ]
        done = subprocess.run(
            shell,
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        text = (
            re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout)
            .replace("\r", "")
            .replace(str(self.folder), "~")
            .replace(str(ROOT / "src"), "site-packages")
            .replace(f"{self.folder.name}/", "")
        )
        return [line.rstrip() for line in text.splitlines()]


def play(text: str, folder: Path, page: str) -> tuple[str, list[str]]:
    """Run a page in `folder`: its text with the output of today, and what is not as it is shown."""
    run, differences, written, after = Run(folder), [], [], 0
    for block in blocks(text):
        if not block.runs:
            continue
        if block.title:
            (folder / block.title).write_text(block.text)
        if block.language != "console":
            continue
        new: list[str] = []
        for shown in commands(block.text):
            printed = run.printed(shown.command, block.on_terminal)
            if not agrees(shown.lines, printed, block.comment):
                there, here = "\n".join(shown.lines), "\n".join(printed)
                differences.append(f"{page}: $ {shown.command}\n--- shown\n{there}\n--- printed\n{here}\n")
            new += [f"$ {shown.command}", *abridged(shown.lines, printed)]
        written += [text[after : block.start], "\n".join(new) + "\n"]
        after = block.end
    return "".join([*written, text[after:]]), differences
