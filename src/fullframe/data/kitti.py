"""Stereo pairs of the KITTI 2015 benchmark (Menze and Geiger, CVPR 2015), as its archive is unpacked."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from fullframe.data.images import image_size, padded_size, read_image, read_plane, whole
from fullframe.errors import DataError

_UNITS = 256.0  # a disparity is stored as 16 bits, in 1/256 pixel; 0 is "not measured"


class KittiStereo(Dataset[dict[str, Any]]):
    """`root`/image_2 and image_3 (the left and right camera), and `root`/`disparity`; `root` is mostly .../training.

    left, right: (3, H, W) `dtype`, in 0 to 1 unless it is uint8. disparity: (1, H, W) float32 in pixels of the left
    image. valid: (1, H, W), false where it was not measured. name: the file's stem. Only the frames with a disparity
    (`_10` of the benchmark) are samples; `disparity=None`, for the testing folder, takes all and gives images only.
    The images differ in size: with `pad_to` (H, W), e.g. (376, 1242), rows below and columns right of a smaller one
    are 0 and not valid, so that several make a batch. Raises DataError for a folder or a file that is missing.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        disparity: str | None = "disp_occ_0",
        pad_to: tuple[int, int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        root = Path(root)
        self._folders = {"left": root / "image_2", "right": root / "image_3"}
        if disparity is not None:
            self._folders["disparity"] = root / disparity
        for folder in self._folders.values():
            if not folder.is_dir():
                raise DataError(f"there is no folder {folder}; give the folder that holds {folder.name}/ as root")
        listed = self._folders["left" if disparity is None else "disparity"]
        self._names = sorted(path.stem for path in listed.glob("*.png"))
        if not self._names:
            raise DataError(f"{listed} holds no .png file")
        for name in self._names:
            for folder in self._folders.values():
                if not (folder / f"{name}.png").is_file():
                    raise DataError(f"there is no file {folder / name}.png, which {listed / name}.png needs")
        self._pad_to, self._dtype = pad_to, dtype

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.read(index, *whole(self.size(index)))

    def size(self, index: int) -> tuple[int, int]:
        """(H, W) of the sample."""
        paths = [folder / f"{self._names[index]}.png" for folder in self._folders.values()]
        sizes = [image_size(path) for path in paths]
        if len(set(sizes)) > 1:
            raise DataError(f"{paths[0]} and what belongs to it have different sizes: {sizes}")
        return padded_size(sizes[0], self._pad_to, paths[0])

    def read(self, index: int, rows: slice, columns: slice) -> dict[str, Any]:
        """The sample's part in `rows` and `columns`."""
        name = self._names[index]
        sample: dict[str, Any] = {"name": name}
        for side in ("left", "right"):
            sample[side] = read_image(self._folders[side] / f"{name}.png", rows, columns, self._dtype)
        if "disparity" in self._folders:
            stored = read_plane(self._folders["disparity"] / f"{name}.png", rows, columns).astype("float32")
            sample["disparity"] = torch.from_numpy(stored)[None] / _UNITS
            sample["valid"] = sample["disparity"] > 0
        return sample
