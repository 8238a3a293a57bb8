"""`python -m tests.hollow_gpu [--ranks N] -- ARGUMENTS OF PYTHON`: Python on hollow GPUs, one process or N ranks."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import tyro

from tests.hollow_gpu.build import HERE, build


def main(
    arguments: tyro.conf.Positional[tuple[str, ...]],
    ranks: int = 1,
    gpus: int = 4,
    bytes: int = 80 << 30,
    values: Literal["all", "small"] = "all",
) -> int:
    """Run Python with what follows; the exit code is that of the first rank that fails.

    Args:
        arguments: Those of Python, after --.
        ranks: Processes with RANK, WORLD_SIZE and so on set.
        gpus: That there seem to be.
        bytes: Memory of each.
        values: "small": large tensors hold zeros, so that real sizes cost neither time nor memory.
    """
    with hollow(gpus, bytes, values) as environment:
        if ranks == 1:
            return subprocess.run([sys.executable, *arguments], env=environment).returncode
        processes = [
            subprocess.Popen([sys.executable, *arguments], env=environment | of_rank)
            for of_rank in environments_of_ranks(ranks)
        ]
        return next((code for code in [process.wait() for process in processes] if code), 0)


@contextmanager
def hollow(gpus: int, bytes: int, values: str) -> Iterator[dict[str, str]]:
    """What processes need in their environment, as long as the folder of their messages is there."""
    library, root = build(), HERE.parents[1]
    with tempfile.TemporaryDirectory(prefix="hollow-gpu-", dir="/dev/shm") as messages:
        yield {
            **os.environ,
            "LD_PRELOAD": str(library),
            "LD_LIBRARY_PATH": str(library.parent),
            "PYTHONPATH": os.pathsep.join(map(str, (HERE / "start", root, root / "src"))),
            "HOLLOW_GPUS": str(gpus),
            "HOLLOW_BYTES": str(bytes),
            "HOLLOW_VALUES": values,
            "HOLLOW_MESSAGES": messages,
            "TORCH_DISABLE_NATIVE_JIT": "1",  # torch's kernels in Triton, which wants a real driver: there are others
        }


def environments_of_ranks(ranks: int) -> list[dict[str, str]]:
    """What torchrun would set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {name: str(value) for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()} for rank in range(ranks)
    ]


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
