"""Segmentation and KITTI stereo folders: written small, read back, whole and in parts."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fullframe.data import IGNORED, KittiStereo, SegmentationFolder, SliceReader
from fullframe.errors import DataError

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
    with pytest.raises(DataError, match=r"1 files have no partner in .*masks, the first of them .*images/b\.png"):
        SegmentationFolder(segmentation)
    with pytest.raises(DataError, match=r"there is no image .*masks/b\.png"):
        data[1]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'fullframe\[data\]'"):
        data[0]


@pytest.fixture
def kitti(tmp_path):
    for name in ("000000_10", "000001_10"):
        for number, folder in enumerate(("image_2", "image_3")):
            write(tmp_path / folder / f"{name}.png", image(number))
        stored = np.random.default_rng(5).integers(0, 65536, (H, W)).astype(np.uint16)
        stored[0, :3] = 0, 256, 65535
        write(tmp_path / "disp_occ_0" / f"{name}.png", stored)
    write(tmp_path / "image_2" / "000000_11.png", image(9))  # the next frame has no disparity
    return tmp_path


def test_kitti(kitti):
    data = KittiStereo(kitti)
    assert len(data) == 2
    sample = data[0]
    assert torch.equal(sample["right"], torch.from_numpy(image(1)).permute(2, 0, 1).float() / 255)
    assert sample["disparity"][0, 0, :3].tolist() == [0, 1, 65535 / 256], "16 bits are kept"
    assert sample["valid"][0, 0, :3].tolist() == [False, True, True]
    assert sample["name"] == "000000_10"
    require_parts_of(data, 0, (H, W))
    padded = KittiStereo(kitti, pad_to=(H + 2, W + 1))
    assert not padded[0]["valid"][:, H:].any() and padded[0]["left"].shape == (3, H + 2, W + 1)
    require_parts_of(padded, 1, (H + 2, W + 1))


def test_kitti_without_disparity(kitti):
    write(kitti / "image_3" / "000000_11.png", image(9))
    data = KittiStereo(kitti, disparity=None)
    assert len(data) == 3 and set(data[1]) == {"left", "right", "name"}


def test_kitti_names_what_is_missing(kitti):
    (kitti / "image_3" / "000001_10.png").unlink()
    with pytest.raises(DataError, match=r"no file .*image_3/000001_10\.png, which .*disp_occ_0/000001_10\.png needs"):
        KittiStereo(kitti)
    with pytest.raises(DataError, match=r"no folder .*image_2/image_2; give the folder that holds image_2/ as root"):
        KittiStereo(kitti / "image_2")
    with pytest.raises(DataError, match=r"there is no folder .*disp_noc_0"):
        KittiStereo(kitti, disparity="disp_noc_0")
