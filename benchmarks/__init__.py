"""The benchmarks, one folder a question, and the line about the machine that every result carries."""

import json as json_text
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console


def reader() -> Console:
    """The terminal, or 120 columns where the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def show(found: Mapping[str, Any], print_table: Callable[[Any, Console], None], json: bool) -> None:
    """What was found, as one JSON object or as a table."""
    if json:
        print(json_text.dumps(found))
    else:
        print_table(found, reader())


def machine() -> str:
    """Processor, cores and memory of this machine, and the versions that matter."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].split(":", 1)[1].strip() if names else platform.processor()
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{processor}, {os.cpu_count()} cores, {gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}"
    )
