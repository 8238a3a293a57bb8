"""The GPUs of this machine and who holds memory on them, as lines of a terminal and as findings."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from fullframe.observation.gpus import Gpu
from fullframe.observation.summary import Finding
from fullframe.observation.units import size_text
from fullframe.observation.watch.drawing import Glyphs, bar

_LABEL, _VALUE = 28, 34


def gpu_lines(gpus: Sequence[Gpu], width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """A bar for each GPU, its processes below it, and what is wrong with them; at most `height` lines."""
    lines = []
    for gpu in gpus:
        label = Text(f"GPU {gpu.index}  {gpu.name}", "bold")
        label.truncate(_LABEL - 1)
        label.pad_right(_LABEL - len(label))
        busy = f", {gpu.percent:.0f} % busy" if gpu.percent is not None else ""
        held = bar([("activation", gpu.used_bytes)], gpu.total_bytes, max(width - _LABEL - _VALUE, 8),
                   glyphs._replace(has_colours=True))  # fmt: skip
        lines.append(label + held + Text(f" {size_text(gpu.used_bytes)} of {size_text(gpu.total_bytes)}{busy}"))
        for process in gpu.processes:
            size = size_text(process.bytes) if process.bytes is not None else "not told"
            rank = f"rank {process.rank}  " if process.rank is not None else ""
            lines.append(Text(f"  {process.pid:>8}  {process.user:<10} {size:>10}  {rank}{process.command}"))
            if process.trouble:
                end = f"; to end it: {process.remedy}" if process.remedy else ""
                lines.append(Text(f"            {process.trouble}: {process.text}{end}", "yellow"))
        if not gpu.processes:
            lines.append(Text("            nobody holds memory here", "grey62"))
    for line in lines:
        line.truncate(width, overflow="crop")
    if len(lines) > height:
        lines = [*lines[: height - 1], Text(f"and {len(lines) - height + 1} lines more; --once shows all")]
    return lines


def gpu_findings(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """What is wrong with the processes."""
    for gpu in gpus:
        for process in gpu.processes:
            if process.trouble == "orphan":
                size = size_text(process.bytes or 0)
                yield Finding(
                    "warn", f"GPU {gpu.index}: {process.text} and holds {size}", f"to end it: {process.remedy}"
                )
            elif process.trouble:
                yield Finding("warn", process.text)
