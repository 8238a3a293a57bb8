"""The command line: each command parses, calls and prints; nothing is computed here and no torch loaded to parse."""

import os
import sys


def main() -> None:
    """The `fullframe` command; leaves by SystemExit."""
    from fullframe.cli.application import run
    from fullframe.processes.exit_reasons import STOPPED
    from fullframe.processes.orphans import die_with_launcher

    die_with_launcher()
    try:
        code: object = run(sys.argv[1:])
    except SystemExit as ended:
        code = ended.code
    if code not in (None, 0, STOPPED) and "RANK" in os.environ:
        # A rank that stops in the middle of a step has threads that wait for other ranks; to unwind them aborts.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
    raise SystemExit(code)
