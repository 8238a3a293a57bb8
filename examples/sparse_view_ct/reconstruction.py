"""An unrolled quasi-Newton network for tomography, after QN-Mixer (Ayad, Larue, Nguyen, CVPR 2024).

Each iteration takes a quasi-Newton step on the misfit of the readings and adds what a small mixer has learned of
images. The network keeps more from iteration to iteration than the image: a `State`.
"""

from typing import NamedTuple

import torch
from radon import Scan, back_project, project
from torch import Tensor, nn

import fullframe as ff

RIDGE = 0.2  # of the misfit's largest curvature


class State(NamedTuple):
    """All (N, 1, H, W) but memory, (N, M, H, W); `before` is what the iteration before this one had."""

    image: Tensor
    image_before: Tensor
    gradient_before: Tensor
    memory: Tensor


class Mixer(nn.Module):
    """Mixes pixels by a depthwise convolution, then channels, as ConvMixer; (N, C, H, W) to the same."""

    def __init__(self, channels: int):
        super().__init__()
        self.pixels = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.GroupNorm(1, channels)
        self.channels = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 1), nn.GELU(), nn.Conv2d(2 * channels, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.channels(self.norm(self.pixels(x)))


class Iteration(nn.Module):
    """`state = block(state, sinogram)`."""

    def __init__(self, scan: Scan, channels: int = 16, memory: int = 4, mixers: int = 2):
        super().__init__()
        self.scan = scan
        self.step = nn.Parameter(torch.tensor(0.5))
        self.regulariser = nn.Sequential(
            nn.Conv2d(3 + memory, channels, 3, padding=1),
            *(Mixer(channels) for _ in range(mixers)),
            nn.Conv2d(channels, 1 + memory, 3, padding=1),
        )
        nn.init.zeros_(self.regulariser[-1].weight)  # begins as the plain method, without a prior
        nn.init.zeros_(self.regulariser[-1].bias)

    def forward(self, state: State, sinogram: Tensor) -> State:
        image, image_before, gradient_before, memory = state
        gradient = misfit_gradient(self.scan, image, sinogram)
        direction = quasi_newton(gradient, image - image_before, gradient - gradient_before)
        learned = self.regulariser(torch.cat([image, direction, gradient, memory], 1))
        return State(
            image - self.step * direction + learned[:, :1], image, gradient, torch.tanh(memory + learned[:, 1:])
        )


class Reconstruction(nn.Module):
    """Images (N, 1, size, size) from a first guess of that shape and the readings (N, views * detectors)."""

    def __init__(
        self, scan: Scan, iterations: int = 6, channels: int = 16, memory: int = 4, recompute: bool | str = "none"
    ):
        super().__init__()
        self.scan, self.memory = scan, memory
        blocks = [Iteration(scan, channels, memory) for _ in range(iterations)]
        self.unrolled = ff.unroll(blocks, iterations, recompute=recompute)

    def forward(self, guess: Tensor, sinogram: Tensor) -> Tensor:
        nothing = torch.zeros_like(guess)  # the step from there to the guess tells the first iteration the curvature
        memory = nothing.expand(-1, self.memory, -1, -1)
        state = State(guess, nothing, misfit_gradient(self.scan, nothing, sinogram), memory)
        return self.unrolled(state, sinogram).image


def misfit_gradient(scan: Scan, image: Tensor, sinogram: Tensor) -> Tensor:
    """The gradient of half the squared misfit, divided by about the largest eigenvalue of its second derivative."""
    return back_project(scan, project(scan, image) - sinogram, image) / (scan.views * scan.size)


def quasi_newton(gradient: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """The inverse Hessian of BFGS from one pair times the gradient; all (N, 1, H, W) (Nocedal, Wright, 2006, 7.2).

    `change` is that of the gradient over `step`. Their product is positive, as the misfit is quadratic and RIDGE is
    added to its curvature: few views do not see all of an image, and a step there must not look free.
    """
    change = change + RIDGE * step
    products = torch.cat([step * change, change * change, step * gradient, change * gradient], 1)
    sy, yy, sg, yg = products.sum((2, 3), keepdim=True).chunk(4, 1)  # (N, 1, 1, 1) each
    tiny = torch.finfo(gradient.dtype).tiny
    sy, yy = sy.clamp(min=tiny), yy.clamp(min=tiny)
    along = sg / sy
    scaled = (gradient - along * change) * (sy / yy)
    return scaled + step * (along - (yg - along * yy) / yy)
