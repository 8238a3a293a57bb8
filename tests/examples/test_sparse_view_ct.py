"""The tomography example: an exact adjoint, the plain loop's gradients whole and split, and a training that learns."""

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from skimage.transform import iradon
from torch import Tensor

import fullframe as ff
from tests.rank_group import rank_group

FOLDER = Path(__file__).parents[2] / "examples" / "sparse_view_ct"
SIZE, VIEWS, DETECTORS = 13, 6, 20
MESHES = ((1, 2), (2, 1), (2, 2), (1, 3))


def module(name: str) -> Any:
    """A file of the example, imported as its recipe imports it."""
    found = sys.modules.get(name)
    if found is not None and Path(str(found.__file__)).parent != FOLDER:  # another example's file of this name
        del sys.modules[name]
    if sys.path[0] != str(FOLDER):
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def scan() -> Any:
    return module("radon").Scan(SIZE, VIEWS, DETECTORS)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_adjoint_is_exact() -> None:
    radon = module("radon")
    image, sinogram = drawn(3, 1, SIZE, SIZE), drawn(3, VIEWS * DETECTORS)
    left, right = (radon.project(scan(), image) * sinogram).sum(), (image * radon.back_project(scan(), sinogram, image))
    assert float((left - right.sum()).abs() / left.abs()) < 1e-12
    assert torch.autograd.gradcheck(lambda x: radon.project(scan(), x), image[:1].requires_grad_())


def test_under_autocast_readings_are_summed_in_full() -> None:
    radon = module("radon")
    image = drawn(2, 1, SIZE, SIZE).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        readings = radon.project(scan(), image)
        found = radon.back_project(scan(), readings.bfloat16(), image)
    assert readings.dtype == found.dtype == torch.float32
    assert torch.equal(readings, radon.project(scan(), image.float()))
    found.sum().backward()
    assert image.grad is not None and image.grad.dtype == torch.bfloat16


def test_a_pixel_s_reading_is_the_area_in_the_strip() -> None:
    radon = module("radon")
    image = torch.zeros(1, 1, SIZE, SIZE, dtype=torch.float64)
    image[0, 0, 2, 9] = 1  # its centre is 3 to the right of the middle and 4 above it
    found = radon.project(scan(), image).view(VIEWS, DETECTORS)
    steps = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000 - 0.5
    y, x = torch.meshgrid(4 + steps, 3 + steps, indexing="ij")
    for angle, readings in zip(scan().angles.tolist(), found, strict=True):
        element = (x * math.cos(angle) + y * math.sin(angle) + DETECTORS / 2).long()
        counted = torch.bincount(element.flatten(), minlength=DETECTORS) / 2000**2
        assert float((readings - counted).abs().max()) < 1e-3
    with pytest.raises(ValueError, match="18 detectors do not reach the corners"):
        radon.Scan(SIZE, VIEWS, 18)


def test_filtered_back_projection_is_scikit_image_s() -> None:
    radon = module("radon")
    fine = radon.Scan(33, 90, 49)  # odd, where both have the centre at the same place
    y, x = torch.meshgrid(*[torch.linspace(-2, 2, 33, dtype=torch.float64)] * 2, indexing="ij")
    image = torch.exp(-(x**2) - 2 * (y - 0.3) ** 2)[None, None]
    sinogram = radon.project(fine, image)
    found = radon.filtered_back_projection(fine, sinogram)[0, 0]
    theirs = iradon(sinogram.view(90, 49).numpy().T, fine.angles.rad2deg().numpy(), output_size=33, circle=False)
    assert float((found - image[0, 0]).abs().max()) < 0.02
    assert float((found - torch.from_numpy(theirs)).abs().max()) < 0.02


def test_the_quasi_newton_direction() -> None:
    made = module("reconstruction")
    step, change, one, other = drawn(4, 3, 1, 5, 7)
    change = change + 9 * step  # a positive curvature
    with_ridge = change + made.RIDGE * step
    assert torch.allclose(made.quasi_newton(with_ridge, step, change), step)  # the secant equation
    left = (made.quasi_newton(one, step, change) * other).sum((1, 2, 3))
    assert torch.allclose(left, (one * made.quasi_newton(other, step, change)).sum((1, 2, 3)))  # symmetric
    assert bool(torch.isfinite(made.quasi_newton(one, step * 0, change * 0)).all())


def network(recompute: Any, iterations: int = 5) -> Any:
    torch.manual_seed(0)
    model = module("reconstruction").Reconstruction(scan(), iterations, channels=4, memory=2, recompute=recompute)
    for block in model.unrolled.block:
        torch.nn.init.normal_(block.regulariser[-1].weight, std=0.1)  # its zeros would stop gradients
    return model.double()


def looped(model: Any, guess: Tensor, sinogram: Tensor) -> Tensor:
    """The same network without `ff.unroll`."""
    made = module("reconstruction")
    nothing = torch.zeros_like(guess)
    gradient = made.misfit_gradient(scan(), nothing, sinogram)
    state = made.State(guess, nothing, gradient, nothing.expand(-1, model.memory, -1, -1))
    for block in model.unrolled.block:
        state = block(state, sinogram)
    return state.image


def gradients(model: Any, call: Any, place: Any = lambda whole: whole) -> list[Tensor]:
    guess, sinogram = place(drawn(2, 1, SIZE, SIZE)).requires_grad_(), drawn(2, VIEWS * DETECTORS)
    loss = F.mse_loss(call(guess, sinogram), place(drawn(2, 1, SIZE, SIZE) + 1))
    loss.backward()  # type: ignore[no-untyped-call]
    whole = guess.grad.full() if isinstance(guess.grad, ff.SpatialTensor) else guess.grad
    return [loss.detach(), whole, *(p.grad for p in model.parameters())]


def furthest(found: list[Tensor], wanted: list[Tensor]) -> float:
    assert all(float(t.abs().max()) > 0 for t in wanted)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("recompute", ["none", True, "nested"])
def test_gradients_are_the_plain_loop_s(recompute: Any) -> None:
    plain, unrolled = network("none"), network(recompute)
    wanted = gradients(plain, lambda *args: looped(plain, *args))
    assert furthest(gradients(unrolled, unrolled), wanted) < 1e-10


def _split(height: int, width: int) -> float:
    mesh = ff.init_mesh(height, width)
    plain, split = network("none"), network(True)
    model = ff.parallelize(split, mesh)
    wanted = gradients(plain, lambda *args: looped(plain, *args))
    return furthest(gradients(split, model, lambda whole: ff.shard(whole, mesh)), wanted)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_split_over_ranks(mesh: tuple[int, int]) -> None:
    assert max(rank_group(mesh[0] * mesh[1]).run(_split, *mesh)) < 1e-9


def test_training_learns_and_draws(tmp_path: Path) -> None:
    recipe = module("recipe")
    job = recipe.recipe(module("radon").Scan(24, 12, 36), steps=60, iterations=2)
    ff.fit(job, ff.Strategy(clip_norm=0.1), tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    results = json.loads((tmp_path / "held_out.json").read_text())
    assert [row["name"] for row in results] == list(recipe.HELD_OUT)
    gain = [row["psnr_network"] - row["psnr_filtered"] for row in results]
    assert sum(gain) / len(gain) > 1
    assert (tmp_path / "held_out.png").read_bytes().startswith(b"\x89PNG")
