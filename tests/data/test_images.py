"""Parts of images, also beyond their edges."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fullframe.data.images import image_size, padded_size, read_image, read_plane, whole
from fullframe.errors import DataError

PLANE = np.arange(12, dtype=np.uint8).reshape(3, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Image.fromarray(PLANE).save(tmp_path / "plane.png")
    return tmp_path / "plane.png"


def test_a_part_beyond_the_image_is_filled(path: Path) -> None:
    assert image_size(path) == (3, 4)
    assert np.array_equal(read_plane(path, *whole((3, 4))), PLANE)
    part = read_plane(path, slice(2, 5), slice(3, 5), beyond=9)
    assert part.tolist() == [[11, 9], [9, 9], [9, 9]] and part.dtype == np.uint8
    for rows, columns in ((slice(3, 5), slice(0, 2)), (slice(5, 9), slice(0, 2)), (slice(0, 2), slice(6, 9))):
        assert (read_plane(path, rows, columns, beyond=9) == 9).all(), "a rank whose part is padding alone"


def test_an_image_has_three_channels_in_0_to_1_or_as_stored(path: Path) -> None:
    stored = read_image(path, slice(1, 2), slice(0, 6), torch.uint8)
    assert stored.shape == (3, 1, 6) and stored[2, 0].tolist() == [4, 5, 6, 7, 0, 0]
    scaled = read_image(path, slice(1, 2), slice(0, 6), torch.float64)
    assert torch.equal(scaled, stored.double() / 255) and scaled.is_contiguous()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_an_image_of_more_than_8_bits_is_refused(tmp_path: Path, dtype: type) -> None:
    deep = tmp_path / "deep.tif"
    Image.fromarray((PLANE * 4096.0).astype(dtype)).save(deep)
    with pytest.raises(DataError, match=r"above 255 .* 8 bits"):
        read_image(deep, *whole((3, 4)), torch.float32)


def test_sizes_are_required(path: Path) -> None:
    assert padded_size((3, 4), None, path) == (3, 4) and padded_size((3, 4), (3, 5), path) == (3, 5)
    for smaller in ((4, 3), (2, 9)):
        with pytest.raises(DataError, match="larger than pad_to"):
            padded_size((3, 4), smaller, path)
