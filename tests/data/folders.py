"""Small images, written and read back, whole and in parts."""

import numpy as np
import torch
from PIL import Image

from fullframe.data import SliceReader

H, W = 6, 9


def image(seed, size=(H, W)):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def write(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def require_parts_of(data, index, size):
    """Parts are the whole sample, cut: at the edges, in the middle, beyond a padded image."""
    assert isinstance(data, SliceReader) and data.size(index) == size
    full = data[index]
    for rows in (slice(0, 2), slice(1, size[0]), slice(size[0] - 1, size[0])):
        for columns in (slice(0, size[1]), slice(2, 5), slice(size[1] - 1, size[1])):
            part = data.read(index, rows, columns)
            assert part.keys() == full.keys()
            for key, value in full.items():
                wanted = value[..., rows, columns] if isinstance(value, torch.Tensor) else value
                assert torch.equal(part[key], wanted) if isinstance(value, torch.Tensor) else part[key] == wanted
