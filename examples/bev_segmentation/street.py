"""Streets of boxes, drawn by six cameras and written as nuScenes has them: JSON tables, images, and depth beside them.

The frames are nuScenes': the vehicle's x is ahead, y left, z up; a camera's x is right, y down, z ahead; metres. Each
ray is (x, y, 1) in its camera, so that how far one goes along it is the depth. Deterministic.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from fullframe.data.nuscenes import CAMERAS

VERSION = "v1.0-rendered"
YAWS = (0, -60, -120, 180, 120, 60)  # degrees, in the order of CAMERAS
FIELD_OF_VIEW = 70  # degrees, of a camera's width
MOUNTED = (0.8, 1.6)  # metres: from the vehicle's middle towards where the camera looks, and above the ground
DEPTH_UNIT = 1 / 256  # metres; 0 is the sky
AREA, CLEAR = 32.0, 4.5  # metres: boxes stand in a square of twice AREA, and CLEAR away from where the vehicle drives
STEP, SECONDS = 2.5, 0.5  # metres and seconds between two key frames
KINDS = {  # category: how many a scene has; width, length and height in metres
    "vehicle.car": (16, (1.9, 4.5, 1.6)),
    "vehicle.truck": (5, (2.5, 7.5, 3.0)),
    "movable_object.barrier": (8, (0.5, 2.5, 1.0)),
}

Array = np.ndarray[Any, Any]
Row = dict[str, Any]


class Box(NamedTuple):
    """In the world's frame; `size` is width, length, height, and the length lies along `yaw`."""

    category: str
    centre: tuple[float, float, float]
    size: tuple[float, float, float]
    yaw: float
    colour: tuple[float, float, float]


class Camera(NamedTuple):
    """`rotation` and `translation` lead from the camera to the vehicle."""

    intrinsics: Array  # (3, 3), pixels
    rotation: Array  # (3, 3)
    translation: Array  # (3,)
    quaternion: list[float]  # w, x, y, z: the rotation as the tables have it


def write(root: Path, height: int, width: int, scenes: int, samples: int) -> None:
    """Fill the folder `root`: scenes scene-0000 and on of `samples` key frames each, images (`height`, `width`).

    Does nothing where it is there already. All ranks may call it: the first that is done has written it.
    """
    if root.exists():
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=root.parent, prefix=f"{root.name}."))
    cameras = {name: camera(math.radians(yaw), height, width) for name, yaw in zip(CAMERAS, YAWS, strict=True)}
    tables = fixed_tables(cameras)
    for number in range(scenes):
        tables["scene"].append({"token": f"scene{number}", "name": f"scene-{number:04}"})
        for name, row in drive(unfinished, number, samples, cameras, (height, width)):
            tables.setdefault(name, []).append(row)
    (unfinished / VERSION).mkdir()
    for name, rows in tables.items():
        (unfinished / VERSION / f"{name}.json").write_text(json.dumps(rows))
    try:
        os.rename(unfinished, root)
    except OSError:  # another rank was quicker
        shutil.rmtree(unfinished)


def camera(yaw: float, height: int, width: int) -> Camera:
    """One that looks towards `yaw`, its horizon a third down the image."""
    focal = width / 2 / math.tan(math.radians(FIELD_OF_VIEW / 2))
    cos, sin = math.cos(yaw), math.sin(yaw)
    ahead, up = MOUNTED
    half = complex(math.cos(yaw / 2), math.sin(yaw / 2)) * complex(0.5, -0.5)
    return Camera(
        intrinsics=np.array([[focal, 0, width / 2], [0, focal, height / 3], [0, 0, 1]]),
        rotation=np.array([[sin, 0, cos], [-cos, 0, sin], [0, -1, 0]]),
        translation=np.array([ahead * cos, ahead * sin, up]),
        quaternion=[half.real, -half.real, -half.imag, half.imag],
    )


