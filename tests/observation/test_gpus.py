"""Who holds memory on which GPU. The driver is a stand-in; the processes of the last tests are real."""

import getpass
import os
import subprocess
import sys
import time
from collections.abc import Mapping

import psutil
import pytest

from fullframe.errors import DeviceError
from fullframe.observation.gpus import Gpu, GpuProcess, Owner, gpus, is_orphan, own_gpu, owner_of
from tests.observation.fake_nvml import GIB, FakeNvml

ME = getpass.getuser()
FORKSERVER = ("python", "-c", "from multiprocessing.forkserver import main; main(9, 10, ['fullframe'])")
RANK = ("/usr/bin/python", "-m", "fullframe.cli", "train", "recipe.py")


def owner(environment: Mapping[str, str] | None = None, **changes) -> Owner:
    known = {"user": ME, "command": RANK, "parent": "python3", "parent_pid": 4000, "is_fork": False}
    return Owner(environment=environment or {}, **{**known, **changes})


def rank(number: int, **more: str) -> dict[str, str]:
    return {"RANK": str(number), "LOCAL_RANK": str(number), "TORCHELASTIC_RUN_ID": "x", **more}


def processes(found: list[Gpu]) -> list[tuple[int, GpuProcess]]:
    return [(gpu.index, process) for gpu in found for process in gpu.processes]


def test_who_holds_what():
    driver = FakeNvml([{100: 3 * GIB, 200: None}, {}])
    owners = {100: owner(), 200: owner(user="eve", command=("python", "a b.py"))}
    asked = []
    first, second = gpus(driver, lambda pid: asked.append(pid) or owners.get(pid))
    assert (first.name, first.total_bytes, first.used_bytes, first.percent) == ("NVIDIA H100", 80 * GIB, 3.5 * GIB, 37)
    assert [(p.pid, p.user, p.bytes, p.trouble) for p in first.processes] == [
        (100, ME, 3 * GIB, ""),
        (200, "eve", None, ""),
    ]
    assert first.processes[1].command == "python 'a b.py'"
    assert second.processes == () and driver.open == 0, "the library is closed again"
    assert asked == [100, 200], "each once"


def test_a_process_of_another_namespace_is_shown_without_a_name():
    ((_, process),) = processes(gpus(FakeNvml([{7: GIB}]), lambda pid: None))
    assert (process.user, process.command, process.trouble) == ("?", "(not to be seen from here)", "")


def test_a_driver_that_tells_less_is_enough():
    (gpu,) = gpus(FakeNvml([{7: GIB}], tells_percent=False), lambda pid: None)
    assert gpu.percent is None and len(gpu.processes) == 1


def test_without_a_driver_it_is_one_line():
    with pytest.raises(
        DeviceError, match=r"no NVIDIA driver on this machine answers \(NVML Shared Library Not Found\)"
    ):
        gpus(FakeNvml([], has_driver=False))
    lost = FakeNvml([{}, {}], lost=1)
    with pytest.raises(DeviceError, match=r"does not answer its driver \(GPU is lost\)"):
        gpus(lost)
    assert lost.open == 0


@pytest.mark.parametrize(
    ("found", "orphan"),
    [
        (owner(rank(1)), False),
        (owner(rank(1), parent="systemd", parent_pid=1), True),
        (owner(rank(1), parent="systemd", parent_pid=812), True),  # the user's own
        (owner(rank(1), parent="", parent_pid=0), True),
        (owner(rank(1), parent="python3", parent_pid=1), False),  # the launcher is process 1 of a container
        (owner(rank(1), parent="torchrun", parent_pid=1), False),
        (owner(rank(1), parent="bash", parent_pid=1), True),
        (owner(rank(1), parent="bash", parent_pid=50), False),
        (owner(parent="systemd", parent_pid=1), False),  # one process, started with nohup
        (owner(parent="systemd", parent_pid=1, is_fork=True), True),  # a loader's worker
        (owner(parent="systemd", parent_pid=1, command=FORKSERVER), False),  # another program's
        (owner(rank(1), parent="systemd", parent_pid=1, command=FORKSERVER), False),
        (owner(rank(1, FULLFRAME_RESTART_REASON=""), parent="systemd", parent_pid=1, command=FORKSERVER), True),
        (owner(rank(1), command=("python", "other.py"), parent="systemd", parent_pid=1), False),
    ],
)
def test_what_is_an_orphan(found: Owner, orphan: bool):
    assert is_orphan(found) is orphan


