"""Tensors in safetensors files, written in one pass with a checksum and kept only once they are on the disk."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullframe.ranks.raw_bytes import in_bytes

# https://huggingface.co/docs/safetensors: 8 bytes of header length, a JSON header, the tensors' bytes.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksum of a file."""

    size_bytes: int
    blake2b: str  # 128 bits, hexadecimal


@dataclass(frozen=True)
class Shape:
    """Dtype and sizes of a tensor that is written later."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.sizes) * self.dtype.itemsize


def write_tensors(
    path: Path, shapes: Mapping[str, Shape], take: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write what `take(name)` gives, one tensor in memory at a time; returns once the file is on the disk."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    # Large elements first: then each tensor starts at a multiple of its element size.
    order = sorted(shapes, key=lambda name: (-shapes[name].dtype.itemsize, name))
    end = 0
    for name in order:
        shape = shapes[name]
        start, end = end, end + shape.size_bytes
        header[name] = {"dtype": DTYPES[shape.dtype], "shape": shape.sizes, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "wb", buffering=0) as file:

        def write(contents: memoryview) -> None:
            for start in range(0, len(contents), _PIECE_BYTES):
                piece = contents[start : start + _PIECE_BYTES]
                digest.update(piece)
                while piece:
                    piece = piece[file.write(piece) :]

        write(memoryview(len(text).to_bytes(8, "little") + text))
        for name in order:
            write(_bytes_of(take(name)))
        os.fsync(file.fileno())
        size_bytes = file.tell()
    return FileRecord(size_bytes=size_bytes, blake2b=digest.hexdigest())


def record_of(path: Path) -> FileRecord:
    """Size and checksum of the file as it is now; reads all of it."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return FileRecord(size_bytes=file.tell(), blake2b=digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder written to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = in_bytes(tensor.detach().cpu().contiguous()).numpy()
    return memoryview(array)
