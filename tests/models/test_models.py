"""Whole models, split and in one process: one forward and backward in train mode gives the same numbers.

The ranks build the model themselves and compare for themselves; only their findings travel. Two numbers are the same
when they differ by at most 1e-9 of the largest value in the reference tensor. A tensor that is zero in theory (the
gradient of a bias before BatchNorm, the running mean behind two BatchNorms) holds only rounding noise; it is compared
against the largest gradient or buffer of the model instead.
"""

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models.zoo import ZOO, Entry, Inputs
from tests.rank_group import rank_group

TOLERANCE = 1e-9
ZERO_IN_THEORY = 1e-12  # of the largest gradient; float64 noise of a sum that cancels is some 1e-16

SHOWN = 16  # findings in a failure's message

Size = tuple[int, int]
Expected = dict[str, Any]


def one_process_step(entry: Entry, inputs: Inputs) -> tuple[Tensor, nn.Module]:
    """The model of seed 0 after one forward and backward."""
    torch.manual_seed(0)
    model = entry.build().double().train()
    loss = entry.loss(model, inputs)
    loss.backward()
    return loss.detach(), model


def expected_step(name: str, size: Size, replicas: int, path: Path) -> None:
    """Writes what `replicas` data replicas should see: each its loss and buffers, and the mean of their gradients."""
    entry = ZOO[name]
    inputs = entry.inputs(*size)
    losses, buffers, gradients = [], [], []
    for replica in range(replicas):
        loss, model = one_process_step(entry, batch_of(inputs, replica, replicas))
        losses.append(loss)
        buffers.append(dict(model.named_buffers()))
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    mean = {key: torch.stack([each[key] for each in gradients]).mean(0) for key in gradients[0]}
    torch.save({"losses": losses, "buffers": buffers, "gradients": mean}, path)


def batch_of(inputs: Inputs, replica: int, replicas: int) -> Inputs:
    """The replica's share of a batch."""
    return {key: value.chunk(replicas)[replica] for key, value in inputs.items()}


def largest(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude in any of the tensors."""
    return max((tensor.abs().max().item() for tensor in tensors), default=0.0)


def relative_error(actual: Tensor, expected: Tensor, floor: float) -> float:
    """The largest difference over the largest expected value, or over `floor` where only noise is expected."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    scale = expected.abs().max().item()
    scale = scale if scale > ZERO_IN_THEORY * floor else floor
    difference = (actual - expected).abs().max().item()
    return difference / scale if scale else difference


@functools.cache
def mesh_of(height: int, width: int, depth: int = 1) -> Any:
    """One mesh a shape and rank process: each makes process groups of its own."""
    import fullframe as ff

    return ff.init_mesh(height=height, width=width, depth=depth)


def split_step(name: str, size: Size, height: int, width: int, path: str) -> list[str]:
    """One step on this rank; what is beyond the tolerance."""
    import fullframe as ff

    entry = ZOO[name]
    mesh = mesh_of(height, width)
    replica, replicas = mesh.get_local_rank("data"), dist.get_world_size() // (height * width)
    torch.manual_seed(dist.get_rank())  # only rank 0 starts from the reference's weights: the others must be given them
    model = ff.parallelize(
        entry.build().double().train(),
        mesh,
        unsupported=entry.unsupported,
        find_unused_parameters=entry.find_unused_parameters,
    )
    inputs = batch_of(entry.inputs(*size), replica, replicas)
    inputs = {key: ff.shard(value, mesh) if key in entry.split else value for key, value in inputs.items()}
    loss = entry.loss(model, inputs)
    loss.backward()

    expected: Expected = torch.load(path)
    gradients = {key: p.grad for key, p in model.module.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected["gradients"].keys()
    buffers, expected_buffers = dict(model.module.named_buffers()), expected["buffers"][replica]
    assert buffers.keys() == expected_buffers.keys()
    pairs = [("loss", loss, expected["losses"][replica], 0.0)]
    floor = largest(value for value in expected_buffers.values() if value.is_floating_point())
    pairs += [(f"buffer {key}", buffers[key], value, floor) for key, value in expected_buffers.items()]
    floor = largest(expected["gradients"].values())
    pairs += [(f"gradient of {key}", gradients[key], value, floor) for key, value in expected["gradients"].items()]

    findings = []
    where = f"{name} at {size[0]}x{size[1]} on {replicas} x {height}x{width}, rank {dist.get_rank()}"
    for what, actual, value, floor in pairs:
        error = relative_error(actual.detach(), value, floor)
        if not error <= TOLERANCE:
            findings.append(f"{where}: {what} is off by {error:.1e}")
    return findings


@functools.cache
def reference(directory: Path, name: str, size: Size, replicas: int) -> Path:
    """The file with the expected numbers, computed once a session."""
    path = directory / f"{name}-{size[0]}x{size[1]}-{replicas}.pt"
    expected_step(name, size, replicas, path)
    return path


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("references")


def check(references: Path, name: str, size: Size, *, ranks: int, height: int, width: int) -> None:
    replicas = ranks // (height * width)
    path = reference(references, name, size, replicas)
    results = rank_group(ranks).run(split_step, name, size, height, width, os.fspath(path))
    findings = [finding for found in results for finding in found]
    if findings:
        shown = findings[:SHOWN] + [f"and {len(findings) - SHOWN} more"] * (len(findings) > SHOWN)
        pytest.fail("\n".join(shown), pytrace=False)


@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 1), (2, 2)], ids=lambda value: str(value))
@pytest.mark.parametrize("size", [(64, 96), (100, 150)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", ZOO)
def test_a_split_model_gives_the_numbers_of_one_process(
    references: Path, name: str, size: Size, height: int, width: int
) -> None:
    check(references, name, size, ranks=height * width, height=height, width=width)


@pytest.mark.parametrize("name", ["resnet_basic", "segformer"])
def test_beside_data_replicas_gradients_are_the_mean_over_replicas(references: Path, name: str) -> None:
    check(references, name, (100, 150), ranks=4, height=1, width=2)


@pytest.mark.parametrize("name", ["resnet_basic", "unet", "segformer"])
def test_deep_maps_with_fewer_columns_than_ranks(references: Path, name: str) -> None:
    """40 columns on 4 ranks: 20, 10, 5, 3, 2 at strides 2 to 32."""
    check(references, name, (48, 40), ranks=4, height=1, width=4)


def test_the_models_know_nothing_of_splitting() -> None:
    folder = Path(__file__).parent
    for source in ("zoo.py", "networks.py"):
        assert "fullframe" not in (folder / source).read_text()


def test_a_wrong_gradient_is_found(references: Path) -> None:
    """The comparison itself: one part in 1e8 is a finding, noise where zero is expected is not."""
    value = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert relative_error(value, value, floor=5.0) == 0
    assert relative_error(value * (1 + 1e-8), value, floor=5.0) > TOLERANCE
    noise = torch.tensor([3e-17, -1e-17], dtype=torch.float64)
    assert relative_error(-noise, noise, floor=5.0) < TOLERANCE
    assert relative_error(value, noise, floor=5.0) > TOLERANCE
    assert relative_error(torch.tensor(3), torch.tensor(4), floor=0.0) > TOLERANCE
    assert relative_error(value[:1], value, floor=0.0) > TOLERANCE