def test_an_orphan_comes_with_the_command_that_would_end_it():
    left = {"parent": "systemd", "parent_pid": 1}
    owners = {100: owner(rank(0), **left), 200: owner(rank(1), user="eve", **left)}
    found = processes(gpus(FakeNvml([{100: GIB}, {200: GIB}]), owners.get))
    assert [(p.trouble, p.remedy) for _, p in found] == [("orphan", "kill 100"), ("orphan", "sudo kill 200")]


def test_a_rank_with_a_context_on_another_ranks_gpu_is_named():
    driver = FakeNvml([{100: GIB, 101: GIB // 2}, {101: GIB}])
    found = processes(gpus(driver, {100: owner(rank(0)), 101: owner(rank(1))}.get))
    assert [(index, p.pid, p.trouble) for index, p in found] == [(0, 100, ""), (0, 101, "wrong gpu"), (1, 101, "")]
    assert found[1][1].text.startswith("rank 1 (101) has a context on GPU 0, its own is GPU 1; set the device")


@pytest.mark.parametrize(
    ("environment", "names", "number"),
    [
        (rank(1), ("A", "A", "A"), 1),
        (rank(0, CUDA_VISIBLE_DEVICES="2,1"), ("A", "A", "A"), 2),
        (rank(1, CUDA_VISIBLE_DEVICES="GPU-2a2b,GPU-0a2b"), ("A", "B", "A"), 0),
        (rank(1, CUDA_VISIBLE_DEVICES="2"), ("A", "A", "A"), None),  # there is no second one
        (rank(1), ("A", "B", "A"), None),  # CUDA may count the faster first
        (rank(1, CUDA_DEVICE_ORDER="PCI_BUS_ID"), ("A", "B", "A"), 1),
        (rank(0, CUDA_VISIBLE_DEVICES="MIG-1-2-3"), ("A", "A", "A"), None),
        (rank(0, CUDA_VISIBLE_DEVICES=""), ("A", "A", "A"), None),
        ({}, ("A", "A", "A"), None),
    ],
)
def test_which_gpu_is_a_ranks_own(environment, names, number):
    found = gpus(FakeNvml([{}, {}, {}], names=names), lambda pid: None)
    assert own_gpu(environment, found) == number


def test_a_real_process_is_described():
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)", "fullframe"]
    environment = {**os.environ, "RANK": "3"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            found = owner_of(process.pid)
            assert found is not None
            assert (found.user, found.command[-1], found.environment["RANK"]) == (ME, "fullframe", "3")
            assert (found.parent_pid, found.is_fork) == (os.getpid(), False) and not is_orphan(found)
        finally:
            process.kill()
    assert owner_of(process.pid) is None


def test_a_real_rank_whose_launcher_died_is_an_orphan():
    rank_code = "import time; time.sleep(1000)"
    launcher_code = (
        "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1], 'fullframe'], "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, "
        "env={**os.environ, 'RANK': '0', 'TORCHELASTIC_RUN_ID': 'x'}); print(p.pid, flush=True)"
    )
    said = subprocess.run([sys.executable, "-c", launcher_code, rank_code], capture_output=True, text=True, timeout=120)
    pid = int(said.stdout)
    try:
        deadline = time.monotonic() + 60
        while (found := owner_of(pid)) is not None and "fullframe" not in found.command:
            assert time.monotonic() < deadline  # it has not yet become what it is to be
            time.sleep(0.05)
        assert found is not None
        adopted = psutil.Process(found.parent_pid).name() if found.parent_pid else ""
        if found.parent_pid > 1 and adopted not in ("systemd", "init"):
            pytest.skip(f"here orphans go to {adopted}, which no rule knows")
        assert is_orphan(found)
    finally:
        psutil.Process(pid).kill()


def test_a_launcher_whose_shell_has_ended_is_no_orphan(tmp_path):
    code = "import os, sys, time; print(os.getpid(), os.fork(), flush=True); time.sleep(1000)"
    script = f"nohup {sys.executable} -c '{code}' fullframe train > {tmp_path}/said 2> /dev/null < /dev/null &"
    (tmp_path / "said").touch()
    subprocess.run(["bash", "-c", script], check=True, timeout=60, start_new_session=True)
    deadline = time.monotonic() + 60.0
    while len(found := (tmp_path / "said").read_text().split()) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher, worker = int(found[0]), int(found[1]) or int(found[3])
    try:
        started = owner_of(launcher)
        assert started is not None and started.parent_pid != os.getpid() and not is_orphan(started)
        forked = owner_of(worker)
        assert forked is not None and forked.is_fork and not started.is_fork
    finally:
        os.kill(launcher, 9)
        os.kill(worker, 9)
