"""`fullframe --completion SHELL`: what a shell needs to complete the words of the command line."""

from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import tyro

SHELLS = ("bash", "zsh", "fish")

# tyro offers no files for words without an option before them; bash does, where a function has nothing to offer.
_IN_BASH = """
_fullframe_or_files() {
  _tyro_fullframe "$@"
  if [[ ${#COMPREPLY[@]} -eq 1 && -z ${COMPREPLY[0]} ]]; then COMPREPLY=(); fi
}
complete -o bashdefault -o default -F _fullframe_or_files fullframe
"""


def script(shell: str, commands: Mapping[str, Callable[..., Any]]) -> str:
    """The completion script of the command line for one of SHELLS."""
    out = StringIO()
    with redirect_stdout(out):
        try:
            tyro.extras.subcommand_cli_from_dict(
                dict(commands),
                prog="fullframe",
                args=["--tyro-print-completion", shell],
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        except SystemExit as ended:
            if ended.code:
                raise
    return out.getvalue() + (_IN_BASH if shell == "bash" else "")
