"""The tracked peak of a real step is what torch's allocator says, by its own events."""

import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

import fullframe as ff
from fullframe.observation.memory.traced_step import TracedStep
from fullframe.ranks.mesh import init_mesh
from fullframe.training.observers import Observed
from fullframe.training.session import assemble
from tests.simulation.real_steps import held_bytes


class Frames(Dataset):
    def __init__(self, shape):
        self.shape = shape

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"image": torch.ones(3, *self.shape)}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x):
        y = self.stem(x)
        return y + torch.relu(self.norm(self.inner(y)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 32, 4, stride=4)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)

    def forward(self, x):
        return self.block(self.cut(x).flatten(2).transpose(1, 2))


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.up = nn.Conv2d(32, 8, 3, padding=1)

    def forward(self, x):
        first = torch.relu(self.down(x))
        below = nn.functional.interpolate(torch.relu(self.middle(first)), scale_factor=2.0)
        return self.up(torch.cat([first, below], 1))


def convolutions():
    layers, channels = [], 3
    for _ in range(4):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        channels = 16
    return nn.Sequential(*layers)


def depthwise():
    layers = [nn.Conv2d(16, 16, 5, padding=2, groups=16), nn.Conv2d(16, 16, 1), nn.GELU()]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers)


def pooled():
    return nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(24, 24, 3, padding=1), nn.SiLU())


def upsampled():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.Upsample(scale_factor=2.0),
        nn.Conv2d(16, 8, 3, padding=1),
    )  # fmt: skip


def instances():
    layers, channels = [], 3
    for _ in range(3):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU()]
        channels = 16
    return nn.Sequential(*layers)


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 16)

    def forward(self, x):
        y = torch.relu(self.inner(x))
        return y * torch.sigmoid(self.gate(y.mean((2, 3))))[..., None, None]


MODELS = [convolutions, Residual, depthwise, pooled, instances, Squeezed, Tokens, Unet, upsampled]


def peaks(model):
    """The peak of the third step by torch.profiler, and of the second one by the tracker."""
    recipe = ff.Recipe(
        model=model,
        loss=lambda model, batch: model(batch["image"]).square().mean(),
        optimizer=torch.optim.AdamW,
        data=lambda: Frames((96, 128)),
        batch_size=2,
    )
    mesh = init_mesh()
    gc.collect()  # what an earlier test left would be freed within, and counted against what is allocated
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        session = assemble(recipe, ff.Strategy(), mesh)
        batches = iter(session.state.loader)
        session.step(next(batches))
        session.step(next(batches))
    allocated = max(held_bytes(profiled))
    run = Observed(recipe=recipe, session=session, strategy=ff.Strategy(), mesh=mesh, run_dir=None, rank=0,
                   say=print, append=print)  # fmt: skip
    traced = TracedStep(run)
    batch = next(batches)
    traced.start(batch)
    session.step(batch)
    found = traced.stop()
    assert found is not None
    return allocated, found[1].peak_bytes


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__.lower())
def test_the_peak_is_that_of_torchs_own_events(model):
    allocated, tracked = peaks(model)
    assert tracked == pytest.approx(allocated, rel=0.01)
