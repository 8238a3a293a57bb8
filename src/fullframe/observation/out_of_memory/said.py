"""What an allocator says when it has no more, in numbers: torch's for CUDA and its kin, and the CPU's.

Read in messages that people have posted; on a GPU none was met here yet.
"""

import re

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
_SAYINGS = {
    "asked_bytes": f"tried to allocate {_SIZE}",
    "limit_bytes": f"total capacity of {_SIZE}",
    "free_bytes": f"of which {_SIZE} is free",
    "process_bytes": f"this process has {_SIZE} memory in use",
    "allocated_bytes": f"{_SIZE} is allocated by PyTorch",
    "unused_bytes": f"{_SIZE} is reserved by PyTorch but unallocated",
}
_PROCESS = re.compile(rf"\bProcess \d+ has {_SIZE} memory in use")


def sizes_said(error: str) -> dict[str, int]:
    """Bytes by what they are, as far as an error's text tells.

    asked_bytes:     what did not fit
    limit_bytes:     of the device, of which free_bytes are free
    process_bytes:   what this process has of it, and others_bytes what others have
    allocated_bytes: in tensors; and unused_bytes what torch's allocator holds beside them
    """
    found = {}
    for name, form in _SAYINGS.items():
        match = re.search(form, error, re.IGNORECASE)
        if match is not None:
            found[name] = _bytes(*match.groups())
    if "process_bytes" in found:  # else this process may be among those that have a number, as from within a container
        found["others_bytes"] = sum(_bytes(*match.groups()) for match in _PROCESS.finditer(error))
    return found


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
