"""What goes through the door of a parallel model, and what DDP sees of the model behind it."""

import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.model.door import Undressed, unwrapped, wrapped
from tests.exactness import mesh, relative
from tests.rank_group import rank_group


def test_nested_values_come_out_as_they_went_in() -> None:
    values = {"a": [torch.ones(2), 3], "b": ("c", None)}
    assert wrapped(*unwrapped(values)) == values


def test_a_sync_batchnorm_is_not_seen() -> None:
    door = Undressed(nn.Sequential(nn.SyncBatchNorm(2), nn.ReLU()), False)
    assert [type(module) for module in door.modules()] == [Undressed, nn.Sequential, nn.ReLU]


def _synced(height: int | None, width: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    kind = nn.BatchNorm2d if height is None else nn.SyncBatchNorm
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), kind(3), nn.ReLU()).double()
    on = None if height is None else mesh(height, width)
    model = net if on is None else ff.parallelize(net, on)
    for step in range(2):
        images = torch.randn(4, 2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if on is not None:
            images = ff.shard(images.chunk(on.size(0))[on.get_local_rank("data")], on)
        model.zero_grad()
        model(images).sin().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= parameter.grad
    return list(net.state_dict().values())


def test_a_sync_batchnorm_in_a_loop_of_ones_own() -> None:
    """With DDP, which refuses it on a CPU."""
    expected = _synced(None)
    for found in rank_group(4).run(_synced, 1, 2):
        assert max(map(relative, expected, found)) < 1e-10
