"""`python -m benchmarks.lint [--json] [--files 400]`: how fast `doctor lint` reads packages, and what it finds.

Seconds are of the processor, one core; those of `ast.parse` alone, taken in the same run, tell how busy the machine is.
"""

import ast
import importlib.util
import json as json_text
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from benchmarks import machine, show
from fullframe.doctor.finding import Finding
from fullframe.doctor.lint.check import check_source
from fullframe.doctor.lint.configuration import Configuration

PACKAGES = ("accelerate", "lightning_fabric", "torch", "transformers")


def measured(files: int, seed: int, out: Path | None) -> dict[str, Any]:
    """Lines a second and findings for each package; `files` of each are drawn."""
    rules = Configuration().rules()
    found: list[Finding] = []
    packages = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        paths = sorted(folder.rglob("*.py"))
        random.Random(seed).shuffle(paths)
        sources = [(str(p.relative_to(folder.parent)), p.read_text(encoding="utf-8-sig")) for p in paths[:files]]
        lines = sum(source.count("\n") for _, source in sources)
        start = time.process_time()
        here = [f for path, source in sources for f in check_source(source, path, rules)]
        checked = time.process_time() - start
        packages[name] = {
            "files": len(sources),
            "lines": lines,
            "lines_per_second": lines / checked,
            "parse_lines_per_second": lines / _parse_seconds(sources),
            "findings": len(here),
        }
        found += here
    if out is not None:
        out.write_text(json_text.dumps([f.as_dict() for f in found], indent=1))
    return {
        "machine": machine(),
        "rules": len(rules),
        "packages": packages,
        "codes": dict(sorted(Counter(f.code for f in found).items())),
    }


def _parse_seconds(sources: list[tuple[str, str]]) -> float:
    start = time.process_time()
    for _, source in sources:
        try:
            ast.parse(source)
        except SyntaxError:
            continue
    return time.process_time() - start


def print_lines(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    for name, p in found["packages"].items():
        console.print(
            f"{name}: {p['files']} files, {p['lines']} lines, {p['lines_per_second']:.0f} lines a second "
            f"(ast.parse alone {p['parse_lines_per_second']:.0f}), {p['findings']} findings",
            highlight=False,
        )
    console.print(", ".join(f"{code} {count}" for code, count in found["codes"].items()), highlight=False)


def main(json: bool = False, files: int = 400, seed: int = 0, out: Path | None = None) -> None:
    """Speed and findings of `doctor lint` on installed packages.

    Args:
        json: Print one JSON object and nothing else.
        files: How many files of each package are drawn.
        seed: Of the draw.
        out: Write the findings here, for judging them.
    """
    show(measured(files, seed, out), print_lines, json)


if __name__ == "__main__":
    tyro.cli(main)
