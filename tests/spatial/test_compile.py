"""torch.compile around split tensors: the graph breaks at each, and the numbers are those of one process."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import fullframe as ff
from fullframe.spatial import tensor
from tests.rank_group import RankGroup, rank_group


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.double()

    def forward(self, x):
        x = self.stem(x)
        x = x + self.block(x)
        return nn.functional.interpolate(x, scale_factor=2, mode="bilinear")[..., : x.size(-1)] * x.mean((2, 3), True)


def step(model, x):
    """The output, its loss's gradients, and the running statistics."""
    for _ in range(2):  # the second time, what was compiled is run
        y = model(x)
        model.zero_grad()
        y.square().mean().backward()
    whole = y.full() if isinstance(y, ff.SpatialTensor) else y
    return [whole.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def compared(part):
    torch.manual_seed(0)
    plain = Network()
    model, x = copy.deepcopy(plain), torch.randn(1, 2, 11, 18, dtype=torch.float64)
    if part == "block":
        model.block = torch.compile(model.block, backend="eager")
    elif part == "model":
        model = torch.compile(model, backend="eager")
    mesh = ff.init_mesh(width=2)
    tensor._warned_of_dynamo.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = ff.parallelize(model, mesh)
        if part == "parallel model":
            model = torch.compile(model, backend="eager")
        found = step(model, ff.shard(x, mesh))
    told = [str(w.message) for w in said if "torch.compile breaks its graph" in str(w.message)]
    return [float((a - b).abs().max()) for a, b in zip(found, step(plain, x), strict=True)], told


@pytest.mark.parametrize("part", ["block", "model", "parallel model"])
def test_a_compiled_model_is_exact_and_told_what_compiles_instead(part):
    for rank, (differences, told) in enumerate(rank_group(2).run(compared, part)):
        assert len(differences) == 10 and max(differences) < 1e-12
        assert len(told) == (rank == 0) and all("compile=True" in one for one in told), told


def made_whole(x):
    y = x * 2
    return (y.full() if isinstance(y, ff.SpatialTensor) else y).sin().sum()


def compiled_to_the_whole():
    leaf = torch.randn(1, 2, 5, 7, dtype=torch.float64).requires_grad_()
    split = ff.shard(leaf, ff.init_mesh(width=2))
    made_whole(leaf).backward()
    expected, leaf.grad = leaf.grad, None
    torch.compile(made_whole, backend="eager")(split).backward()
    return float((leaf.grad - expected).abs().max())


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_may_make_a_split_tensor_whole():
    assert max(rank_group(2).run(compiled_to_the_whole)) < 1e-12


class Cropped(nn.Module):
    """A method that is compiled, in blocks that are, on maps whose size changes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.compiled = torch.compile(self.body, backend="eager")

    def body(self, x):
        return nn.functional.softplus(self.conv(x)) - 0.5

    def forward(self, x):
        crop = self.compiled(x[..., self.cut :, self.cut :])
        return self.compiled(x) + nn.functional.interpolate(crop, size=x.shape[-2:], mode="bilinear")


def cropped(is_frozen):
    torch.manual_seed(0)
    plain = nn.Sequential(Cropped(), Cropped()).double()
    copied = nn.Sequential(Cropped(), Cropped()).double()
    copied.load_state_dict(plain.state_dict())
    mesh, x = ff.init_mesh(height=2), torch.randn(1, 2, 9, 15, dtype=torch.float64)
    if is_frozen:
        gc.freeze()
    model, differences = ff.parallelize(copied, mesh, compile=["*"]), []
    for cut in range(3):
        for block in (*plain, *copied):
            block.cut = cut
        results = zip(step(model, ff.shard(x, mesh)), step(plain, x), strict=True)
        differences += [float((a - b).abs().max()) for a, b in results]
    assert (gc.get_freeze_count() > 0) == is_frozen
    gc.unfreeze()
    return max(differences)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_our_own_functions_are_not_compiled(is_frozen):
    fresh = RankGroup(2)  # whose Dynamo was told nothing yet
    try:
        assert max(fresh.run(cropped, is_frozen)) < 1e-12
    finally:
        fresh.close()
