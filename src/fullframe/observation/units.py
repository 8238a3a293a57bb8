"""Numbers for people: bytes, seconds, counts, to three digits or as the clock says them."""

import math

from fullframe.wording import GIB, MIB


def size_text(size: float) -> str:
    """Bytes: 14.2 GiB, 437 MiB, 2.4 KiB, 64 B, 0."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if abs(size) >= 0.1 * unit:
            return f"{size / unit:.3g} {name}" if abs(size) < 999.5 * unit else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} B" if size else "0"


def seconds_text(seconds: float) -> str:
    """Seconds of a step: 2.31 s, 546 ms, 80.1 us."""
    if abs(seconds) >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if abs(seconds) >= 1e-3 else f"{1e6 * seconds:.3g} us"


def duration_text(seconds: float) -> str:
    """Seconds of a run: 48 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def number_text(value: float) -> str:
    """Any number: four digits, and all of those before the point."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def share_text(share: float) -> str:
    """How far off: +3.1 %, -12 %, 0.0 %."""
    if abs(share) < 0.0005:
        return "0.0 %"
    return f"{100 * share:+.1f} %" if abs(share) < 0.1 else f"{100 * share:+.0f} %"
