"""What a checkpoint's folder holds: its tensors, where their parts lie, its files' checksums, and plain facts. JSON.

torch.distributed.checkpoint keeps this as a pickle, which runs whatever the file's author wants; JSON does not.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fullframe.errors import CheckpointError
from fullframe.training.checkpoints.safetensors_files import DTYPES, FileRecord, Shape

FORMAT = "fullframe checkpoint 2"
MANIFEST = "manifest.json"
_FILE = re.compile(r"rank-\d+\.safetensors")  # a name with a slash would lead out of the folder


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the file it lies in."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredTensor(Shape):
    """A whole tensor, and the files that hold its parts."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a checkpoint's folder says of itself."""

    step: int
    facts: Mapping[str, Any]  # everything that is no tensor; plain JSON values
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        """The manifest as one JSON object, with a checksum of itself."""
        body = {
            "step": self.step,
            "facts": self.facts,
            "tensors": {name: asdict(t) | {"dtype": dtype_name(t.dtype)} for name, t in self.tensors.items()},
            "files": {name: asdict(record) for name, record in self.files.items()},
        }
        return json.dumps({"format": FORMAT, "blake2b": _checksum(body), "checkpoint": body}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read what `to_json` wrote; raises CheckpointError on anything else."""
        try:
            whole = json.loads(text)
            kind, body = whole["format"], whole["checkpoint"]
            intact = whole["blake2b"] == _checksum(body)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from error
        if kind != FORMAT:
            raise CheckpointError(f"its format is {kind!r}, this version reads {FORMAT!r}")
        if not intact:
            raise CheckpointError(f"wrong checksum of {MANIFEST}")
        try:
            files = {name: FileRecord(**record) for name, record in body["files"].items()}
            tensors = {name: _tensor(value) for name, value in body["tensors"].items()}
            wrong = {chunk.file for t in tensors.values() for chunk in t.chunks} - set(files)
            wrong |= {name for name in files if not _FILE.fullmatch(name)}
            if wrong:
                raise ValueError(f"files {sorted(wrong)}")
            return cls(step=body["step"], facts=body["facts"], tensors=tensors, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{MANIFEST} does not describe a checkpoint: {error}") from error


def key_in_file(name: str, tensor: StoredTensor, chunk: Chunk) -> str:
    """The name of a chunk in its file: the tensor's own where it is the whole tensor, else with the chunk's box."""
    if chunk.sizes == tensor.sizes:
        return name
    box = zip(chunk.offsets, chunk.sizes, strict=True)
    return f"{name}[{','.join(f'{start}:{start + size}' for start, size in box)}]"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; raises CheckpointError or OSError."""
    return Manifest.from_json((folder / MANIFEST).read_text(errors="replace"))


def dtype_name(dtype: torch.dtype) -> str:
    """Without the "torch." before it."""
    return str(dtype).removeprefix("torch.")


_NAMED_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}


def _tensor(value: Any) -> StoredTensor:
    chunks = [Chunk(tuple(chunk["offsets"]), tuple(chunk["sizes"]), chunk["file"]) for chunk in value["chunks"]]
    return StoredTensor(_NAMED_DTYPES[value["dtype"]], tuple(value["sizes"]), tuple(chunks))


def _checksum(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
