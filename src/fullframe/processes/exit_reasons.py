"""How a rank says why it ends: a file that whoever started it reads, and an exit code. Loads no torch."""

import json
import os
import sys
import time

from fullframe.processes.place import restarts

AGAIN = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the job; start it again from its last checkpoint
STOPPED = 85  # of a rank, to its launcher: asked to stop, it has written a checkpoint and can go on

RESTART_REASON = "FULLFRAME_RESTART_REASON"  # where our launcher says why it has started the ranks again
COMMAND = "FULLFRAME_COMMAND"  # and by which words it was started itself

# Torch's exceptions for lost connections and failing devices, and what it says in a plain RuntimeError.
_MACHINE = {"DistError", "AcceleratorError"}
_MACHINE_SIGNS = ("gloo/transport", "is killed by signal", "exited unexpectedly")  # the latter two of loader workers
# What is the program's fault or its settings', and would be said again, by the words of CUDA, NCCL and gloo.
_PROGRAM_SIGNS = (
    "device-side assert",  # a label that is no class
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "Duplicate GPU",
    "Unable to find address for",  # an interface that GLOO_SOCKET_IFNAME names, and is not there
    "no socket interface found",  # likewise NCCL_SOCKET_IFNAME
)
_CALL_SIGNS = (  # likewise, in AcceleratorError alone
    "invalid device ordinal",
    "invalid device function",
    "no kernel image",
    "invalid argument",
    "invalid configuration",
    "too many resources requested",
    "not supported",
    "not permitted",
    "driver version is insufficient",
)


class StartAgain(SystemExit):
    """This rank cannot go on, but the job can when its launcher starts all ranks again."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(AGAIN)
        self.reason = reason
        report(f"{reason}; where nobody starts the ranks again, go on with {remedy}", reason, changed=True)


def report(text: str, summary: str, *, consequence: bool = False, changed: bool = False) -> None:
    """Say what ends this process, once: a rank leaves it to its launcher, in the file that torch's launcher reads.

    `text` is for the user, `summary` is one line of it. A `consequence` of another rank's end is shown only where
    there is nothing better; `changed` says that another attempt will not meet the same end.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        print(text, file=sys.stderr)
        return
    now = time.time()
    details = {"py_callstack": text, "timestamp": str(int(now)), "seconds": now, "consequence": consequence}
    details["changed"] = changed
    with open(file, "w") as out:
        json.dump({"message": {"message": summary, "extraInfo": details}}, out)


def is_machines_fault(error: BaseException) -> bool:
    """Whether `error` says that another rank, a loader's worker or the device is gone, and nothing about the job."""
    if is_programs_fault(str(error)):
        return False
    kinds = _MACHINE & {kind.__name__ for kind in type(error).__mro__}
    if kinds:
        return not ("AcceleratorError" in kinds and any(sign in str(error) for sign in _CALL_SIGNS))
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _MACHINE_SIGNS)


def of_lost_worker(error: BaseException) -> str:
    """What to say, and do, where a process of a rank's DataLoader has died; "" of any other error."""
    if not isinstance(error, RuntimeError) or not str(error).startswith("DataLoader worker"):
        return ""
    said = str(error.__cause__ if "killed by signal" in str(error.__cause__) else error)
    if "Bus error" in said:
        why = (
            "shared memory is full: give /dev/shm more (docker run --shm-size=8g; in Kubernetes a volume of memory), or"
        )
    elif "Killed" in said:
        why = "the system kills so when the host's memory is full (dmesg tells): give the job more memory, or"
    else:
        why = "what the data set calls may have crashed (with workers=0 it says where), or memory was short:"
    return (
        f"a process that reads data has died ({said.split('. ')[0].strip().rstrip('.')}); {why} use fewer workers "
        "(Recipe(workers=...)), smaller batches or smaller samples"
    )


def is_programs_fault(last_words: str) -> bool:
    """Whether a device or its library ended a rank for what the program did, by what was said of it."""
    return any(sign in last_words for sign in _PROGRAM_SIGNS)


def restart_reason() -> str:
    """Why the launcher (ours or torchrun) has started this rank again; "" where it has not."""
    if not restarts():
        return ""
    return os.environ.get(RESTART_REASON) or "a rank had failed"


def users_words() -> list[str]:
    """The words of the command line as the user gave them: a rank that our launcher started has others of its own."""
    return list(json.loads(os.environ[COMMAND])) if COMMAND in os.environ else sys.argv[1:]
