"""What a mesh leaves behind. What it is for is tested wherever ranks split tensors."""

import gc
import weakref
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fullframe as ff
from fullframe.errors import MeshError
from fullframe.processes.launch import launch
from fullframe.ranks.mesh import axes_in, forget_meshes, spatial_of
from fullframe.simulation.fake.world import fake_job
from tests.rank_group import rank_group

JOB = """
import atexit, os, sys
from pathlib import Path

def threads():
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]

def ended():  # the first to be registered is called last
    (Path(sys.argv[1]) / os.environ["RANK"]).write_text(" ".join(threads()))

atexit.register(ended)

import torch
import torch.distributed as dist
import torch.nn.functional as F
import fullframe as ff
from fullframe.ranks.mesh import spatial_of

mesh = ff.init_mesh(width=2)  # a global of the program, as is the tensor
spatial_of(mesh)
dist.barrier(mesh.get_group("width"))
x = ff.shard(torch.ones(1, 2, 6, 8), mesh)
y = F.max_pool2d(F.conv2d(x, torch.ones(2, 2, 3, 3), padding=1), 3).relu()
assert any("gloo" in name for name in threads())
dist.destroy_process_group()
assert not any("gloo" in name for name in threads()), threads()
try:
    x.mean()
except ff.FullframeError as error:
    assert "the job of this mesh has ended" in str(error), error
else:
    raise AssertionError
"""


def test_no_thread_of_gloo_outlives_the_job(tmp_path: Path) -> None:
    """One that still puts a message away when Python ends aborts the process, after all its work was done."""
    assert launch(2, ["-c", JOB, str(tmp_path)]) == 0
    for rank in range(2):
        names = (tmp_path / str(rank)).read_text()
        assert names and "gloo" not in names


def what_is_remembered():
    forget_meshes()
    mesh = ff.init_mesh(width=2)
    x = ff.shard(torch.ones(1, 2, 6, 8), mesh)
    F.max_pool2d(F.conv2d(x, torch.ones(2, 2, 3, 3), padding=1), 3)
    assert spatial_of(mesh).caches
    watched = weakref.ref(spatial_of(mesh))
    del x, mesh
    forget_meshes()
    gc.collect()
    return watched() is None


def test_what_is_remembered_for_a_mesh_ends_with_it():
    assert all(rank_group(2).run(what_is_remembered))


def unknown_axis():
    spatial = spatial_of(ff.init_mesh(width=2))
    found = []
    for use in (lambda: spatial.axis("widht"), lambda: spatial.group(["with"])):
        with pytest.raises(MeshError, match="none called"):
            use()
        found.append(spatial.axis("height").name)
    return found


def test_an_unknown_axis_is_refused():
    assert rank_group(2).run(unknown_axis) == [["height", "height"]] * 2


def test_depth_is_an_axis_of_its_own_where_it_is_split():
    with fake_job(0, 8):
        assert ff.init_mesh(2, 2).mesh_dim_names == ("data", "height", "width")
        assert ff.init_mesh(2, 2, depth=1) is ff.init_mesh(height=2, width=2)
        volumes = ff.init_mesh(height=2, width=2, depth=2)
        assert volumes.mesh_dim_names == ("data", "depth", "height", "width")
        assert volumes.mesh.tolist() == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]], "width changes fastest"
        with pytest.raises(MeshError, match="depth 3 x height 1 x width 1 = 3 does not divide the 8 ranks"):
            ff.init_mesh(depth=3)
        with pytest.raises(MeshError, match="at least one rank along each axis, got depth 0 x height 1 x width 1"):
            ff.init_mesh(depth=0)


# Ranks of (data 2, depth 2, height 2, width 2) that differ from rank 13 = (1, 1, 0, 1) along the named axes alone.
ALONG = {
    ("depth",): [9, 13],
    ("height",): [13, 15],
    ("width",): [12, 13],
    ("depth", "height"): [9, 11, 13, 15],
    ("depth", "width"): [8, 9, 12, 13],
    ("height", "width"): [12, 13, 14, 15],
    ("depth", "height", "width"): [8, 9, 10, 11, 12, 13, 14, 15],
}


