"""Segmentation folders: written small, read back, whole and in parts."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fullframe.data import IGNORED, SegmentationFolder
from fullframe.errors import DataError
from tests.data.folders import H, W, image, require_parts_of, write


@pytest.fixture
def segmentation(tmp_path):
    for number, name in enumerate(("b", "a")):
        write(tmp_path / "images" / f"{name}.png", image(number))
        write(tmp_path / "masks" / f"{name}.png", image(number)[..., 0] % 5)
    (tmp_path / "images" / "readme.txt").write_text("no image")
    return tmp_path


def test_segmentation(segmentation):
    data = SegmentationFolder(segmentation)
    assert [sample["name"] for sample in data] == ["a", "b"] and len(data) == 2
    sample = data[0]
    assert torch.equal(sample["image"], torch.from_numpy(image(1)).permute(2, 0, 1).float() / 255)
    assert sample["mask"].dtype == torch.int64 and torch.equal(sample["mask"], torch.from_numpy(image(1)[..., 0]) % 5)
    assert SegmentationFolder(segmentation, dtype=torch.uint8)[0]["image"].dtype == torch.uint8
    require_parts_of(data, 0, (H, W))


def test_segmentation_of_several_sizes(segmentation):
    write(segmentation / "images" / "c.png", image(3, (8, 4)))
    write(segmentation / "masks" / "c.png", image(3, (8, 4))[..., 0] % 2 == 1)  # one bit a pixel
    data = SegmentationFolder(segmentation, pad_to=(8, W))
    sample = data[2]
    assert sample["mask"][:, :4].max() == 1 and (sample["mask"][:, 4:] == IGNORED).all()
    assert sample["image"].shape == (3, 8, W) and not sample["image"][:, :, 4:].any()
    require_parts_of(data, 0, (8, W))
    require_parts_of(data, 2, (8, W))
    with pytest.raises(DataError, match=r"c\.png is 8 x 4, larger than pad_to=\(6, 9\)"):
        SegmentationFolder(segmentation, pad_to=(H, W))[2]


def test_palette_and_other_masks(segmentation):
    indices = Image.fromarray(np.full((H, W), 3, np.uint8))
    indices.putpalette([7, 7, 7] * 256)
    indices.save(segmentation / "masks" / "a.png")
    assert (SegmentationFolder(segmentation)[0]["mask"] == 3).all(), "the index, not the color"
    write(segmentation / "masks" / "a.png", image(1))
    with pytest.raises(DataError, match=r"a\.png is of mode RGB; one channel of whole numbers"):
        SegmentationFolder(segmentation)[0]
    write(segmentation / "masks" / "a.png", image(1, (H, 4))[..., 0])
    with pytest.raises(DataError, match=r"a\.png is 6 x 9, but .*a\.png is 6 x 4"):
        SegmentationFolder(segmentation)[0]


def test_what_is_missing_is_named(segmentation, monkeypatch):
    with pytest.raises(DataError, match=r"there is no folder .*elsewhere/images"):
        SegmentationFolder(segmentation / "elsewhere")
    (segmentation / "images" / "a.png").write_bytes((segmentation / "images" / "a.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"a\.png cannot be read: .*; fetch it again"):
        SegmentationFolder(segmentation)[0]
    write(segmentation / "images" / "a.jpg", image(1))
    with pytest.raises(
        DataError, match=r"a\.jpg and .*a\.png have the same stem|a\.png and .*a\.jpg have the same stem"
    ):
        SegmentationFolder(segmentation)
    (segmentation / "images" / "a.jpg").unlink()
    data = SegmentationFolder(segmentation)
    (segmentation / "masks" / "b.png").unlink()
    with pytest.raises(DataError, match=r"1 file has no partner in .*masks, the first of them .*images/b\.png"):
        SegmentationFolder(segmentation)
    with pytest.raises(DataError, match=r"there is no image .*masks/b\.png"):
        data[1]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'fullframe\[data\]'"):
        data[0]
