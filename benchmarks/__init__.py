"""The benchmarks, one folder a question, and the line about the machine that every result carries."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

from rich.console import Console


def reader() -> Console:
    """The terminal, or 120 columns where the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def machine() -> str:
    """Processor, cores and memory of this machine, and the versions that matter."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].split(":", 1)[1].strip() if names else platform.processor()
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{processor}, {os.cpu_count()} cores, {gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}"
    )