@pytest.mark.parametrize("names", ALONG, ids="-".join)
def test_each_several_of_three_axes_are_a_group(names):
    with fake_job(13, 16):
        spatial = spatial_of(ff.init_mesh(2, 2, depth=2))
        joint = spatial.axis(spatial.joint(reversed(names)))
        assert joint.name == " and ".join(names) and axes_in(joint.name) == names
        for group in (spatial.group(names), spatial.group([joint.name]), joint.group):
            assert dist.get_process_group_ranks(group) == ALONG[names]
        assert list(joint.ranks) == list(joint.channel.ranks) == ALONG[names] and joint.size == len(joint.ranks)
        assert spatial.coordinate_along(names) == spatial.coordinates[joint.name] == ALONG[names].index(13)
        assert [rank for rank, place in zip(spatial.replica_ranks, spatial.places, strict=True)
                if all(place[axis.name] == axis.coordinate for axis in spatial.axes if axis.name not in names)
                ] == ALONG[names]  # fmt: skip


def test_axes_of_one_rank_add_none_to_a_group():
    with fake_job(1, 4):
        spatial = spatial_of(ff.init_mesh(width=2, depth=2))
        assert dist.get_process_group_ranks(spatial.group(["depth", "height"])) == [1, 3]
        assert spatial.axis("depth and height").coordinate == 0
        assert spatial.group(["depth", "width"]) is spatial.replica is spatial.group(["depth and height", "width"])


def test_a_mesh_knows_all_groups_that_it_made():
    for height, more in ((1, set()), (2, {"height and width", "depth and width", "depth and height"})):
        with fake_job(0, 4 * height):
            made = spatial_of(ff.init_mesh(height, 2, depth=2)).groups
            assert set(made) == {"depth", "height", "width", "replica"} | more


def numbers_of_numpy():
    """An op with numpy's integers, then the same shapes again: what the first left behind must not spoil the second."""
    mesh = ff.init_mesh(width=2)
    x = ff.shard(torch.arange(96.0).view(1, 2, 6, 8), mesh)
    size = [numpy.int64(n) for n in (1, 2, 2, 3, 8)]
    first = x.reshape(size)
    second = x.reshape(1, 2, 2, 3, 8)
    kinds = {type(n) for n in (*first.spec.shape, *second.spec.shape)}
    bounds = {type(b) for y in (first, second) for p in y.spec.placements for b in p.extents.bounds}
    pooled = F.max_pool2d(x, numpy.int64(2)), F.max_pool2d(x, 2)
    return kinds | bounds == {int}, torch.equal(pooled[0].full(), pooled[1].full())


def test_numpy_integers_do_not_stay_in_what_is_remembered():
    assert rank_group(2).run(numbers_of_numpy) == [(True, True)] * 2


def two_meshes(how):
    whole = torch.arange(48.0).view(1, 1, 6, 8)
    x, y = ff.shard(whole, ff.init_mesh(width=2)), ff.shard(whole, ff.init_mesh(height=2))
    with pytest.raises(MeshError, match="two meshes"):
        {"add": lambda: x + y, "cat": lambda: torch.cat([x, y]), "where": lambda: torch.where(x > 3, x, y)}[how]()
    dist.barrier()
    return float((x + y.full()).sum()) == float(2 * whole.sum())


@pytest.mark.parametrize("how", ["add", "cat", "where"])
def test_tensors_of_two_meshes_do_not_meet(how):
    assert all(rank_group(2).run(two_meshes, how))


def test_ranks_that_we_start_hash_alike(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    say = "import os, sys; open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(str(hash('fullframe')))"
    assert launch(2, ["-c", say, str(tmp_path)]) == 0
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "x"}, "RANK='0' and WORLD_SIZE='x', which is no rank of a job"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x' is set, and RANK is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE='4' is set, and RANK is not"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"one of 4 processes \(SLURM_STEP_NUM_TASKS\), and RANK is not set"),
    ],
)
def test_half_a_place_is_named(environment, said, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # another test may have made this process a job of one
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=said):
        ff.init_mesh(width=2)
