"""Predicted memory held against what the ranks have measured."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fullframe.doctor.finding import Finding
from fullframe.doctor.probes import kinds
from fullframe.doctor.probes.notes import Memory, Notes
from fullframe.wording import GIB

# What is measured, the field of a prediction that it is held against, and what may be beside it: a CPU's process holds
# libraries and pages that its allocator keeps (0.2 to 0.6 GiB in benchmarks/planning), and the probes' own.
_MEASURES = {"allocated_bytes": ("peak_bytes", 0.05), "process_bytes": ("device_bytes", 1.0)}
_SHARE = 1.25


def judged_memory(notes: Sequence[Notes], predicted: Mapping[str, Any]) -> Iterator[Finding]:
    """A finding where a rank held clearly more than was predicted."""
    for rank in notes:
        for event in rank.of(Memory):
            for name, (key, beside_gib) in _MEASURES.items():
                most, expected = event.measured.get(name), predicted.get(key)
                if most and expected and most > _SHARE * expected + beside_gib * GIB:
                    yield kinds.MEMORY_OFF.found(
                        f"rank {rank.rank} held {most / GIB:.3g} GiB, {expected / GIB:.3g} GiB were predicted",
                        evidence=", ".join(f"{n} {b / GIB:.3g} GiB" for n, b in predicted.get("bytes", {}).items()),
                    )
                    return


def said_of_prediction(predicted: Mapping[str, Any]) -> str:
    """What was predicted, or why nothing was."""
    if "problem" in predicted:
        return f"no prediction: {predicted['problem']}"
    if not predicted:
        return ""
    whole, allocated = (predicted[key] / GIB for key in ("device_bytes", "peak_bytes"))
    return f"{whole:.3g} GiB predicted for a rank, {allocated:.3g} of it allocated"
