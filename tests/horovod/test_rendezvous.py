"""Which rank this process is, by what each launcher puts into the environment."""

import pytest
import torch.distributed as dist

from fullframe.errors import MeshError
from fullframe.horovod.rendezvous import Place, find_place, first_host, place_from

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "123456",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "9",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "3",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "b",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "8",
}


def test_alone() -> None:
    assert place_from({}) == Place(0, 1, 0, 1)
    with pytest.raises(MeshError, match="WORLD_SIZE='x', which is no rank of a job"):
        place_from({**TORCHRUN, "WORLD_SIZE": "x"})


def test_one_of_several_that_mpirun_started_is_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "HOROVOD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert find_place() == Place(0, 1, 0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(MeshError, match="one of 4 processes"):
        find_place()


def test_horovodrun_comes_first() -> None:
    assert place_from({**SLURM, **TORCHRUN, **HOROVODRUN}) == Place(1, 3, 0, 1, "b", 8)


def test_torchrun() -> None:
    assert place_from({**SLURM, **TORCHRUN}) == Place(2, 4, 0, 2, "a", 9)
    assert place_from({**TORCHRUN, "RANK": "0"}).hosts_store
    assert not place_from({**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store


def test_slurm() -> None:
    assert place_from(SLURM) == Place(3, 5, 1, 2, "gpu07", 20000 + 123456 % 20000)
    last = {**SLURM, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    assert place_from(last).local_size == 1
    assert place_from({**SLURM, "SLURM_PROCID": "0"}).hosts_store


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09]", "gpu07"),
        ("a[3,5]", "a3"),
        ("node1", "node1"),
        ("x1,y2", "x1"),
        ("n[1-2],m3", "n1"),
        ("n[1,3-4]-ib,m3", "n1-ib"),
        ("rack[0-1]n[3-4]", "rack0n3"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
