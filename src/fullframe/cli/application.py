"""From arguments to an exit code: 0 done or stopped so that it can go on, 1 a bug or the user's own exception, 2 wrong
use, 75 the machine failed (start it again), 130 interrupted.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

import tyro

from fullframe import __version__
from fullframe.cli.calibrate import Calibrate
from fullframe.cli.export import Export
from fullframe.cli.plan import Plan
from fullframe.cli.simulate import Simulate
from fullframe.cli.train import Train
from fullframe.cli.verify import Verify
from fullframe.errors import DivergenceError, FullframeError
from fullframe.processes.exit_reasons import AGAIN, is_machines_fault, report

_DESCRIPTION = "Train perception models on the full frame, split over GPUs. `fullframe --version` prints the version."


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
    "export": Export,
}


def run(arguments: Sequence[str]) -> int:
    """Run one command line."""
    if list(arguments) == ["--version"]:
        print(f"fullframe {__version__}")
        return 0
    command: Command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="fullframe",
        description=_DESCRIPTION,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        return command.run()
    except FullframeError as error:
        consequence = isinstance(error, DivergenceError) and error.consequence  # the other rank says it better
        report(f"error: {error}", f"{type(error).__name__}: {error}", consequence=consequence)
        return 1 if consequence else 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        machine = is_machines_fault(error)
        report(traceback.format_exc().rstrip(), f"{type(error).__name__}: {error}", consequence=machine)
        return AGAIN if machine else 1
