"""Specs of a job that does not exist, for what sends nothing: one process, no ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement
from fullframe.ranks.mesh import Spatial, init_mesh, spatial_of
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.spec import Spec, spec_of


@contextmanager
def spatial(height: int, width: int, rank: int = 0, depth: int = 1) -> Iterator[Spatial]:
    """The mesh as `rank` of height x width (x depth) ranks sees it."""
    with fake_job(rank, depth * height * width):
        yield spatial_of(init_mesh(height, width, depth=depth))


def on_width(bounds: tuple[int, ...], dim: int, outer: int = 1, inner: int = 1) -> Placement:
    return Placement("width", dim, Extents(bounds), outer, inner)


def on_height(bounds: tuple[int, ...], dim: int) -> Placement:
    return Placement("height", dim, Extents(bounds))


def spec(of: Spatial, shape: tuple[int, ...], *placements: Placement) -> Spec:
    return spec_of(of, shape, placements, False, None)
