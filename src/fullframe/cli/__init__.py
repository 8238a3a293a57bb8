"""The command line: each command parses, calls and prints; nothing is computed here and no torch loaded to parse."""

import sys


def main() -> None:
    """The `fullframe` command; leaves by SystemExit."""
    from fullframe.cli.application import run

    sys.exit(run(sys.argv[1:]))
