"""The link between two ranks."""

import pytest
import torch.distributed as dist

import fullframe as ff
from fullframe.errors import DeviceError
from fullframe.simulation.devices import link
from fullframe.simulation.devices.link import with_link
from tests.rank_group import rank_group
from tests.simulation.devices.test_calibration import rates


def _measured() -> tuple[list[float], bool, str]:
    link._SIZES = (2**10, 2**15)  # type: ignore[assignment]
    found = with_link(rates(), ff.init_mesh(width=2))
    with pytest.raises(DeviceError) as refused:
        with_link(rates(), ff.init_mesh(height=2))
    dist.barrier()
    return (
        [size for size, _ in found.link],
        all(rate > 0 for _, rate in (*found.link, *found.all_reduce)),
        str(refused.value),
    )


def test_the_link_is_measured_between_two_ranks() -> None:
    for sizes, positive, refused in rank_group(2).run(_measured):
        assert sizes == [2**10, 2**15] and positive and "between 2 ranks, the mesh has width 1" in refused
