"""Which modules gather their parameters by themselves."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fullframe.model.sharding.units import units_to_shard

MIB = (1 << 20) // 4  # numbers


def layer(mebibytes: float) -> nn.Linear:
    return nn.Linear(1024, int(mebibytes * MIB) // 1024, bias=False)


class Block(nn.Module):
    def __init__(self, mebibytes: float) -> None:
        super().__init__()
        self.layer1, self.layer2 = layer(mebibytes / 2), layer(mebibytes / 2)


class Parts(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def listed(*mebibytes: float) -> nn.ModuleList:
    return nn.ModuleList(map(layer, mebibytes))


def sequence(*mebibytes: float) -> nn.Sequential:
    return nn.Sequential(*map(layer, mebibytes))


def tied() -> nn.Module:
    model = Parts(layers=listed(40, 40, 40), head=layer(40))
    model.head.weight = model.layers[1].weight  # type: ignore[index, union-attr]
    return model


class Stage(nn.Module):
    """One large layer that nothing says is called, as `attention.weight` may be taken by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = layer(100), layer(100)


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "no more are left than the largest": (lambda: Parts(layers=listed(40, 40, 40)), ["layers.0", "layers.1"]),
    "the largest first": (lambda: sequence(10, 20, 60, 50), ["2", "3"]),
    "few bytes are one message": (lambda: sequence(6, 6, 6, 6), []),
    "under their parent's names": (lambda: Parts(conv1=layer(30), conv2=layer(30), head=layer(9)), ["conv1"]),
    "single layers stay": (Stage, []),
    "what has to stay is as large": (lambda: Parts(layers=listed(40, 40), big=Stage()), []),
    "a block is a unit": (lambda: Parts(blocks=nn.ModuleList([Block(60), Block(60)])), ["blocks.0", "blocks.1"]),
    "layers beside blocks": (
        lambda: Parts(blocks=nn.ModuleList([Block(60), Block(60)]), layers=listed(40, 40, 40)),
        ["blocks.0", "blocks.1", "layers.0", "layers.1"],
    ),
    "a Sequential is divided": (
        lambda: nn.Sequential(sequence(30, 30, 30), nn.ReLU(), sequence(5, 5)),
        ["0", "2", "0.0", "0.1"],
    ),
    "shared with another part": (tied, ["layers.0"]),
}


@pytest.mark.parametrize("what", CASES)
def test_units(what: str) -> None:
    with torch.device("meta"):
        build, expected = CASES[what]
        assert units_to_shard(build()) == expected
