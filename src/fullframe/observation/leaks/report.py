"""A leak in words: what grows, by how much, which line made it, which one keeps it, and what to do."""

from dataclasses import asdict, dataclass
from typing import Any

from fullframe.observation.leaks.origin import Line, shortened
from fullframe.wording import plural

_KIB = 1024

_REMEDY = {
    "graph": "add loss.detach() or loss.item() in place of the tensor, or reset it",
    "graphs": "keep .detach() or .item() of it, or empty it",
    "evaluation": "compute under torch.no_grad(), and keep numbers or what is needed of the outputs alone",
    "outputs": "keep what is needed of it, on the CPU, or empty it",
    "activations": "keep it in a local variable, or empty it in each forward",
    "growing tensor": "write into a tensor of fixed size, or cut it to a window",
    "hooks": "register it once, or call .remove() on what registering returns",
    "closures": "capture numbers in place of tensors, or drop the functions once they are called",
    "cache": "bound it (maxsize), or make its keys plain values",
    "arrays": "write them to disk, or keep what is needed of them",
    "objects": "keep what is needed of it, or empty it",
    "workers": "let __getitem__ keep nothing in the data set",
}


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Something that grows with every step.

    kind: "graph" (a tensor whose graph reaches back over the steps), "graphs" (tensors with their graphs), "outputs",
        "activations" (of either, kept by a module), "growing tensor", "hooks", "closures", "cache", "arrays",
        "objects", "evaluation" (whatever grows at evaluations alone), "workers" (memory of the loader's processes)
    path, line: what made it, or keeps it where that was not seen
    kept_at: where it is kept: its name and the line
    bytes_per_step, nodes_per_step: what is added in each step, or evaluation: bytes, nodes of autograd's graph
    after_step: the step after which it was found, counted from 1
    text: all of it in a sentence
    """

    kind: str
    path: str
    line: int
    kept_at: str
    bytes_per_step: int
    nodes_per_step: int
    after_step: int
    text: str

    def record(self) -> dict[str, Any]:
        """The line of metrics.jsonl."""
        record = asdict(self)
        return {"leak": record.pop("kind"), **record}


def leak(
    kind: str, name: str, made: Line | None, kept: Line | None, bytes: int, nodes: int, step: int, every: str = "step"
) -> Leak:
    """The leak of what has this name, per `every`."""
    where = f"{name} ({kept})" if kept is not None else name
    line = made or kept
    parts = [_size(bytes)] * (bytes > 0) + [plural(nodes, "graph node")] * (nodes > 0)
    text = f"leak: `{name}` grows with every {every}" + f" by {' and '.join(parts)}" * bool(parts)
    if kept is not None:
        text += f"; kept at {kept} ({kept.text})" if kept.text else f"; kept at {kept}"
    if made is not None and made != kept:
        text += f", made at {made} ({made.text})" if made.text else f", made at {made}"
    return Leak(
        kind=kind,
        path="" if line is None else shortened(line.file),
        line=0 if line is None else line.number,
        kept_at=where,
        bytes_per_step=bytes,
        nodes_per_step=nodes,
        after_step=step,
        text=f"{text}; {_REMEDY[kind]}",
    )


def _size(bytes: int) -> str:
    if bytes < _KIB:
        return f"{bytes} bytes"
    return f"{bytes / _KIB:.0f} KiB" if bytes < _KIB**2 else f"{bytes / _KIB**2:.1f} MiB"
