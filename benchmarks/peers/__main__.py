"""`python -m benchmarks.peers [--json] [--quick] [--peers-path DIR]`: asks every library every case, prints a table."""

import math
import sys
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks import machine, show
from benchmarks.peers.cases import CASES, Case
from benchmarks.peers.launch import Failure, on_ranks
from benchmarks.peers.libraries import LIBRARIES, OURS, RANKS, loaded
from benchmarks.peers.measure import TOLERANCE, exactness, performance, plain_microseconds

SECONDS = {"op": 20.0, "model": 60.0}  # until a case that does not answer is a hang


def verdict(library: str, case: Case, width: int, seconds: float) -> dict[str, Any]:
    """`exact`, `wrong`, `error` or `hang`, with what there is to say about it."""
    found = on_ranks(exactness, library, case.name, width, seconds=seconds)
    if isinstance(found, Failure):
        return {"verdict": str(found), "message": found.message}
    error, where = max(found)
    if math.isinf(error):
        return {"verdict": "wrong (shape)", "max_error": None, "of": where}
    return {"verdict": "exact" if error <= TOLERANCE else f"wrong ({error:.0e})", "max_error": error, "of": where}


def measured(case: Case, library: str, rounds: int) -> dict[str, Any]:
    """One row: the verdicts by width, and, where the first is exact, bytes and times."""
    seconds = SECONDS["op" if case.tiny else "model"]
    widths = {str(width): verdict(library, case, width, seconds) for width in case.widths}
    row: dict[str, Any] = {"library": library, "widths": widths}
    if widths[str(case.widths[0])]["verdict"] == "exact":
        found = on_ranks(performance, library, case.name, rounds, seconds=2 * seconds)
        row |= {"performance": str(found)} if isinstance(found, Failure) else found[0]
    return row


def asked(cases: list[Case], skipped: dict[str, str | None], rounds: int, console: Console) -> list[dict[str, Any]]:
    """All rows of all cases, told on `console` as they come."""
    found = []
    for case in cases:
        plain = on_ranks(plain_microseconds, case.name, rounds, seconds=60.0)
        rows = [measured(case, name, rounds) for name, reason in skipped.items() if reason is None]
        plain_call = None if isinstance(plain, Failure) else plain[0]
        found.append({"case": case.name, "plain_microseconds": plain_call, "rows": rows})
        for row in rows:
            said = ", ".join(each["verdict"] for each in row["widths"].values())
            console.print(f"{case.name}: {row['library']}: {said}", highlight=False, markup=False, soft_wrap=True)
    return found


def coloured(found: dict[str, Any]) -> str:
    """A verdict for the terminal."""
    text = found["verdict"]
    colour = "green" if text == "exact" else "red" if text.startswith("wrong") else "yellow"
    return f"[{colour}]{text}[/]"


def print_table(found: dict[str, Any], console: Console) -> None:
    """One table: a section a case, a line a library."""
    console.print(found["machine"], highlight=False)
    table = Table(
        title=f"Split in {RANKS} along the width, against one process; ops at the first width, models at the second",
        box=SIMPLE,
    )
    for heading in ("case", "library", "W = 64, 256", "W = 50, 200", "W = 37, 150"):
        table.add_column(heading)
    for heading in ("time over ours", "bytes a step", "µs a call"):
        table.add_column(heading, justify="right")
    for case in found["cases"]:
        for number, row in enumerate(case["rows"]):
            table.add_row(
                case["case"] if number == 0 else "",
                row["library"],
                *(coloured(each) for each in row["widths"].values()),
                f"{row['ratio']:.2f}" if "ratio" in row else "",
                f"{row['bytes']:,}" if "bytes" in row else str(row.get("performance", "")),
                f"{row['microseconds']:.0f}" if "microseconds" in row else "",
            )
        if case["plain_microseconds"] is not None:
            table.add_row("", "plain torch", "", "", "", "", "", f"{case['plain_microseconds']:.0f}")
        table.add_section()
    console.print(table)
    for library, reason in found["skipped"].items():
        console.print(f"{library}: skipped, {reason}", highlight=False, markup=False)


def main(json: bool = False, quick: bool = False, peers_path: Path | None = None, only: str = "") -> None:
    """The same ops and models on fullframe and on other libraries that split images.

    Args:
        json: Print one JSON object and nothing else.
        quick: A few rounds of timing: for trying it, not for a number to keep.
        peers_path: The folder where the other libraries are installed (README.md says how).
        only: Only cases whose name holds this text.
    """
    if peers_path is not None:
        if not peers_path.is_dir():
            raise SystemExit(f"--peers-path {peers_path} is not a folder; README.md says how to make it")
        sys.path.append(str(peers_path.resolve()))
    torch.set_num_threads(1)
    state = loaded()
    cases = [case for case in CASES if only in case.name]
    found: dict[str, Any] = {
        "machine": machine(),
        "ranks": RANKS,
        "quick": quick,
        "tolerance": TOLERANCE,
        "ours": OURS,
        "libraries": list(LIBRARIES),
        "skipped": {name: reason for name, reason in state.items() if reason is not None},
        "cases": asked(cases, state, 5 if quick else 21, Console(stderr=True)),
    }
    show(found, print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
