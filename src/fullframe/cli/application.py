"""From arguments to an exit code: 0 done or stopped so that it can go on, 1 a bug or the user's own exception, 2 wrong
use, 75 the machine failed (start it again), 130 interrupted, 141 nobody reads the output any more.
"""

import dataclasses
import os
import select
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tyro

from fullframe import __version__
from fullframe.cli.calibrate import Calibrate
from fullframe.cli.completion import SHELLS, script
from fullframe.cli.display import print_error
from fullframe.cli.doctor.all import DoctorAll
from fullframe.cli.doctor.command import Doctor
from fullframe.cli.doctor.env import DoctorEnv
from fullframe.cli.doctor.lint import Lint
from fullframe.cli.doctor.run import DoctorRun
from fullframe.cli.evaluate import Evaluate
from fullframe.cli.export import Export
from fullframe.cli.horovodrun import Horovodrun, separated
from fullframe.cli.jobs import Jobs
from fullframe.cli.launch import Launch
from fullframe.cli.node_options import NodeOptions
from fullframe.cli.plan import Plan
from fullframe.cli.report import Report
from fullframe.cli.simulate import Simulate
from fullframe.cli.tracebacks import lines_of_users, of_users, said_in_worker
from fullframe.cli.train import Train
from fullframe.cli.verify import Verify
from fullframe.cli.watch import Watch
from fullframe.cli.words import TechniqueOptions, option, without_empty_defaults
from fullframe.errors import DivergenceError, FullframeError
from fullframe.processes.exit_reasons import AGAIN, is_machines_fault, of_lost_worker, report

_DESCRIPTION = "Train perception models on the full frame, split over GPUs."
_OPTIONS = {
    "COMMAND --help": "all about one command",
    "--version": "the version",
    "--completion SHELL": "what bash, zsh or fish needs to complete these words",
}


class Command(Protocol):
    """What a parsed command offers."""

    def run(self) -> int:
        """Do it; the exit code."""


COMMANDS: dict[str, Callable[..., Command]] = {
    "train": Train,
    "verify": Verify,
    "plan": Plan,
    "simulate": Simulate,
    "calibrate": Calibrate,
    "evaluate": Evaluate,
    "export": Export,
    "watch": Watch,
    "report": Report,
    "doctor": Doctor,
    "launch": Launch,
    "jobs": Jobs,
    "horovodrun": Horovodrun,
}


for _options in (*COMMANDS.values(), NodeOptions, TechniqueOptions, DoctorAll, DoctorEnv, DoctorRun, Lint):
    without_empty_defaults(_options)

_UNREAD = 141  # 128 + SIGPIPE, as any other command gives it


