"""Parallel-beam tomography as a sparse matrix: projection, its exact adjoint, filtered back-projection.

A detector element reads the area of the image's square pixels that its strip covers, over its width of one pixel, so
a reading is a mean line integral in pixels. On a split image each rank has the matrix of its own pixels: the readings
are one sum over the ranks, and nothing is sent on the way back.
"""

import math
import warnings
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

import fullframe as ff
from fullframe.ranks.collectives import all_sum
from fullframe.spatial.rules.registry import Unsupported
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@dataclass(frozen=True)
class Scan:
    """Views at equal angles around an image of `size` x `size` pixels; a sinogram is (N, views * detectors)."""

    size: int
    views: int
    detectors: int

    def __post_init__(self) -> None:
        if self.detectors < self.size * math.sqrt(2):
            raise ValueError(f"{self.detectors} detectors do not reach the corners of {self.size} x {self.size} pixels")

    @property
    def angles(self) -> Tensor:
        """(views,) radians, none of them along the grid, where a pixel's footprint would be a step."""
        return (torch.arange(self.views, dtype=torch.float64) + 0.5) * math.pi / self.views


@lru_cache(maxsize=16)
def matrices(
    scan: Scan, rows: range, columns: range, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What these pixels add to the readings, (views * detectors, pixels), and its transpose; sparse."""
    middle = (scan.size - 1) / 2
    y, x = torch.meshgrid(
        middle - torch.arange(rows.start, rows.stop, dtype=torch.float64),
        torch.arange(columns.start, columns.stop, dtype=torch.float64) - middle,
        indexing="ij",
    )
    cos, sin = scan.angles.cos()[:, None], scan.angles.sin()[:, None]
    centre = x.reshape(1, -1) * cos + y.reshape(1, -1) * sin + scan.detectors / 2  # (views, pixels), in elements
    wide, narrow = (cos.abs() + sin.abs()) / 2, (cos.abs() - sin.abs()) / 2

    def area_below(edge: Tensor) -> Tensor:  # of the pixel, whose footprint on the detector is a trapezoid
        corners = F.relu(edge + wide) ** 2 + F.relu(edge - wide) ** 2
        return (corners - F.relu(edge + narrow) ** 2 - F.relu(edge - narrow) ** 2) / (2 * (cos * sin).abs())

    first = (centre - wide).floor()
    elements = first + torch.arange(3, dtype=torch.float64)[:, None, None]  # a pixel casts on at most three
    weights = area_below(elements + 1 - centre) - area_below(elements - centre)  # (3, views, pixels)
    view = torch.arange(scan.views)[:, None]
    reading = (view * scan.detectors + elements.long()).flatten()
    pixel = torch.arange(centre.shape[1]).expand_as(elements).flatten()
    used = weights.flatten() > 1e-12
    shape = (scan.views * scan.detectors, centre.shape[1])
    indices, values = torch.stack([reading, pixel])[:, used], weights.flatten()[used].to(dtype)
    both = ((indices, shape), (indices.flip(0), shape[::-1]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        forward, back = (
            torch.sparse_coo_tensor(at, values, of, check_invariants=True).coalesce().to(device).to_sparse_csr()
            for at, of in both
        )
    return forward, back


@torch.library.custom_op("sparse_view_ct::product", mutates_args=())
def _product(vectors: Tensor, scan: list[int], part: list[int], transposed: bool) -> Tensor:
    """A fixed sparse matrix, or its transpose, times each row of `vectors`; an op, so that it runs without numbers."""
    both = matrices(Scan(*scan), range(*part[:2]), range(*part[2:]), vectors.dtype, vectors.device)
    return (both[transposed] @ vectors.T).T.contiguous()


@_product.register_fake
def _(vectors: Tensor, scan: list[int], part: list[int], transposed: bool) -> Tensor:
    _, views, detectors = astuple(Scan(*scan))
    pixels = len(range(*part[:2])) * len(range(*part[2:]))
    return vectors.new_empty(vectors.shape[0], pixels if transposed else views * detectors)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.facts = inputs[1:]


def _back(ctx: Any, gradient: Tensor) -> Any:
    scan, part, transposed = ctx.facts
    return _product(gradient, scan, part, not transposed), None, None, None


_product.register_autograd(_back, setup_context=_keep)
for kind in ("cpu", "cuda"):  # autocast would sum readings in 16 bits, for which sparse matrices have no product
    _product.register_autocast(kind, torch.float32)


def project(scan: Scan, image: Tensor) -> Tensor:
    """The readings (N, views * detectors) of images (N, 1, size, size)."""
    if has_torch_function((image,)):
        return handle_torch_function(project, (image,), scan, image)
    return _project(scan, image, range(scan.size), range(scan.size))


def back_project(scan: Scan, sinogram: Tensor, like: Tensor) -> Tensor:
    """The adjoint of `project`: (N, views * detectors) to images, split over ranks as `like` (N, 1, size, size) is."""
    if has_torch_function((sinogram, like)):
        return handle_torch_function(back_project, (sinogram, like), scan, sinogram, like)
    return _back_project(scan, sinogram, range(scan.size), range(scan.size))


def _project(scan: Scan, part: Tensor, rows: range, columns: range) -> Tensor:
    of = [rows.start, rows.stop, columns.start, columns.stop]
    return _product(part.flatten(1), [*astuple(scan)], of, False)


def _back_project(scan: Scan, sinogram: Tensor, rows: range, columns: range) -> Tensor:
    of = [rows.start, rows.stop, columns.start, columns.stop]
    return _product(sinogram, [*astuple(scan)], of, True).view(-1, 1, len(rows), len(columns))


@ff.rule(project)
def project_split(func: Any, scan: Scan, image: SpatialTensor) -> Tensor:
    """The sum over the ranks of what their pixels add."""
    spec = image.spec
    return all_sum(_project(scan, local_of(image), spec.held(2), spec.held(3)), spec.group)


@ff.rule(back_project)
def back_project_split(func: Any, scan: Scan, sinogram: Tensor, like: Tensor) -> Tensor:
    """Each rank makes its own pixels from all readings."""
    if isinstance(sinogram, SpatialTensor) or not isinstance(like, SpatialTensor):
        raise Unsupported("a rank's pixels need all readings", "Give it sinogram.full() and a split image.")
    return wrap(_back_project(scan, sinogram, like.spec.held(2), like.spec.held(3)), like.spec)


def filtered_back_projection(scan: Scan, sinogram: Tensor) -> Tensor:
    """(N, views * detectors) to (N, 1, size, size), by the ramp filter (Kak and Slaney, 1988, section 3.3)."""
    length = 2 ** math.ceil(math.log2(2 * scan.detectors))
    offset = torch.fft.fftfreq(length, 1 / length, dtype=torch.float64)
    odd = offset.remainder(2) == 1
    ramp = torch.where(odd, -1 / (math.pi * offset.where(odd, 1.0)) ** 2, torch.where(offset == 0, 0.25, 0.0))
    views = sinogram.double().unflatten(1, (scan.views, scan.detectors))
    spectrum = torch.fft.rfft(views, length) * torch.fft.rfft(ramp).real
    filtered = torch.fft.irfft(spectrum, length)[..., : scan.detectors].flatten(1).to(sinogram.dtype)
    return _back_project(scan, filtered, range(scan.size), range(scan.size)) * math.pi / scan.views
