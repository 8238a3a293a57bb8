"""KITTI stereo folders: written small, read back, whole and in parts."""

import numpy as np
import pytest
import torch

from fullframe.data import KittiStereo
from fullframe.errors import DataError
from tests.data.folders import H, W, image, require_parts_of, write


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
