"""A traced step for other programs: JSON lines, a Chrome trace for Perfetto, a snapshot for PyTorch's memory_viz page.

A trace has no clock: what is a microsecond in these files is one allocation or release. Real and simulated steps are
written alike, so that one lies over the other.
"""

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullframe.simulation.memory.account import category_of, phase_of
from fullframe.simulation.memory.trace import Block, Trace
from fullframe.training.observers import Observed

SUFFIXES = (".jsonl", ".perfetto.json", ".pickle")


def write_trace(trace: Trace, path: Path) -> list[Path]:
    """All three, as `path` with SUFFIXES; the files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines, chrome, snapshot = (path.with_name(path.name + suffix) for suffix in SUFFIXES)
    lines.write_text("".join(json.dumps(event) + "\n" for event in events(trace)))
    chrome.write_text(json.dumps({"traceEvents": list(chrome_events(trace)), "displayTimeUnit": "ms"}))
    with open(snapshot, "wb") as file:
        pickle.dump(memory_snapshot(trace), file)
    return [lines, chrome, snapshot]


def write_of_run(run: Observed, trace: Trace) -> None:
    """A followed step of this rank, into trace/ of the run's directory."""
    files = write_trace(trace, run.run_dir / "trace" / f"rank{run.rank}")
    run.say(f"wrote {', '.join(str(path) for path in files)}")


def events(trace: Trace) -> Iterator[dict[str, Any]]:
    """One for each allocation and release, in order; `block` tells which belong together."""
    for number, block in enumerate(trace.events):
        yield {
            "event": "alloc" if number == block.born else "free",
            "block": block.born,
            "bytes": block.bytes,
            "category": category_of(trace, block),
            "phase": phase_of(trace, block),
            "module": block.module,
            "shape": list(block.shape),
            "dtype": block.dtype,
        }


def chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """The bytes held by category as a counter, and the phases as slices above it."""
    held, phase, since = Counter[str](), "", 0
    for number, block in enumerate(trace.events):
        if number == block.born:
            now = phase_of(trace, block)
            if now != phase:
                yield from _slice(phase, since, number)
                phase, since = now, number
        held[category_of(trace, block)] += block.bytes if number == block.born else -block.bytes
        yield {"name": "memory, bytes", "ph": "C", "ts": number, "pid": 0, "tid": 0, "args": dict(held)}
    yield from _slice(phase, since, len(trace.events))


def _slice(phase: str, since: int, until: int) -> Iterator[dict[str, Any]]:
    if phase:
        yield {"name": phase, "ph": "X", "ts": since, "dur": until - since, "pid": 0, "tid": 0}


def memory_snapshot(trace: Trace) -> dict[str, Any]:
    """In the form of `torch.cuda.memory._dump_snapshot`, which https://pytorch.org/memory_viz reads.

    Categories, phases and modules stand where the frames of a stack do. Nothing is ever at the address of another.
    """
    addresses: dict[Block, int] = {}
    told, end = list[dict[str, Any]](), 1 << 20
    for number, block in enumerate(trace.events):
        if number == block.born:
            addresses[block], end = end, end + -(-max(block.bytes, 1) // 512) * 512
        frames = [
            {"name": block.module or "(no module)", "filename": phase_of(trace, block), "line": 0},
            {"name": category_of(trace, block), "filename": f"{list(block.shape)} {block.dtype}", "line": 0},
        ]
        born = number == block.born
        told += [
            {
                "action": action,
                "addr": addresses[block],
                "size": block.bytes,
                "stream": 0,
                "time_us": number,
                "frames": frames,
            }
            for action in (("alloc",) if born else ("free_requested", "free_completed"))
        ]
    return {"segments": [], "device_traces": [told], "allocator_settings": {}, "external_annotations": []}
