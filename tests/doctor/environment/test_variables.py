"""Planted environments."""

from collections.abc import Mapping

import pytest

from fullframe.doctor.environment.variables import judged_variables

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def codes(environment: Mapping[str, str], gpus: int = 0) -> list[str]:
    found = judged_variables(
        environment, gpus=gpus, processors=4, interfaces=["eth0", "ib0", "lo"], resolves=lambda name: name == "node1"
    )
    return [finding.code for finding in found]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"MASTER_PORT": ""}, ["FF210"]),
        ({"RANK": "4"}, ["FF211"]),
        ({"LOCAL_RANK": "2"}, ["FF211"]),
        ({"WORLD_SIZE": "four"}, ["FF211"]),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, []),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, ["FF211"]),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "TORCHELASTIC_RUN_ID": "x"}, []),  # torchrun under srun
        ({"MASTER_ADDR": "localhost"}, ["FF212"]),
        ({"MASTER_ADDR": "localhost", "WORLD_SIZE": "2", "RANK": "1"}, []),
        ({"MASTER_PORT": "80"}, ["FF213"]),
        ({"MASTER_PORT": "99999"}, ["FF213"]),
        ({"MASTER_ADDR": "node7"}, ["FF214"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, []),  # a prefix
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ["FF216"]),
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, []),
        ({"GLOO_SOCKET_IFNAME": "enp3"}, ["FF216"]),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ["FF217"]),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, ["FF217"]),
        ({"NCCL_P2P_DISABLE": "0"}, []),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, ["FF218"]),
        ({"OMP_NUM_THREADS": "2"}, []),
        ({"OMP_NUM_THREADS": "3"}, ["FF207"]),
    ],
)
def test_a_launchers_variables(changes: dict[str, str], expected: list[str]) -> None:
    assert codes(TORCHRUN | changes) == expected


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [
        ("0,1", 2, []),
        ("0,0", 2, ["FF215"]),
        ("0,2", 2, ["FF215"]),
        ("", 2, ["FF215"]),
        ("-1", 2, ["FF215"]),
        ("", 0, []),
        ("GPU-1a,GPU-2b", 2, []),
    ],
)
def test_visible_devices(visible: str, gpus: int, expected: list[str]) -> None:
    assert codes({"CUDA_VISIBLE_DEVICES": visible}, gpus) == expected


def test_more_ranks_than_devices_that_are_listed() -> None:
    assert codes({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_WORLD_SIZE": "4"}, 4) == ["FF215"]


def test_nothing_set_is_nothing_wrong() -> None:
    assert codes({}) == []
