"""Images and masks from files, or a part of one. JPEG and PNG are decoded whole; only the part is converted and kept.

Pillow is loaded on first use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullframe.errors import DataError


def image_size(path: Path) -> tuple[int, int]:
    """(H, W), from the file's header."""
    with _opened(path) as image:
        return image.height, image.width


def read_image(path: Path, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """(3, rows, columns): as stored for uint8, else in 0 to 1; what lies beyond the image is 0."""
    with _opened(path) as image:
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            raise DataError(
                f"{path} is of mode {image.mode}, and all above 255 would be cut off there; store it in 8 bits, or "
                "read it in a data set of your own"
            )
        part = _part(image.convert("RGB") if image.mode != "RGB" else image, rows, columns, 0)
    values = torch.from_numpy(part).permute(2, 0, 1).contiguous()
    return values if dtype == torch.uint8 else values.to(dtype) / 255


def read_plane(path: Path, rows: slice, columns: slice, beyond: int = 0) -> np.ndarray[Any, Any]:
    """(rows, columns) of whole numbers: class ids, palette indices, 16-bit depths; `beyond` outside the image."""
    with _opened(path) as image:
        if image.mode not in ("1", "L", "P", "I") and not image.mode.startswith("I;16"):
            raise DataError(f"{path} is of mode {image.mode}; one channel of whole numbers is needed")
        return _part(image, rows, columns, beyond)


def padded_size(size: tuple[int, int], pad_to: tuple[int, int] | None, path: Path) -> tuple[int, int]:
    """The size of an image after padding; raises DataError where it is larger than `pad_to`."""
    if pad_to is None:
        return size
    if size[0] > pad_to[0] or size[1] > pad_to[1]:
        raise DataError(f"{path} is {size[0]} x {size[1]}, larger than pad_to={pad_to}; pad to the largest image")
    return pad_to


def whole(size: tuple[int, int]) -> tuple[slice, slice]:
    """All rows and columns of a frame of `size` (H, W)."""
    return slice(0, size[0]), slice(0, size[1])


def _part(image: Any, rows: slice, columns: slice, beyond: int) -> np.ndarray[Any, Any]:
    part = np.array(image.crop((columns.start, rows.start, columns.stop, rows.stop)))  # 0 beyond the image
    if beyond:
        part = part.astype(np.uint8) if part.dtype == bool else part  # a bool would hold no `beyond`
        part[max(image.height - rows.start, 0) :] = beyond
        part[:, max(image.width - columns.start, 0) :] = beyond
    return part


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs Pillow; pip install 'fullframe[data]'") from error
    try:
        with Image.open(path) as image:
            yield image
    except FileNotFoundError as error:
        raise DataError(f"there is no image {path}; check that the data set was unpacked whole") from error
    except (OSError, SyntaxError) as error:  # which is what Pillow says of a broken PNG
        raise DataError(f"the image {path} cannot be read: {error}; fetch it again") from error
