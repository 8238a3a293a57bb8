"""A batch is cut where it is read, and a data set that can read a part is asked for no more than it."""

import random
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

import fullframe as ff
from fullframe.errors import FullframeError, RecipeError, ShapeError
from fullframe.training.loading.delivery import Collation, Cut, Delivery, Grid, Sample
from fullframe.training.loading.loader import evaluation_batches
from tests.rank_group import RankGroup, rank_group
from tests.training.tiny import SIZE, Frames

LAST = Grid(height=2, width=3, row=1, column=2)  # of 2 x 3 ranks


class Tagged(torch.Tensor):
    """Images of a class of their own, as MONAI's and torchvision's are."""


def test_a_grid_cuts_as_shard_does():
    assert Grid(2, 3, 0, 0).part((9, 14)) == (slice(0, 5), slice(0, 5))
    assert LAST.part((9, 14)) == (slice(5, 9), slice(10, 14))
    assert Grid().part((9, 14)) == (slice(0, 9), slice(0, 14))
    assert LAST.part((9, 2)) == (slice(5, 9), slice(0, 2)), "fewer columns than ranks stay whole"
    assert Grid(height=2, depth=3, plane=1).part((7, 9, 14)) == (slice(3, 5), slice(0, 5), slice(0, 14))
    assert Grid(height=2, depth=3, plane=1).part((2, 9, 14))[0] == slice(0, 2)
    assert LAST.part((7, 9, 14)) == (slice(0, 7), slice(5, 9), slice(10, 14)), "slices of a volume are not cut"


def test_only_the_part_leaves_the_process_that_read_it():
    samples = [Sample({"image": torch.arange(27.0).reshape(3, 3, 3), "id": torch.tensor(i)}, (), None) for i in (1, 2)]
    batch, _ = Collation(default_collate, LAST, "auto")(samples)
    assert type(batch["image"]) is Cut and batch["image"].shape == (2, 3, 3, 3)
    local = batch["image"].local
    assert torch.equal(local, default_collate([s.value["image"] for s in samples])[..., 2:, 2:])
    assert local.untyped_storage().nbytes() == local.numel() * local.element_size(), "a view would carry the whole"
    assert type(batch["id"]) is torch.Tensor
    whole, _ = Collation(default_collate, Grid(), "auto")(samples)
    assert type(whole["image"]) is torch.Tensor
    tagged = [Sample({"image": s.value["image"].as_subclass(Tagged)}, (), None) for s in samples]
    of_a_class, _ = Collation(default_collate, LAST, "auto")(tagged)
    assert type(of_a_class["image"].local) is torch.Tensor and torch.equal(of_a_class["image"].local, local)


def test_low_resolutions_of_the_frame_are_cut_too():
    sizes = {"high": (48, 72), "half": (24, 36), "sixth": (8, 12), "tiny": (4, 6), "other": (24, 72), "third": (17, 25)}
    sample = {name: torch.rand(3, *size) for name, size in sizes.items()}
    batch, _ = Collation(default_collate, LAST, "auto")([Sample(sample, (), None)])
    assert {name for name, value in batch.items() if type(value) is Cut} == {"high", "half", "sixth"}
    assert torch.equal(batch["sixth"].local, sample["sixth"][None, :, 4:, 8:])
    named, _ = Collation(default_collate, LAST, ["high"])([Sample(sample, (), None)])
    assert type(named["half"]) is torch.Tensor, "what is not named stays whole"


class Named(list):
    """A list of a class of its own, as torch's pytree does not know it."""


def test_containers_that_torch_does_not_know_are_cut_too():
    sample = Sample(None, (), None)
    image = torch.rand(1, 3, 4, 6)
    for batch in (UserDict(image=image), {"image": Named([image])}, {"image": (image,)}):
        found, _ = Collation(lambda _, batch=batch: batch, LAST, "auto")([sample])
        part = found["image"] if isinstance(batch, UserDict) else found["image"][0]
        assert type(part) is Cut and torch.equal(part.local, image[..., 2:, 4:])


