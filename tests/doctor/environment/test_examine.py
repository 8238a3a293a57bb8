"""The whole of a machine without a GPU."""

import getpass
from dataclasses import replace
from pathlib import Path

from fullframe.doctor.environment.examine import examine, installed_versions, judged_processes
from fullframe.doctor.environment.hardware import judged_gpus
from fullframe.doctor.environment.kinds import KINDS
from fullframe.observation.gpus import Gpu, GpuProcess, Owner


def owner(command: tuple[str, ...], parent: str = "systemd", parent_pid: int = 1, **environment: str) -> Owner:
    return Owner(
        user=getpass.getuser(),
        command=command,
        environment=environment,
        parent=parent,
        parent_pid=parent_pid,
        is_fork=False,
    )


def test_it_says_what_it_saw_and_what_it_could_not_check(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/lo").mkdir(parents=True)
    found = examine(tmp_path, {"NCCL_SOCKET_IFNAME": "eth0", "RANK": "1"})
    assert {"FF210", "FF216"} <= {finding.code for finding in found.findings}
    assert any("throttling" in line for line in found.unchecked) or any("GPU 0" in line for line in found.seen)
    assert f"torch {installed_versions()['torch']}" in found.seen[0]


def test_ranks_that_were_left_behind_and_others_that_were_not() -> None:
    torchrun = {"RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    owners = {
        7: owner(("python", "train.py"), **torchrun),
        8: owner(("python", "train.py"), parent="torchrun", parent_pid=3, **torchrun),
        9: owner(("python", "-m", "fullframe.cli", "train"), **torchrun),
        13: owner(("python", "-m", "fullframe.cli", "train"), RANK="0", WORLD_SIZE="1"),  # set by hand, under nohup
        10: owner(("/usr/sbin/munged", "--socket=/tmp/fullframe-slurm/x")),
        11: owner(("python", "notes.py")),
        12: owner(("python", "train.py"), parent="torchrun", **torchrun),  # process 1 of a container
    }
    owners[14] = replace(owners[7], user="eve")
    assert [finding.fix for finding in judged_processes(owners)] == ["kill 7", "kill 9", "sudo kill 14"]


def test_one_that_holds_a_gpu_is_told_once() -> None:
    left = GpuProcess(pid=7, user="ann", command="python", bytes=1, trouble="orphan", remedy="kill 7")
    torchruns = replace(left, pid=9, trouble="", remedy="")
    card = Gpu(index=0, uuid="x", name="H100", total_bytes=1, used_bytes=1, percent=None, processes=(left, torchruns))
    started = {"RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    owners = {7: owner(("python", "-m", "fullframe.cli"), **started), 9: owner(("python", "train.py"), **started)}
    found = [*judged_gpus([card], []), *judged_processes(owners, [card])]
    assert [finding.fix for finding in found if finding.code == "FF220"] == ["kill 7", "kill 9"]


def test_no_two_kinds_have_one_code() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes) and all(code.startswith("FF2") for code in codes)
