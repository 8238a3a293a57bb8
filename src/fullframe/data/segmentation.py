"""Semantic segmentation from two folders: images/ and masks/, files of the same stem belong together."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from fullframe.data.images import image_size, padded_size, read_image, read_plane, whole
from fullframe.errors import DataError

IGNORED = 255  # the class that losses leave out, by the custom of Cityscapes and PASCAL VOC
_IMAGES, _MASKS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}, {".png", ".bmp"}  # a lossy mask has wrong classes


class SegmentationFolder(Dataset[dict[str, Any]]):
    """`root`/images/x.jpg with `root`/masks/x.png, whose values (or palette indices) are class numbers.

    image: (3, H, W) `dtype`, in 0 to 1 unless it is uint8. mask: (H, W) int64. name: "x". With `pad_to` (H, W), rows
    below and columns right of a smaller image are 0 and of class `IGNORED`, so that images of several sizes make a
    batch. Raises DataError for a folder, an image or a mask that is missing.
    """

    def __init__(
        self, root: str | Path, *, pad_to: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        images, masks = _by_stem(Path(root) / "images", _IMAGES), _by_stem(Path(root) / "masks", _MASKS)
        for one, other, folder in ((images, masks, "masks"), (masks, images, "images")):
            alone = sorted(set(one) - set(other))
            if alone:
                count = "1 file has" if len(alone) == 1 else f"{len(alone)} files have"
                raise DataError(
                    f"{count} no partner in {Path(root) / folder}, the first of them {one[alone[0]]}; add what is "
                    "missing or take away what is there"
                )
        self._files = [(stem, images[stem], masks[stem]) for stem in sorted(images)]
        self._pad_to, self._dtype = pad_to, dtype

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.read(index, *whole(self.size(index)))

    def size(self, index: int) -> tuple[int, int]:
        """(H, W) of the sample."""
        _, image, mask = self._files[index]
        size = image_size(image)
        if image_size(mask) != size:
            raise DataError(f"{image} is {size[0]} x {size[1]}, but {mask} is {' x '.join(map(str, image_size(mask)))}")
        return padded_size(size, self._pad_to, image)

    def read(self, index: int, rows: slice, columns: slice) -> dict[str, Any]:
        """The sample's part in `rows` and `columns`."""
        name, image, mask = self._files[index]
        classes = torch.from_numpy(read_plane(mask, rows, columns, beyond=IGNORED).astype("int64"))
        return {"image": read_image(image, rows, columns, self._dtype), "mask": classes, "name": name}


def _by_stem(folder: Path, suffixes: set[str]) -> dict[str, Path]:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; a segmentation data set has images/ and masks/ in its root")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)
    found = {path.stem: path for path in files}
    if not files:
        raise DataError(f"{folder} holds no file with one of the endings {', '.join(sorted(suffixes))}")
    if len(found) < len(files):
        twice = next(path for path in files if found[path.stem] != path)
        raise DataError(f"{twice} and {found[twice.stem]} have the same stem; keep one of them")
    return found
