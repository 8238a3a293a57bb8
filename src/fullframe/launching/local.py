"""Ranks on this machine, by torch's elastic launcher; an error that ranks raise is shown once."""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run `python *arguments` as `ranks` ranks and wait; the exit code of the job.

    Rank 0 shares this terminal; the others' output is shown only when one of them dies without naming an error.
    Prints the first error on stderr. Ctrl-C and SIGTERM end all ranks.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Without this every rank would start a thread for every core of the machine.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // ranks, 1)))
    with tempfile.TemporaryDirectory(prefix="fullframe-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            max_restarts=0,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(folder, redirects={rank: Std.ALL for rank in range(1, ranks)}),
            shutdown_timeout=10,
        )
        logging.disable(logging.ERROR)  # the launcher's own account of a failure; ours follows
        try:
            elastic_launch(config, sys.executable)(*arguments)
            return 0
        except ChildFailedError as failed:
            return _explain(failed.failures, Path(folder))
        except (SignalException, KeyboardInterrupt) as stopped:
            number = getattr(stopped, "sigval", signal.SIGINT)
            _restore_cursor()
            print("stopped; go on with --resume and the same --run-dir", file=sys.stderr)
            return 128 + int(number)
        finally:
            logging.disable(logging.NOTSET)


def _explain(failures: dict[int, Any], folder: Path) -> int:
    """Print the failure that came first; the exit code of its rank, 1 when it died of a signal."""
    rank = min(failures, key=lambda rank: _precedence(failures[rank]))
    failure = failures[rank]
    details = _details(failure)
    if details:
        print(details["py_callstack"], file=sys.stderr)
        return int(failure.exitcode) if failure.exitcode > 0 else 1
    _restore_cursor()
    print(
        f"error: rank {rank} died ({failure.message if failure.exitcode < 0 else f'exit code {failure.exitcode}'})",
        file=sys.stderr,
    )
    for log in folder.rglob(f"{failure.local_rank}/stderr.log"):
        print("\n".join(log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
    return 1


def _precedence(failure: Any) -> tuple[int, float]:
    """The cause before its consequences: other ranks lose their connection to one that failed, and get a SIGTERM."""
    details = _details(failure)
    if failure.exitcode == 2:
        kind = 0
    elif failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
        kind = 1
    else:
        kind = 2 if details else 3
    return kind, float(details.get("seconds", failure.timestamp))


def _details(failure: Any) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    return dict(message.get("extraInfo", {})) if isinstance(message, dict) else {}


def _restore_cursor() -> None:
    """A rank that dies while it draws a progress bar leaves the terminal's cursor hidden."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