def test_what_expand_has_made_is_in_memory_of_its_own_before_it_is_page_locked():
    batch = {"image": torch.rand(1, 3, 4, 6), "eye": torch.eye(3).expand(6, 3, 3), "one": torch.ones(1, 1).expand(1, 1)}
    found, _ = Collation(lambda _: batch, LAST, "auto")([Sample(None, (), None)])
    assert found["eye"].is_contiguous() and torch.equal(found["eye"], batch["eye"])
    assert found["one"] is batch["one"], "a single element shares nothing"


def test_boxes_of_a_photograph_without_any_and_with_one_are_compared():
    boxes = np.random.default_rng(0).integers(0, 3, (1, 5))
    none, one = (torch.from_numpy(boxes[:count, 0]) for count in (0, 1))
    assert none.stride() == (0,) or one.stride() == (5,), "strides that bytes cannot be viewed by"
    for labels in (none, one, none.new_zeros(2, 0, 4).transpose(0, 2)):
        for conjugate in (False, True):
            kept = labels.to(torch.complex64).conj() if conjugate else labels
            _, checksum = Collation(lambda _, kept=kept: {"labels": [kept]}, LAST, "auto")([Sample(None, (), None)])
            _, other = Collation(lambda _, kept=kept: {"labels": [kept + 1]}, LAST, "auto")([Sample(None, (), None)])
            assert (checksum == other) == (kept.numel() == 0)


@pytest.mark.parametrize(
    ("name", "parts"),
    [("clone", 1), ("to_sparse_coo", 2), ("to_sparse_csr", 3), ("to_sparse_csc", 3)],
)
def test_all_that_a_sparse_tensor_holds_is_noted_on_the_computing_stream(name, parts, monkeypatch):
    """Of which torch notes nothing by itself: its memory would be the next batch's while it is still read."""
    noted = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: noted.append((tensor.layout, stream)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Computing())
    delivery = Delivery(ff.init_mesh())
    delivery._received({"matrix": getattr(torch.eye(4), name)()}, "copied")
    assert noted == [(torch.strided, Computing())] * parts


class Computing(NamedTuple):
    name: str = "computing"

    def wait_event(self, event) -> None: ...


def cameras():
    """The shapes of a batch (N, cameras, 3, H, W) and of its part, and what became of the matrices beside it."""
    data = [{"image": torch.full((6, 3, 7, 10), float(i)), "intrinsics": torch.eye(3).expand(6, 3, 3)} for i in (0, 1)]
    (batch,) = ff.ShardedLoader(DataLoader(data, 2), ff.init_mesh(height=2))
    image = batch["image"]
    assert image.full()[:, 5, 2].mean((1, 2)).tolist() == [0, 1]
    return tuple(image.shape), tuple(image.local.shape), type(batch["intrinsics"])


def test_multi_camera_images_are_split_on_their_last_dims():
    for part, (shape, local, matrices) in enumerate(rank_group(2).run(cameras)):
        assert shape == (2, 6, 3, 7, 10) and local == (2, 6, 3, 4 - part, 10) and matrices is torch.Tensor


class Parts(Frames):
    """Reads parts of frames: brightness and color are drawn for the whole frame. Counts the pixels it reads."""

    pixels = 0
    noise = False  # also draws one number for each pixel it reads, which it must not

    def size(self, index):
        return SIZE

    def __getitem__(self, index):
        return self.read(index, slice(0, SIZE[0]), slice(0, SIZE[1]))

    def read(self, index, rows, columns):
        image = self.images[index][:, rows, columns]
        self.pixels += image[0].numel()
        image = image * random.uniform(0.5, 1.5) + float(np.random.normal()) + torch.rand(3, 1, 1)
        image = image + torch.randn_like(image) if self.noise else image
        return {"image": image, "target": self.targets[index][rows, columns], "index": index}


def loader_of(data, height, width, workers=0, batch_size=4, **options):
    read = DataLoader(data, batch_size, shuffle=True, num_workers=workers, drop_last=True)
    return ff.ShardedLoader(read, ff.init_mesh(height=height, width=width), seed=5, **options)


def frames(height, width, workers):
    """Two epochs made whole again, and the pixels that this process read for them."""
    data = Parts(11)
    batches = []
    for _ in range(2):
        for batch in loader_of(data, height, width, workers):
            batches.append({k: v.full() if isinstance(v, ff.SpatialTensor) else v for k, v in batch.items()})
    return batches, data.pixels