def run(arguments: Sequence[str]) -> int:
    """Run one command line; ended without a word when whoever reads its output has gone, as `head` does."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except (BrokenPipeError, SystemExit) as error:
        # Rich makes a SystemExit of it.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        if "RANK" in os.environ:
            text = "nobody reads the output any more: the pipe it went into was closed"
            report(f"error: {text}; go on with --resume, and the output in a file", text)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _UNREAD


def _is_unread() -> bool:
    """Whether stdout is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--version"]:
        print(f"fullframe {__version__}")
        return 0
    if list(arguments) in (["--help"], ["-h"]):
        print(_overview())
        return 0
    if not arguments:
        print(_overview(), file=sys.stderr)
        return 2
    if arguments[:1] == ["--completion"]:
        return _complete(arguments[1:])
    if arguments[:1] == ["horovodrun"]:
        arguments = ["horovodrun", *separated(arguments[1:])]
    if arguments[:1] == ["doctor"] and arguments[1:2] == ["--json"]:  # which belongs to one of the checks
        arguments = ["doctor", "all", *arguments[1:]]
    if arguments[:1] == ["doctor"] and arguments[1:] and arguments[1].endswith(".py"):
        file = arguments[1]
        return _wrong_use(arguments, f"fullframe doctor run {file} runs it, and fullframe doctor lint {file} reads it")
    try:
        command = _parsed(arguments)
    except SystemExit as error:
        if error.code:
            _say_as_json(arguments, f"wrong use, as stderr says; fullframe {arguments[0]} --help tells of all options")
        raise
    given = _given(arguments) if arguments[0] != "horovodrun" else []
    if "" in given:  # Path("") would be the folder that one is in
        text = f"{given[given.index('') - 1]} is given an empty word; is a variable of the shell not set?"
        return _wrong_use(arguments, text)
    if twice := next((word for word in _many_valued(command) if _given(arguments).count(word) > 1), None):
        text = f"{twice} is given twice; give all its values to one: {twice} VALUE VALUE ..."
        return _wrong_use(arguments, text)
    try:
        return command.run()
    except FullframeError as error:
        machine = is_machines_fault(error)
        consequence = machine or (isinstance(error, DivergenceError) and error.consequence)  # another says it better
        said = said_in_worker(error)
        text = "\n".join(filter(None, [f"error: {said}", lines_of_users(error)]))
        report(text, f"{type(error).__name__}: {said}", consequence=consequence)
        _say_as_json(arguments, said)
        return AGAIN if machine else 1 if consequence else 2
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            raise
        if isinstance(error, PermissionError) and error.filename and not lines_of_users(error):
            return _wrong_use(arguments, f"{error.filename}: {error.strerror}")
        machine = is_machines_fault(error)
        lost = of_lost_worker(error)
        summary = lost or f"{type(error).__name__}: {error}"
        report(f"error: {lost}" if lost else of_users(error), summary, consequence=machine)
        _say_as_json(arguments, summary)
        return AGAIN if machine else 1


def _parsed(arguments: Sequence[str]) -> Command:
    """The command; of one that is known what is wrong with its words points to its own --help."""
    options: dict[str, Any] = {"config": (tyro.conf.FlagCreatePairsOff,)}
    command = COMMANDS.get(arguments[0])
    parsed: Command
    if command is not None:
        parsed = tyro.cli(command, prog=f"fullframe {arguments[0]}", args=arguments[1:], **options)
    else:
        parse = tyro.extras.subcommand_cli_from_dict
        parsed = parse(COMMANDS, prog="fullframe", description=_DESCRIPTION, args=arguments, **options)
    return parsed


def _wrong_use(arguments: Sequence[str], text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    _say_as_json(arguments, text)
    return 2


def _say_as_json(arguments: Sequence[str], text: str) -> None:
    """The end of a command that was asked for JSON, on stdout too; a rank leaves it to its launcher."""
    if "--json" in _given(arguments) and "TORCHELASTIC_ERROR_FILE" not in os.environ:
        print_error(text)


def _overview() -> str:
    """A line for each command, which tyro gives all of its description."""
    commands = {name: (command.__doc__ or "").strip().partition("\n")[0] for name, command in COMMANDS.items()}
    width = 2 + max(map(len, [*commands, *_OPTIONS]))
    columns = min(shutil.get_terminal_size().columns, 120)

    def row(name: str, said: str) -> str:
        return textwrap.fill(said, columns, initial_indent=f"  {name:{width}}", subsequent_indent=" " * (width + 2))

    tables = ("\n".join(row(name, said) for name, said in rows.items()) for rows in (commands, _OPTIONS))
    return "\n\n".join(["usage: fullframe COMMAND ...", _DESCRIPTION, *tables])


def _many_valued(command: Any) -> Iterator[str]:
    """The options that take several values, of which Python's parser would keep the last ones alone."""
    for field in dataclasses.fields(command) if dataclasses.is_dataclass(command) else ():
        value = getattr(command, field.name)
        if isinstance(value, tuple):
            yield option(field.name)
        elif dataclasses.is_dataclass(value):
            yield from _many_valued(value)


def _given(arguments: Sequence[str]) -> list[str]:
    """The words, without those of a program that is to be run."""
    words = list(arguments)
    return words[: words.index("--")] if "--" in words else words


def _complete(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0] not in SHELLS:
        print(f"error: --completion takes one of {', '.join(SHELLS)}", file=sys.stderr)
        return 2
    print(script(words[0], COMMANDS))
    return 0