def fixed_tables(cameras: dict[str, Camera]) -> dict[str, list[Row]]:
    """What does not depend on the scenes."""
    return {
        "scene": [],
        "category": [{"token": name, "name": name} for name in KINDS],
        "sensor": [{"token": name, "channel": name, "modality": "camera"} for name in cameras],
        "calibrated_sensor": [
            {
                "token": name,
                "sensor_token": name,
                "translation": c.translation.tolist(),
                "rotation": c.quaternion,
                "camera_intrinsic": c.intrinsics.tolist(),
            }
            for name, c in cameras.items()
        ],
    }


def drive(
    root: Path, number: int, samples: int, cameras: dict[str, Camera], size: tuple[int, int]
) -> Iterator[tuple[str, Row]]:
    """Draw the images of one scene; rows of tables, each with its table's name."""
    random = np.random.default_rng(number)
    heading, boxes = float(random.uniform(-math.pi, math.pi)), street(random, STEP * (samples - 1))
    for index, box in enumerate(boxes):
        yield "instance", {"token": f"{number}.{index}", "category_token": box.category}
    for time in range(samples):
        token, driven = f"{number:04}_{time:02}", STEP * time
        position = [driven * math.cos(heading), driven * math.sin(heading), 0.0]
        yield "ego_pose", {"token": token, "translation": position, "rotation": about_z(heading)}
        when = int((100 * number + SECONDS * time) * 1e6)
        yield "sample", {"token": token, "scene_token": f"scene{number}", "timestamp": when}
        for index, box in enumerate(boxes):  # they stand in the frame of the vehicle as it was at first
            x, y, z = box.centre
            turned = [x * math.cos(heading) - y * math.sin(heading), x * math.sin(heading) + y * math.cos(heading), z]
            row = {"token": f"{token}.{index}", "sample_token": token, "instance_token": f"{number}.{index}"}
            yield "sample_annotation", row | {
                "translation": turned, "size": box.size, "rotation": about_z(heading + box.yaw)
            }  # fmt: skip
        moved = [box._replace(centre=(box.centre[0] - driven, *box.centre[1:])) for box in boxes]
        for name, seen_by in cameras.items():
            image, depth = render(seen_by, moved, size, driven, random)
            file, file_of_depth = Path("samples", name, f"{token}.jpg"), Path("depth", name, f"{token}.png")
            for path in (file, file_of_depth):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(root / file, quality=92)
            Image.fromarray(depth).save(root / file_of_depth)
            yield "sample_data", {
                "token": f"{token}.{name}", "sample_token": token, "ego_pose_token": token,
                "calibrated_sensor_token": name, "filename": file.as_posix(), "is_key_frame": True,
                "height": size[0], "width": size[1],
            }  # fmt: skip


def about_z(yaw: float) -> list[float]:
    """The quaternion (w, x, y, z) of a rotation."""
    return [math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)]


def street(random: np.random.Generator, length: float) -> list[Box]:
    """Boxes that stand apart from each other and from the vehicle, which drives `length` metres along x."""
    boxes: list[Box] = []
    for category, (count, usual) in KINDS.items():
        while sum(box.category == category for box in boxes) < count:
            size = tuple(float(metres * random.uniform(0.85, 1.15)) for metres in usual)
            x, y = (float(v) for v in random.uniform(-AREA, AREA, 2))
            yaw = float(random.choice((0, math.pi / 2, math.pi)) + random.normal(0, 0.2))
            colour = tuple(float(v) for v in random.uniform(0.1, 1.0, 3))
            reach = math.hypot(size[0], size[1]) / 2
            free = math.hypot(x - min(max(x, 0.0), length), y) > CLEAR + reach / 2
            apart = all(
                math.hypot(x - box.centre[0], y - box.centre[1]) > reach + math.hypot(*box.size[:2]) / 2
                for box in boxes
            )
            if free and apart:
                boxes.append(Box(category, (x, y, size[2] / 2), size, yaw, colour))  # type: ignore[arg-type]
    return boxes