@pytest.mark.parametrize(("height", "width", "workers"), [(1, 2, 0), (2, 1, 2)])
def test_parts_make_the_frame_that_one_process_reads(height, width, workers):
    alone, pixels = frames(1, 1, 0)
    assert pixels == 4 * 4 * SIZE[0] * SIZE[1], "four batches of four"
    group = RankGroup(2)  # fresh ranks: a worker is a fork, and the shared ones have run hundreds of tests
    try:
        answers = group.run(frames, height, width, workers)
    finally:
        group.close()
    for found, read in answers:
        assert workers or read == pixels // 2, "a rank read more than its part"
        for batch, whole in zip(found, alone, strict=True):
            assert all(torch.equal(batch[key], whole[key]) for key in ("image", "target", "index"))


def evaluated():
    """The parts that evaluation reads."""
    data = Parts(2)
    batches = [(batch["image"].full(), counts) for batch, counts in evaluation_batches(data, ff.init_mesh(width=2), 5)]
    return batches, data.pixels


def test_evaluation_reads_parts_too():
    for batches, pixels in rank_group(2).run(evaluated):
        assert pixels == SIZE[0] * SIZE[1] and all(counts for _, counts in batches)
        assert [tuple(image.shape) for image, _ in batches] == [(1, 3, *SIZE)] * 2


def of_one_row():
    data: Any = Parts(4)
    data.images, data.targets = data.images[..., :1, :], data.targets[..., :1, :]
    data.size = lambda index: (1, SIZE[1])
    return [type(batch["image"]) for batch in loader_of(data, 2, 1)], data.pixels


def test_frames_of_fewer_rows_than_ranks_are_read_whole():
    assert rank_group(2).run(of_one_row) == [([torch.Tensor], 4 * SIZE[1])] * 2


class Volumes:
    """Reads parts of volumes (1, D, H, W), and of labels (D, H, W)."""

    size_ = (5, 6, 7)

    def __init__(self):
        self.volumes = torch.arange(2 * 5 * 6 * 7.0).view(2, 1, *self.size_)
        self.voxels = 0

    def __len__(self):
        return 2

    def size(self, index):
        return self.size_

    def __getitem__(self, index):
        return self.read(index, slice(0, 5), slice(0, 6), slice(0, 7))

    def read(self, index, slices, rows, columns):
        found = self.volumes[index][:, slices, rows, columns]
        self.voxels += found.numel()
        return {"volume": found.clone(), "label": found[0] > 3, "number": index}


def volumes(height, depth):
    data, on = Volumes(), ff.init_mesh(height=height, depth=depth)
    ((batch),) = ff.ShardedLoader(DataLoader(data, 2), on)
    ((whole),) = ff.ShardedLoader(DataLoader([data[0], data[1]], 2), on)  # of which nothing can be read apart
    same = all(torch.equal(batch[key].full(), whole[key].full()) for key in ("volume", "label"))
    return (
        same and torch.equal(batch["volume"].full(), data.volumes),
        batch["volume"].spec is whole["volume"].spec,
        [[p.axis for p in batch[key].spec.placements] for key in ("volume", "label")],
        batch["number"].tolist(),
        data.voxels - 2 * 210,
    )


def test_volumes_are_read_by_slices_too():
    for rank, found in enumerate(rank_group(2).run(volumes, 1, 2)):
        assert found == (True, True, [["depth"]] * 2, [0, 1], 2 * (3 - rank) * 42)
    for found in rank_group(2).run(volumes, 2, 1):
        assert found == (True, True, [["height"]] * 2, [0, 1], 210)


def images_over_depth():
    data: Any = Parts(4)
    with pytest.raises(RecipeError, match=r"Parts.size gives \(9, 14\), and the mesh has depth 2: give \(D, H, W\)"):
        next(iter(ff.ShardedLoader(DataLoader(data, 4), ff.init_mesh(depth=2))))


def test_a_data_set_of_images_is_refused_on_a_mesh_with_depth():
    rank_group(2).run(images_over_depth)


