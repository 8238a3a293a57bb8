"""A nuScenes of two scenes and three cameras, written small: what is read lies where the tables say it lies."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from fullframe.data import DETECTION_CLASSES, NuScenes, Padded, SliceReader
from fullframe.errors import DataError, ShapeError
from fullframe.training.microbatches import microbatches

CAMERAS = ("CAM_FRONT", "CAM_BACK", "CAM_BACK_LEFT")
H, W = 12, 20
K = [[10.0, 0.0, 10.0], [0.0, 10.0, 6.0], [0.0, 0.0, 1.0]]
CATEGORIES = ("animal", "human.pedestrian.adult", "vehicle.car")


def turned(degrees):
    """The quaternion of a rotation about z."""
    return [math.cos(math.radians(degrees) / 2), 0.0, 0.0, math.sin(math.radians(degrees) / 2)]


FORWARD = [0.5, -0.5, 0.5, -0.5]  # a camera (x right, y down, z ahead) that looks along the vehicle's x
BACKWARD = [0.5, -0.5, -0.5, 0.5]


def write_nuscenes(root, version="v1.0-mini"):
    """Scene "scene-0002" with sample s0 (two annotations, one of an animal) and s1 (none); "scene-0001" with s2 (one).

    The vehicle stands at (100, 50, 0), turned by 90 degrees: its x is the world's y. The back cameras are triggered
    when it has moved 1 m ahead.
    """
    (root / version).mkdir(parents=True)
    tables = {
        "category": [{"token": name, "name": name} for name in CATEGORIES],
        "instance": [{"token": f"i-{name}", "category_token": name} for name in CATEGORIES],
        "sensor": [{"token": f"sensor-{c}", "channel": c, "modality": "camera"} for c in CAMERAS],
        "calibrated_sensor": [
            {
                "token": f"calibrated-{c}",
                "sensor_token": f"sensor-{c}",
                "translation": [1.5, 0.0, 1.0],
                "rotation": FORWARD if c == "CAM_FRONT" else BACKWARD,
                "camera_intrinsic": K,
            }
            for c in CAMERAS
        ],
        "scene": [{"token": "t2", "name": "scene-0002"}, {"token": "t1", "name": "scene-0001"}],
        "sample": [
            {"token": token, "scene_token": scene, "timestamp": time}
            for token, scene, time in (("s1", "t2", 7), ("s0", "t2", 5), ("s2", "t1", 9))
        ],
        "sample_annotation": [
            annotation("s0", "vehicle.car", [90.0, 70.0, 1.0], 90 + 30),
            annotation("s0", "animal", [90.0, 60.0, 1.0], 0),
            annotation("s2", "human.pedestrian.adult", [100.0, 40.0, 0.5], 0),
        ],
    }
    tables["ego_pose"] = [
        {"token": "at", "translation": [100.0, 50.0, 0.0], "rotation": turned(90)},
        {"token": "later", "translation": [100.0, 51.0, 0.0], "rotation": turned(90)},
    ]
    tables["sample_data"] = [
        picture(root, sample["token"], camera, key)
        for sample in tables["sample"]
        for camera in CAMERAS
        for key in (1, 0)
    ]
    for name, rows in tables.items():
        (root / version / f"{name}.json").write_text(json.dumps(rows))
    return tables


def annotation(sample, category, translation, degrees):
    return {
        "token": f"{sample}-{category}",
        "sample_token": sample,
        "instance_token": f"i-{category}",
        "translation": translation,
        "size": [2.0, 4.0, 1.5],
        "rotation": turned(degrees),
    }


def picture(root, sample, camera, key):
    name = f"samples/{camera}/{sample}.jpg"
    if key:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(sample, camera)).save(root / name, quality=95)
    return {
        "token": f"{sample}-{camera}-{key}",
        "sample_token": sample,
        "ego_pose_token": "at" if camera == "CAM_FRONT" else "later",
        "calibrated_sensor_token": f"calibrated-{camera}",
        "filename": name if key else "sweeps/not-there.jpg",
        "is_key_frame": bool(key),
        "height": H,
        "width": W,
    }


def pixels(sample, camera):
    """One color an image, so that JPEG keeps it."""
    return np.full((H, W, 3), 40 * CAMERAS.index(camera) + 10 * int(sample[1]), np.uint8)


@pytest.fixture
def root(tmp_path):
    write_nuscenes(tmp_path)
    return tmp_path


def opened(root, **options):
    return NuScenes(root, "v1.0-mini", **({"cameras": CAMERAS} | options))


def test_samples_in_the_order_of_scenes_and_time(root):
    data = opened(root)
    assert [sample["token"] for sample in data] == ["s2", "s0", "s1"]
    assert [sample["token"] for sample in opened(root, scenes=["scene-0002"])] == ["s0", "s1"]
    with pytest.raises(DataError, match=r"no scene scene-0003; this version has 2, e\.g\. scene-0001"):
        opened(root, scenes=["scene-0003"])


def test_images(root):
    sample = opened(root)[1]
    assert sample["image"].shape == (3, 3, H, W) and sample["image"].dtype == torch.float32
    for number, camera in enumerate(CAMERAS):
        wanted = pixels("s0", camera)[0, 0, 0] / 255
        assert sample["image"][number].sub(wanted).abs().max() < 2 / 255
    assert opened(root, dtype=torch.uint8)[0]["image"].dtype == torch.uint8


def test_boxes_lie_in_the_vehicles_frame(root):
    """The car is 20 m ahead of the vehicle (the world's y) and 10 m to its left, turned by 30 degrees against it."""
    data = opened(root)
    sample = data[1]
    assert [data.classes[number] for number in sample["classes"]] == ["car"], "animals are not detected"
    wanted = torch.tensor([[20.0, 10.0, 1.0, 2.0, 4.0, 1.5, math.radians(30)]])
    torch.testing.assert_close(sample["boxes"], wanted)
    assert data[2]["boxes"].shape == (0, 7) and data[2]["classes"].shape == (0,)
    every = opened(root, classes=None)
    assert every.classes == CATEGORIES and [every.classes[number] for number in every[1]["classes"]] == [
        "vehicle.car",
        "animal",
    ]
    assert set(data.classes) == set(DETECTION_CLASSES.values()) and len(data.classes) == 10


def test_a_point_is_seen_where_it_must_be(root):
    """By hand: 20.5 m ahead of the front camera, 10 m left, 0.5 m up; the pedestrian is behind the back cameras."""
    sample = opened(root)[1]
    point = torch.tensor([22.0, 10.0, 1.5, 1.0])
    x, y, depth = sample["intrinsics"][0] @ (torch.linalg.inv(sample["extrinsics"][0]) @ point)[:3]
    torch.testing.assert_close(torch.stack([x / depth, y / depth, depth]), torch.tensor(
        [10 - 10 * 10 / 20.5, 6 - 10 * 0.5 / 20.5, 20.5]
    ))  # fmt: skip
    sample = opened(root)[0]
    centre = torch.cat([sample["boxes"][0, :3], torch.ones(1)])
    torch.testing.assert_close(centre, torch.tensor([-10.0, 0.0, 0.5, 1.0]))
    x, y, depth = (torch.linalg.inv(sample["extrinsics"][1]) @ centre)[:3]
    # The back camera is 1.5 m ahead of the vehicle's centre, which was 1 m further ahead when it was triggered.
    torch.testing.assert_close(torch.stack([x, y, depth]), torch.tensor([0.0, 0.5, 12.5]), atol=1e-5, rtol=0)


def test_a_camera_may_look_anywhere(root):
    """By a quaternion that is not of length 1; its matrix by hand."""
    path = root / "v1.0-mini" / "calibrated_sensor.json"
    path.write_text(path.read_text().replace(json.dumps(FORWARD), "[1, 2, 3, 4]"))
    wanted = torch.tensor([[-20.0, 4.0, 22.0], [20.0, -10.0, 20.0], [10.0, 28.0, 4.0]]) / 30
    torch.testing.assert_close(opened(root)[1]["extrinsics"][0, :3, :3], wanted)


def test_parts(root):
    data = opened(root)
    assert isinstance(data, SliceReader) and data.size(0) == (H, W)
    part, full = data.read(1, slice(2, 7), slice(5, 20)), data[1]
    assert torch.equal(part.pop("image"), full.pop("image")[..., 2:7, 5:20])
    for key, value in part.items():
        assert torch.equal(value, full[key]) if isinstance(value, torch.Tensor) else value == full[key]


def test_a_batch_of_unequally_many_boxes(root):
    data = opened(root, classes=None)
    (batch,) = DataLoader(data, 3, collate_fn=data.collate)
    assert batch["boxes_mask"].tolist() == [[True, False], [True, True], [False, False]]
    assert batch["boxes"].shape == (3, 2, 7) and batch["classes"].shape == (3, 2)
    assert torch.equal(batch["boxes"][1], data[1]["boxes"]) and not batch["boxes"][2].any()
    pieces = list(microbatches(batch, 3))
    assert [piece["token"] for piece in pieces] == [["s2"], ["s0"], ["s1"]]
    assert [int(piece["boxes_mask"].sum()) for piece in pieces] == [1, 2, 0]
    assert pieces[1]["image"].shape == (1, 3, 3, H, W)
    with pytest.raises(ShapeError, match=r"unequally many boxes \(2\), classes \(1\)"):
        Padded(("boxes", "classes"))([{"boxes": torch.zeros(2, 7), "classes": torch.zeros(1)}])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: (t / "ego_pose.json").unlink(), r"there is no table .*ego_pose\.json; unpack the metadata"),
        (lambda t: (t / "scene.json").write_text("{"), r"scene\.json is no list of rows with tokens"),
        (
            lambda t: (t / "ego_pose.json").write_text("[]"),
            r"ego_pose\.json has no row 'at', which sample_data s2-CAM_FRONT-1 names",
        ),
        (
            lambda t: (t / "sample_data.json").write_text(
                json.dumps([r for r in json.loads((t / "sample_data.json").read_text()) if "BACK-" not in r["token"]])
            ),
            "sample s2 has no key frame of CAM_BACK; its channels are: CAM_BACK_LEFT, CAM_FRONT",
        ),
    ],
)
def test_what_is_missing_is_named(root, spoil, message):
    spoil(root / "v1.0-mini")
    with pytest.raises(DataError, match=message):
        opened(root)


def test_missing_versions_and_images_are_named(root):
    with pytest.raises(DataError, match=r"there is no folder .*v1\.0-test; give the root above it"):
        NuScenes(root, "v1.0-test")
    data = opened(root)
    (root / "samples" / "CAM_BACK" / "s0.jpg").unlink()
    with pytest.raises(DataError, match=r"there is no image .*samples/CAM_BACK/s0\.jpg"):
        data[1]
