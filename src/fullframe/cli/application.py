"""From arguments to an exit code: 0 done, 1 a bug or the user's own exception, 2 wrong use, 130 interrupted."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

import tyro

from fullframe import __version__
from fullframe.cli.train import Train
from fullframe.cli.verify import Verify
from fullframe.errors import FullframeError

_DESCRIPTION = "Train perception models on the full frame, split over GPUs. `fullframe --version` prints the version."


class Command(Protocol):
    """What a parsed command offers."""

    def run(self) -> int:
        """Do it; the exit code."""


COMMANDS: dict[str, Callable[..., Command]] = {"train": Train, "verify": Verify}


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
        return _report(error, code=2, text=f"error: {error}")
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(error, code=1, text=traceback.format_exc().rstrip())


def _report(error: Exception, code: int, text: str) -> int:
    """Say what failed, once: a rank leaves it to whoever started the ranks, in the file torch's launcher reads."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        print(text, file=sys.stderr)
        return code
    now = time.time()
    details = {"py_callstack": text, "timestamp": str(int(now)), "seconds": now}
    with open(file, "w") as out:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}, out)
    return code