def refused(what, height=2, width=1):
    """What a wrong data set is told."""
    data: Any = Parts(4)
    options = {}
    if what == "noise":
        data.noise = True
    elif what == "another frame":
        data.images = data.images + torch.distributed.get_rank()
        data.read = lambda index, rows, columns: {"image": data.images[index], "index": index}
    elif what == "a part too large":
        data.read = lambda index, rows, columns: {"image": torch.zeros(3, *SIZE)}
        options["split"] = ["image"]
    elif what == "sizes":
        data.size = lambda index: (8 + index, 14)
    elif what == "other labels":
        plain = data.read
        data.read = lambda index, *part: plain(index, *part) | {"label": torch.distributed.get_rank()}
    try:
        next(iter(loader_of(data, height, width, **options)))
    except FullframeError as error:
        return type(error), str(error)
    return None, ""


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("noise", RecipeError, "as many numbers whatever rows and columns are read"),
        ("other labels", RecipeError, "ranks [0, 1] of one replica read different samples"),
        ("another frame", ShapeError, "gave no tensor of rows"),
        ("a part too large", ShapeError, "read() gave 'image' with the shape (4, 3, 9, 14) where rows"),
        ("sizes", ShapeError, "cannot be one batch of parts"),
        ("nothing", None, ""),
    ],
)
def test_a_wrong_read_is_refused_on_all_ranks(what, kind, message):
    for found, said in rank_group(2).run(refused, what):
        assert found is kind and message in said, said


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"image": torch.zeros(3, 8, 9), "name": "b"},
            r"equal size.*sample 1: \{'image': \(3, 8, 9\), 'name': 'str'\}",
        ),
        ({"image": object(), "name": "b"}, r"sample 1: \{'image': 'object', 'name': 'str'\}"),
    ],
)
def test_samples_that_make_no_batch_are_named(other: dict[str, Any], said: str) -> None:
    values = [{"image": torch.zeros(3, 8, 8), "name": "a"}, other]
    samples = [Sample(value, (), None) for value in values]
    with pytest.raises(RecipeError, match=r"these samples make no batch: (?s:.)*" + said):
        Collation(default_collate, Grid(), "auto")(samples)
    with pytest.raises(KeyError, match="mine"):
        Collation(lambda values: values[0]["mine"], Grid(), "auto")(samples)


class OfRank:
    """Gives a last sample that is another one on one rank."""

    def __init__(self, rank):
        self.odd = torch.distributed.get_rank() == rank

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"image": torch.full((3, 8, 8), float(index)), "label": index + 0.5 * (self.odd and index == 3)}


def over_stages(width, odd):
    mesh = ff.init_mesh(width=width, stages=2)
    read = []
    try:
        for batch in ff.ShardedLoader(DataLoader(OfRank(odd), 2), mesh):
            read.append(batch["label"].tolist())
    except RecipeError as error:
        return len(read), str(error)
    return len(read), ""


@pytest.mark.parametrize("width", [1, 2])
def test_stages_get_the_same_samples_or_it_is_said(width):
    ranks = 2 * width
    assert rank_group(ranks).run(over_stages, width, None) == [(2, "")] * ranks
    for found, said in rank_group(ranks).run(over_stages, width, ranks - 1):
        assert found == 1 and f"ranks {list(range(ranks))} of one replica read different samples" in said


@dataclass
class Target:
    boxes: torch.Tensor


@dataclass(slots=True)
class Slotted:
    boxes: torch.Tensor


def beside(kind):
    """A batch in which ranks differ, or which they cannot compare."""
    rank = dist.get_rank()
    others = {
        "number": 0.1 * rank,
        "words": [f"file {rank}"],
        "array": np.full(3, rank),
        "object": Target(torch.ones(1)),
        "object with slots": Slotted(torch.ones(1)),
    }
    data = [{"image": torch.zeros(3, 4, 6)}] * 4

    def collate(samples):
        return {"image": torch.stack([sample["image"] for sample in samples]), "more": others[kind]}

    mesh = ff.init_mesh(width=2)
    try:
        list(ff.ShardedLoader(DataLoader(data, 2, collate_fn=collate), mesh))
    except RecipeError as error:
        return str(error)


WRONG = {
    "number": "read different samples",
    "words": "read different samples",
    "array": "read different samples",
    "object": "holds a Target with tensors in it",
    "object with slots": "holds a Slotted with tensors in it",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_tensor_is_compared_too(kind):
    for message in rank_group(2).run(beside, kind):
        assert WRONG[kind] in message
