"""The command line: each command parses, calls and prints; nothing is computed here and no torch loaded to parse."""

import locale
import os
import sys


def main() -> None:
    """The `fullframe` command; leaves by SystemExit."""
    _open_what_is_closed()
    _read_and_write_utf8()
    try:
        from fullframe.cli.application import run
        from fullframe.processes.exit_reasons import STOPPED
        from fullframe.processes.orphans import die_with_launcher
    except KeyboardInterrupt:  # as once it runs
        raise SystemExit(130) from None

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


def _open_what_is_closed() -> None:
    """Where a standard stream is closed, as daemons have it, nothing is read or written, here and in what is started.

    A file that is opened takes the lowest free number: a run's own would become its ranks' output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode))


def _read_and_write_utf8() -> None:
    """Start anew where the locale has files in another encoding: recipes are UTF-8, and so are a run's files.

    What is shown stays in the locale's, with a character that it has not as its number.
    """
    if locale.getencoding().lower() == "utf-8" or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
