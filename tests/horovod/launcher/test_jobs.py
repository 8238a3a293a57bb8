"""Whole jobs by `fullframe horovodrun`: a script in Horovod's six steps, and workers that fail, come and go."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data.distributed import DistributedSampler

from fullframe.cli import application
from fullframe.horovod.launcher import jobs

SCRIPTS = Path(__file__).parents[1] / "scripts"
RUN = [sys.executable, "-m", "fullframe", "horovodrun"]


def run(folder: Path, *words: object, timeout: float = 250) -> "subprocess.CompletedProcess[str]":
    command = [*RUN, *map(str, words)]
    return subprocess.run(command, cwd=folder, timeout=timeout, capture_output=True, text=True, check=False)


Launched = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launched:
    """As `run` in `tmp_path`, with the launcher in this process, which has torch loaded."""
    monkeypatch.chdir(tmp_path)

    def launch(*words: object) -> "subprocess.CompletedProcess[str]":
        code = application.run(["horovodrun", *map(str, words)])
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return launch


def one_process_with_the_whole_batch() -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(2))
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(216, 5)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(range(64), num_replicas=1, rank=0)  # type: ignore[arg-type]
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = torch.tensor(list(sampler))
        for batch in order.split(16):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_six_steps_train_to_the_numbers_of_one_process(ranks: int, tmp_path: Path) -> None:
    done = run(tmp_path, "-np", ranks, sys.executable, SCRIPTS / "six_steps.py", "model.pt")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("[0]<stdout>:")
    losses, weights = one_process_with_the_whole_batch()
    assert losses[-1] < losses[0]
    torch.testing.assert_close(json.loads(said.removeprefix("[0]<stdout>:")), losses, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.load(tmp_path / "model.pt"), weights, rtol=1e-11, atol=1e-12)


def test_the_same_script_under_torchrun(tmp_path: Path) -> None:
    words = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "fullframe.horovod"]
    command = [sys.executable, "-m", *words, str(SCRIPTS / "six_steps.py"), "model.pt"]
    done = subprocess.run(command, cwd=tmp_path, timeout=250, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses, _ = one_process_with_the_whole_batch()
    torch.testing.assert_close(json.loads(done.stdout.splitlines()[-1]), losses, rtol=1e-11, atol=1e-12)


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path, launched: Launched) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    done = launched("-np", 3, "--output-filename", tmp_path, sys.executable, script)
    assert done.returncode == 1
    for rank in (0, 2):
        assert "HorovodInternalError met" in (tmp_path / f"rank.{rank}" / "stdout").read_text()


DIES = """
import os, signal, time
import torch
import horovod.torch as hvd

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others at once, perhaps before they know
hvd.init()
hvd.allreduce(torch.ones(3))
if hvd.rank() == 1:
    time.sleep(0.5)
    os._exit(1)
try:
    hvd.allreduce(torch.ones(3), name="never")
except hvd.HorovodInternalError as error:
    print("HorovodInternalError met", flush=True)
"""


def test_the_exit_code_is_that_of_the_first_failure_and_the_others_end(launched: Launched) -> None:
    script = 'import os, sys, time; os.environ["HOROVOD_RANK"] == "1" and sys.exit(7); time.sleep(1000)'
    done = launched("-np", 2, "--json", sys.executable, "-c", script)
    assert done.returncode == 7
    assert json.loads(done.stdout)["exit_code"] == 7
    assert "rank 1 ended with exit code 7" in done.stderr


@pytest.mark.parametrize("more", [(), ("--min-np", 1)])
def test_where_output_cannot_be_written_nobody_is_started(
    more: tuple[object, ...], tmp_path: Path, launched: Launched
) -> None:
    (tmp_path / "taken").touch()
    words = ("-np", 1, *more, "--output-filename", "taken")
    done = launched(*words, sys.executable, "-c", "open('started', 'w')")
    assert done.returncode == 2
    assert "cannot write into taken/rank.0: Not a directory; name another --output-filename" in done.stderr
    assert not (tmp_path / "started").exists()


# Rank 0 has lost rank 1, which tells the others that it leaves, and ends only later.
FOLLOWS = """
import os, sys, time
from fullframe.horovod.exceptions import HorovodInternalError
if os.environ["HOROVOD_RANK"] == "0":
    while not os.path.exists("leaving"):
        time.sleep(0.01)
    raise HorovodInternalError("a rank is gone:\\n[gloo] closed")
