"""Multi-camera samples of the nuScenes format (Caesar et al., CVPR 2020): JSON tables that point at each other."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fullframe.data.images import read_image, whole
from fullframe.data.padding import Padded
from fullframe.errors import DataError

Row = dict[str, Any]
Array = np.ndarray[Any, Any]

CAMERAS = ("CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_BACK_RIGHT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_FRONT_LEFT")
DETECTION_CLASSES = {  # category: class of the detection benchmark; other categories are not detected
    "vehicle.car": "car",
    "vehicle.truck": "truck",
    "vehicle.bus.bendy": "bus",
    "vehicle.bus.rigid": "bus",
    "vehicle.trailer": "trailer",
    "vehicle.construction": "construction_vehicle",
    "human.pedestrian.adult": "pedestrian",
    "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian",
    "human.pedestrian.police_officer": "pedestrian",
    "vehicle.motorcycle": "motorcycle",
    "vehicle.bicycle": "bicycle",
    "movable_object.trafficcone": "traffic_cone",
    "movable_object.barrier": "barrier",
}


@dataclass(frozen=True, eq=False)
class _Frame:
    files: tuple[str, ...]  # one a camera
    size: tuple[int, int]
    arrays: Mapping[str, Array]  # of the sample, but its images
    token: str


class NuScenes(Dataset[dict[str, Any]]):
    """The key frames of `root`/`version`/*.json, scene by scene in the order of time.

    image: (cameras, 3, H, W) `dtype`, in 0 to 1 unless it is uint8. intrinsics: (cameras, 3, 3), pixels.
    extrinsics: (cameras, 4, 4), from each camera, at the moment it was triggered, to the sample's frame, which is that
    of the vehicle when the first of `cameras` was: a point x of the sample is at K @ (inverse(extrinsics) @ x)[:3].
    boxes: (boxes, 7) in the sample's frame: centre x, y, z, width, length, height in metres, and yaw.
    classes: (boxes,) int64, positions in `.classes`. token: the sample's. Give `collate` to the DataLoader or the
    recipe: samples have unequally many boxes.

    `scenes` names those to take. `classes` maps categories to classes, and categories that it lacks are left out; None
    takes every category as a class of its own. Raises DataError for a table, a row or an image that is missing.
    """

    collate = Padded(("boxes", "classes"))

    def __init__(
        self,
        root: str | Path,
        version: str = "v1.0-trainval",
        *,
        cameras: Sequence[str] = CAMERAS,
        scenes: Collection[str] | None = None,
        classes: Mapping[str, str] | None = DETECTION_CLASSES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._root, self._dtype = Path(root), dtype
        tables = _Tables(self._root / version)
        if classes is None:
            classes = {row["name"]: row["name"] for row in sorted(tables.rows("category"), key=lambda row: row["name"])}
        self.classes = tuple(dict.fromkeys(classes.values()))
        numbers = {category: self.classes.index(name) for category, name in classes.items()}
        self._frames = list(_frames(tables, tuple(cameras), scenes, numbers))

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.read(index, *whole(self.size(index)))

    def size(self, index: int) -> tuple[int, int]:
        """(H, W) of the sample's images."""
        return self._frames[index].size

    def read(self, index: int, rows: slice, columns: slice) -> dict[str, Any]:
        """The sample, with the images' part in `rows` and `columns`."""
        frame = self._frames[index]
        images = [read_image(self._root / file, rows, columns, self._dtype) for file in frame.files]
        tensors = {name: torch.from_numpy(array) for name, array in frame.arrays.items()}
        return {"image": torch.stack(images), **tensors, "token": frame.token}


class _Tables:
    """The tables of one version; rows by their token."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}; give the root above it and the version as it is named there")
        self._folder = folder
        self._loaded: dict[str, dict[str, Row]] = {}

    def rows(self, table: str) -> Collection[Row]:
        return self._table(table).values()

    def row(self, table: str, token: str, wanted_by: str) -> Row:
        try:
            return self._table(table)[token]
        except KeyError as error:
            raise DataError(f"{self._path(table)} has no row {token!r}, which {wanted_by} names") from error

    def _table(self, name: str) -> dict[str, Row]:
        if name not in self._loaded:
            try:
                rows = json.loads(self._path(name).read_text())
                self._loaded[name] = {row["token"]: row for row in rows}
            except FileNotFoundError as error:
                raise DataError(f"there is no table {self._path(name)}; unpack the metadata of this version") from error
            except (json.JSONDecodeError, TypeError, KeyError) as error:
                raise DataError(f"{self._path(name)} is no list of rows with tokens: {error}") from error
        return self._loaded[name]

    def _path(self, table: str) -> Path:
        return self._folder / f"{table}.json"


def _frames(
    tables: _Tables, cameras: tuple[str, ...], scenes: Collection[str] | None, numbers: Mapping[str, int]
) -> Iterator[_Frame]:
    """The key frames, with everything but pixels."""
    known = {row["name"]: row for row in tables.rows("scene")}
    unknown = sorted(set(scenes or ()) - set(known))
    if unknown:
        raise DataError(f"there is no scene {', '.join(unknown)}; this version has {len(known)}, e.g. {min(known)}")
    chosen = {row["token"] for name, row in known.items() if scenes is None or name in scenes}
    pictures = _pictures(tables)
    boxes: dict[str, list[Row]] = {}
    for annotation in tables.rows("sample_annotation"):
        boxes.setdefault(annotation["sample_token"], []).append(annotation)
    samples = [row for row in tables.rows("sample") if row["scene_token"] in chosen]
    names = {row["token"]: row["name"] for row in known.values()}
    for sample in sorted(samples, key=lambda row: (names[row["scene_token"]], row["timestamp"])):
        yield _frame(tables, sample["token"], cameras, pictures, boxes.get(sample["token"], []), numbers)


def _pictures(tables: _Tables) -> dict[str, dict[str, Row]]:
    """Rows of sample_data of key frames, by sample and channel."""
    found: dict[str, dict[str, Row]] = {}
    for row in tables.rows("sample_data"):
        if row["is_key_frame"]:
            calibrated = tables.row("calibrated_sensor", row["calibrated_sensor_token"], f"sample_data {row['token']}")
            sensor = tables.row("sensor", calibrated["sensor_token"], f"calibrated_sensor {calibrated['token']}")
            found.setdefault(row["sample_token"], {})[sensor["channel"]] = row
    return found


def _frame(
    tables: _Tables,
    token: str,
    cameras: tuple[str, ...],
    pictures: Mapping[str, Mapping[str, Row]],
    annotations: Sequence[Row],
    numbers: Mapping[str, int],
) -> _Frame:
    missing = [channel for channel in cameras if channel not in pictures.get(token, {})]
    if missing:
        has = ", ".join(sorted(pictures.get(token, {}))) or "none"
        raise DataError(f"sample {token} has no key frame of {', '.join(missing)}; its channels are: {has}")
    rows = [pictures[token][channel] for channel in cameras]
    sizes = {(row["height"], row["width"]) for row in rows}
    if len(sizes) > 1:
        raise DataError(f"the cameras of sample {token} have different sizes, {sorted(sizes)}; choose other cameras")
    world = [_pose(tables.row("ego_pose", row["ego_pose_token"], f"sample_data {row['token']}")) for row in rows]
    from_world = np.linalg.inv(world[0])  # the sample's frame
    calibrated = [tables.row("calibrated_sensor", row["calibrated_sensor_token"], "sample_data") for row in rows]
    extrinsics = [from_world @ pose @ _pose(sensor) for pose, sensor in zip(world, calibrated, strict=True)]
    seen = [(row, number) for row in annotations if (number := _class(tables, row, numbers)) is not None]
    boxes = [_box(row, from_world) for row, _ in seen]
    arrays: dict[str, Array] = {
        "intrinsics": np.array([sensor["camera_intrinsic"] for sensor in calibrated], np.float32).reshape(-1, 3, 3),
        "extrinsics": np.array(extrinsics, np.float32),
        "boxes": np.array(boxes, np.float32).reshape(-1, 7),
        "classes": np.array([number for _, number in seen], np.int64),
    }
    return _Frame(tuple(row["filename"] for row in rows), sizes.pop(), arrays, token)


def _class(tables: _Tables, annotation: Row, numbers: Mapping[str, int]) -> int | None:
    instance = tables.row("instance", annotation["instance_token"], f"sample_annotation {annotation['token']}")
    category = tables.row("category", instance["category_token"], f"instance {instance['token']}")
    return numbers.get(category["name"])


def _box(annotation: Row, from_world: Array) -> list[float]:
    """[x, y, z, width, length, height, yaw] of a box in the sample's frame."""
    pose = from_world @ _pose(annotation)
    return [*pose[:3, 3], *annotation["size"], math.atan2(pose[1, 0], pose[0, 0])]


def _pose(row: Row) -> Array:
    """(4, 4), float64, of `translation` and the quaternion `rotation` (w, x, y, z)."""
    w, x, y, z = np.array(row["rotation"], np.float64) / np.linalg.norm(row["rotation"])
    pose = np.eye(4)
    pose[:3, :3] = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    pose[:3, 3] = row["translation"]
    return pose
