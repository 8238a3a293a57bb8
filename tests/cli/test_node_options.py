"""What the options say of a job's machines, and what is missing or contradicts itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fullframe.cli.node_options import NodeOptions, nodes_of, require_whole_replicas
from fullframe.cli.train import Train
from fullframe.errors import MeshError
from fullframe.strategy import Strategy


def nodes(environment: dict[str, str] | None = None, processes: int = 2, **options: Any):
    return nodes_of(NodeOptions(nodes=2, **options), processes, environment or {})


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.1:29500", "10.0.0.1", 29500),
        ("head", "head", 29400),
        ("[fd00::1]:5", "fd00::1", 5),
        ("fd00::1", "fd00::1", 29400),
    ],
)
def test_an_address(address: str, host: str, port: int) -> None:
    found = nodes(node_rank=1, rendezvous=address)
    assert (found.host, found.port, found.rank, found.least, found.processes) == (host, port, 1, 2, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rendezvous": "a:1"}, "needs --node-rank"),
        ({"node_rank": 0}, "needs --rendezvous"),
        ({"node_rank": 2, "rendezvous": "a:1"}, "--node-rank must be 0 to 1, got 2"),
        ({"node_rank": 0, "rendezvous": "a:99999"}, "HOST:PORT"),
        ({"node_rank": 0, "rendezvous": ":5"}, "HOST:PORT"),
        ({"node_rank": 0, "rendezvous": "a:1", "min_nodes": 3}, "--min-nodes must be 1 to 2"),
        ({"node_rank": 0, "rendezvous": "a:1", "node_timeout": 0}, "--node-timeout must be greater"),
        (
            {"environment": {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}},
            r"Slurm has started 1: .* srun --nodes=2 --ntasks",
        ),
        ({"environment": {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "8"}}, "has started 8: .* --ntasks-per-node=1"),
    ],
)
def test_what_is_missing_or_wrong_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MeshError, match=said):
        nodes(**options)


def test_a_step_of_slurm_knows_its_number() -> None:
    assert nodes({"SLURM_NODEID": "1"}, rendezvous="a:1").rank == 1
    step = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert nodes(step, rendezvous="a:1").rank == 1
    assert nodes(step | {"SLURM_STEP_NUM_TASKS": "1"}, node_rank=0, rendezvous="a:1").rank == 0  # a step for each


def test_a_pod_knows_its_number_and_the_first() -> None:
    found = nodes({"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "x-node-0-0.x", "PET_MASTER_PORT": "29500"})
    assert (found.rank, found.host, found.port) == (1, "x-node-0-0.x", 29500)
    assert nodes({"JOB_COMPLETION_INDEX": "1"}, rendezvous="x-0.x:29400").rank == 1


def test_fewer_machines_must_hold_whole_replicas() -> None:
    here = nodes(node_rank=0, rendezvous="a:1", min_nodes=1, processes=4)
    require_whole_replicas(here, Strategy(data=2, width=4))
    with pytest.raises(MeshError, match=r"1 machines of 4 ranks .* of 8 ranks each; only 2 do"):
        require_whole_replicas(here, Strategy(width=8))


def test_options_that_all_machines_share() -> None:
    train = Train(recipe=Path("a.py"), set=("lr=1", "b=-2"), keep_checkpoints=5, run_dir=Path("r"), json=True)
    train = replace(train, over=NodeOptions(nodes=2, node_rank=1, rendezvous="a:1", min_nodes=1), deterministic=True)
    assert train._shared_options() == {
        **{"--set": "lr=1 b=-2", "--nodes": "2", "--min-nodes": "1"},
        **{"--keep-checkpoints": "5", "--deterministic": ""},
    }