open("leaving", "w").close()
time.sleep(1.0)
os._exit(7)
"""


@pytest.mark.parametrize("words", [(), ("--min-np", 2, "--reset-limit", 0)], ids=["fixed", "elastic"])
def test_a_rank_that_only_lost_another_is_not_the_cause(
    words: tuple[object, ...], launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CONSEQUENCE_SECONDS", 60.0)  # on a busy machine rank 1 is slow to end
    done = launched("-np", 2, *words, sys.executable, "-c", FOLLOWS)
    assert done.returncode == 7, done.stderr
    assert re.search("rank 1 (on localhost )?ended with exit code 7", done.stderr)


def test_the_variables_are_horovods(launched: Launched) -> None:
    script = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('HOROVOD_')}))"
    done = launched("-np", 3, "-H", "localhost:1,127.0.0.1:2", sys.executable, "-c", script)
    found = dict(line.split(":", 1) for line in done.stdout.splitlines())
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    read = {int(rank[1]): json.loads(text) for rank, text in found.items()}
    assert [[int(read[rank][f"HOROVOD_{name}"]) for name in names] for rank in range(3)] == [
        [0, 3, 0, 1, 0, 2],
        [1, 3, 0, 2, 1, 2],
        [2, 3, 1, 2, 0, 1],
    ]


def test_another_host_is_reached_through_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: Launched
) -> None:
    ssh = tmp_path / "ssh"  # stands in for the real one: writes down where to, and runs the command here
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    script = "import os; print(os.environ['HOROVOD_RANK'], os.environ['HOROVOD_HOSTNAME'], \"it's\", os.getcwd())"
    done = launched("-np", 2, "-H", "localhost:1,elsewhere:1", "-p", 2222, sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {
        f"[0]<stdout>:0 localhost it's {tmp_path}",
        f"[1]<stdout>:1 elsewhere it's {tmp_path}",
    }
    assert "BatchMode=yes -p 2222 elsewhere cd " in (tmp_path / "calls").read_text()


def said_by(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]


def one_process(steps: int) -> torch.nn.Linear:
    model = torch.nn.Linear(4, 1).double()
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.constant_(model.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return model


def discovery(folder: Path, hosts: str) -> Path:
    (folder / "hosts").write_text(hosts)
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    return script


def check_numbers(said: list[dict[str, Any]], steps: int, ranks: int) -> None:
    ended = [line for line in said if "ends" in line]
    assert [line["rank"] for line in sorted(ended, key=lambda line: line["rank"])] == list(range(ranks))
    expected = one_process(steps)
    for line in ended:
        assert line["ends"] == steps
        torch.testing.assert_close(torch.tensor(line["weight"], dtype=torch.float64), expected.weight.detach())
        torch.testing.assert_close(torch.tensor(line["bias"], dtype=torch.float64), expected.bias.detach())


def test_a_killed_rank_is_started_again_and_the_numbers_stay(tmp_path: Path, launched: Launched) -> None:
    words = ("-np", 3, "--min-np", 2, "--json")
    done = launched(*words, sys.executable, SCRIPTS / "elastic.py", tmp_path, 8, "kill")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resets"] == 1
    said = said_by(tmp_path)
    check_numbers(said, 8, 3)
    begins = [line for line in said if "begins" in line]
    assert [line["begins"] for line in begins].count(3) == 3  # all go on from the last commit, none from the beginning
    assert len({line["pid"] for line in begins}) == 4  # the others live on in their processes


# Another rank 1 is to be started here, in whose stead this one becomes rank 2; but its output has no place.
GROWS = """
import os, shutil, time
if os.environ["HOROVOD_RANK"] == "1":
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    shutil.rmtree("rank.1")
    open("rank.1", "w").close()
    with open("hosts", "w") as file:
        file.write("localhost:2\\n127.0.0.1:1\\n")
time.sleep(60)
"""


def test_those_that_live_are_ended_when_another_cannot_be_started(tmp_path: Path, launched: Launched) -> None:
    script = discovery(tmp_path, "localhost:1\n127.0.0.1:1\n")
    words = ("-np", 2, "--min-np", 2, "--max-np", 3, "--host-discovery-script", script, "--output-filename", tmp_path)
    done = launched(*words, sys.executable, "-c", GROWS)
    assert done.returncode == 2 and "rank.1: File exists" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "ranks"), [(2, 3, 3), (3, 2, 2)], ids=["added", "removed"])
def test_hosts_come_and_go_and_the_numbers_stay(before: int, after: int, ranks: int, tmp_path: Path) -> None:
    hosts = {2: "localhost:2\n", 3: "localhost:2\n127.0.0.1:1\n"}
    script = discovery(tmp_path, hosts[before])
    words = ["-np", before, "--min-np", 2, "--max-np", 3, "--host-discovery-script", script]
    command = [*RUN, *map(str, words), sys.executable, SCRIPTS / "elastic.py", tmp_path, "12", "wait"]
    with (tmp_path / "output").open("w") as out:
        job = subprocess.Popen([*map(str, command)], cwd=tmp_path, stdout=out, stderr=out, env=os.environ)
        try:
            deadline = time.monotonic() + 100
            while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            (tmp_path / "hosts").write_text(hosts[after])
            while "go on" not in (tmp_path / "output").read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
            (tmp_path / "go").touch()
            assert job.wait(timeout=100) == 0, (tmp_path / "output").read_text()
        finally:
            job.terminate()
            job.wait()
    said = said_by(tmp_path)
    check_numbers(said, 12, ranks)
    again = [line for line in said if line.get("begins")]
    assert {line["size"] for line in again} == {after}
    assert {line["begins"] for line in again} == {4}  # nothing is done twice