def render(
    seen_by: Camera, boxes: list[Box], size: tuple[int, int], driven: float, random: np.random.Generator
) -> tuple[Array, Array]:
    """The image, (H, W, 3) uint8, and its depth, (H, W) uint16 in DEPTH_UNIT; `boxes` in the vehicle's frame."""
    v, u = np.mgrid[0 : size[0], 0 : size[1]] + 0.5
    rays = np.stack([u, v, np.ones_like(u)], -1) @ np.linalg.inv(seen_by.intrinsics).T @ seen_by.rotation.T
    rays, eye = rays.astype(np.float32), seen_by.translation.astype(np.float32)
    down = rays[..., 2] < -1e-4
    depth = np.where(down, eye[2] / np.maximum(-rays[..., 2], 1e-4), np.inf)
    sky = 0.75 + 0.5 * rays[..., 2:] * np.array([-1.0, -0.6, 0.0], np.float32)
    ground = np.where(down, depth, 0)[..., None] * rays + eye
    image = np.where(down[..., None], paving(ground[..., 0] + driven, ground[..., 1])[..., None], sky)
    for box in (box for box in boxes if in_view(seen_by, box)):
        near, face, up = hit(box, eye, rays)
        closer = near < depth
        shade = np.array([0.75, 0.55, 1.0], np.float32)[face[closer]]
        if box.category.startswith("vehicle"):  # windows
            shade = np.where((up[closer] > 0.1) & (up[closer] < 0.38) & (face[closer] != 2), 0.2, shade)
        image[closer], depth[closer] = shade[:, None] * np.array(box.colour, np.float32), near[closer]
    image = image * random.uniform(0.8, 1.1) + 0.02 * random.standard_normal(image.shape, np.float32)
    stored = np.where(np.isfinite(depth), np.minimum(depth / DEPTH_UNIT, 65535), 0)
    return (image.clip(0, 1) * 255).astype(np.uint8), stored.astype(np.uint16)


def in_view(seen_by: Camera, box: Box) -> bool:
    """Whether a camera may see the box; it does not, where this says no."""
    x, _, depth = seen_by.rotation.T @ (np.array(box.centre) - seen_by.translation)
    radius, half = math.hypot(*box.size) / 2, math.radians(FIELD_OF_VIEW / 2)
    return bool(depth > -radius and abs(x) - radius / math.cos(half) < depth * math.tan(half))


def paving(x: Array, y: Array) -> Array:
    """How bright the ground is at (x, y): asphalt with patches, and dashed lines every four metres."""
    patches = 0.04 * np.sin(1.3 * x + 2 * np.sin(0.7 * y)) + 0.03 * np.sin(2.9 * y + x)
    line = (np.abs((y + 2) % 4 - 2) < 0.12) & (x % 3 < 1.5) & (np.hypot(x, y) < 80)
    return np.where(line, 0.85, 0.38 + patches)


def hit(box: Box, eye: Array, rays: Array) -> tuple[Array, Array, Array]:
    """Where the rays from `eye` meet the box: depth, infinite where they do not; the axis of the face (0 along the
    length, 1 the width, 2 the height); and how high, from -0.5 at its foot to 0.5.
    """
    cos, sin = math.cos(box.yaw), math.sin(box.yaw)
    to_box = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]], np.float32)
    half = np.array([box.size[1], box.size[0], box.size[2]], np.float32) / 2
    start = to_box @ (eye - np.array(box.centre, np.float32))
    along = rays @ to_box.T
    along = np.where(np.abs(along) < 1e-6, np.float32(1e-6), along)
    first, second = (-half - start) / along, (half - start) / along
    enters, leaves = np.minimum(first, second), np.maximum(first, second).min(-1)
    near, face = enters.max(-1), enters.argmax(-1)
    near = np.where((near < leaves) & (near > 0), near, np.inf)
    up = (start[2] + np.where(np.isfinite(near), near, 0) * along[..., 2]) / box.size[2]
    return near, face, up
