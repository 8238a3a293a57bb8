"""A job over several machines: what one of them meets, all act on. Machines are launchers here, or namespaces."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fullframe.processes.exit_reasons import STOPPED, StartAgain
from fullframe.processes.nodes import launch_on_nodes
from fullframe.processes.rendezvous import Nodes
from tests.processes.network import ADDRESSES, Network, free_port, network, why_not
from tests.processes.test_launch import START

LAUNCHER = """
import sys
from pathlib import Path
from fullframe.processes import nodes as launcher
from fullframe.processes.nodes import launch_on_nodes
from fullframe.processes.rendezvous import Nodes
launcher.CONSEQUENCE_SECONDS = 0.5  # the ranks here sleep, and have nothing to say of another's end
rank, least, port, folder, script = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
nodes = Nodes(count=2, least=least, rank=rank, host="127.0.0.1", port=port, processes=2, silence_seconds=10.0,
              patience_seconds=60.0)
sys.exit(launch_on_nodes(nodes, lambda machines: ["-c", script, folder, str(machines)], restarts=1))
"""
SAYS = """
machines = sys.argv[2]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
with open(f"{folder}/{attempt}-{rank}.partial", "w") as file:
    json.dump([machines, *(int(os.environ[name]) for name in names), os.environ["FULLFRAME_RESTART_REASON"]], file)
os.rename(file.name, f"{folder}/{attempt}-{rank}.json")
"""


class Machines:
    """Two launchers of two ranks each."""

    def __init__(self, folder: Path, script: str, least: int = 2):
        self.folder, self._least = folder, least
        self._script = START + SAYS + script
        self._port = free_port()
        self.launchers = [self.start(rank) for rank in (0, 1)]

    def start(self, rank: int) -> "subprocess.Popen[str]":
        words = [sys.executable, "-c", LAUNCHER, rank, self._least, self._port, self.folder, self._script]
        return subprocess.Popen(list(map(str, words)), stderr=subprocess.PIPE, text=True)

    def ends(self) -> list[tuple[int, str]]:
        """Exit code and what was said, of each."""
        said = [launcher.communicate(timeout=120)[1] for launcher in self.launchers]
        return [(launcher.returncode, text) for launcher, text in zip(self.launchers, said, strict=True)]

    def attempt(self, number: int) -> list[list[object]]:
        """What the ranks of an attempt were told, by rank."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{number}-*.json"))]

    def wait_for(self, number: int, ranks: int) -> None:
        until(lambda: len(list(self.folder.glob(f"{number}-*.json"))) == ranks)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    made: list[Machines] = []

    def start(script: str, **options: int) -> Machines:
        made.append(Machines(tmp_path, script, **options))
        return made[-1]

    yield start
    for launcher in (launcher for machine in made for launcher in machine.launchers):
        launcher.kill()
        launcher.wait()


def until(condition: Callable[[], bool], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_that_dies_starts_those_of_all_machines_again(machines: Callable[..., Machines]) -> None:
    """With numbers over all machines."""
    there = machines(
        "os.kill(os.getpid(), signal.SIGKILL) if (rank, attempt) == (3, 0) else time.sleep(1000 * (attempt == 0))"
    )
    ends = there.ends()
    assert [code for code, _ in ends] == [0, 0], ends
    told = there.attempt(1)
    assert [one[1:7] for one in told] == [[rank, rank % 2, 4, 2, rank // 2, 2] for rank in range(4)]
    assert [one[-1] for one in told] == ["node 1, rank 3 died (SIGKILL)"] * 4


def test_an_error_of_the_job_is_final_on_all_machines(machines: Callable[..., Machines]) -> None:
    there = machines("say('error: of the user', 2) if rank == 1 else time.sleep(1000)")
    (code, said), (other, told) = there.ends()
    assert (code, other) == (2, 2)
    assert said.endswith("error: of the user\n")
    assert told.endswith("error: node 0, rank 1: error: of the user\n")
    assert not there.attempt(1)


@pytest.mark.slow
def test_a_machine_that_is_asked_to_stop_stops_all(machines: Callable[..., Machines]) -> None:
    # The ranks agree among themselves: those of the other machine end as if they had got the signal.
    script = f"""
signal.signal(signal.SIGUSR1, lambda *_: open(f"{{folder}}/asked", "w"))
while not os.path.exists(f"{{folder}}/asked"):
    time.sleep(0.05)
os._exit({STOPPED})
"""
    there = machines(script)
    there.wait_for(0, 4)
    time.sleep(1)
    there.launchers[1].send_signal(signal.SIGUSR1)
    assert [code for code, _ in there.ends()] == [STOPPED, STOPPED]


def test_ranks_that_die_as_the_job_is_asked_to_stop_have_not_ended_well(capfd: pytest.CaptureFixture[str]) -> None:
    """As where Slurm's signal reaches both, and the ranks are not ready for it."""
    nodes = Nodes(count=1, least=1, rank=0, host="127.0.0.1", port=free_port(), processes=1, silence_seconds=10.0,
                  patience_seconds=60.0)  # fmt: skip
    dies = "import os; os.kill(int(os.environ['FULLFRAME_LAUNCHER']), 15); os.kill(os.getpid(), 9)"
    assert launch_on_nodes(nodes, lambda machines: ["-c", dies], restarts=1) == 128 + signal.SIGTERM
    assert "stopped at once" in capfd.readouterr().err


@pytest.mark.slow
def test_a_machine_that_is_killed_is_gone_on_without_and_taken_in_again(machines: Callable[..., Machines]) -> None:
    # A rank in a job of one machine waits to be asked for a checkpoint, as the other machine is back.
    script = f"""
signal.signal(signal.SIGUSR1, lambda *_: os._exit({STOPPED}))
time.sleep(60 if attempt == 0 or machines == "1" else 0)
"""
    there = machines(script, least=1)
    there.wait_for(0, 4)
    for process in (*psutil.Process(there.launchers[1].pid).children(), psutil.Process(there.launchers[1].pid)):
        process.kill()
    there.wait_for(1, 2)
    assert [told[0] for told in there.attempt(1)] == ["1", "1"]
    for path in there.folder.glob("0-*.json"):
        path.unlink()
    there.launchers[1].communicate()
    there.launchers[1] = there.start(1)
    ends = there.ends()
    assert [code for code, _ in ends] == [0, 0], ends
    assert "lost node 1" in ends[0][1]
    assert [told[0] for told in there.attempt(2)] == ["2", "2"], "the machine that stayed is in its third attempt"
    assert [told[0] for told in there.attempt(0)] == ["2", "2"], "the one that came in its first"


def test_a_machine_that_never_comes_is_said() -> None:
    port = free_port()
    nodes = Nodes(
        count=2, least=2, rank=0, host="127.0.0.1", port=port, processes=1, silence_seconds=2, patience_seconds=1
    )
    with pytest.raises(StartAgain, match="75") as raised:
        launch_on_nodes(nodes, lambda machines: [])
    assert f"node 0 waited 1 s for 2 nodes at 127.0.0.1:{port}, in vain" in raised.value.reason


ROOT = Path(__file__).parents[2]
RECIPE = """
import time
from tests.training import tiny

def loss(model, batch):
    time.sleep(0.4)
    return tiny.loss(model, batch)

def recipe():
    return tiny.recipe(model=tiny.Plain, loss=loss, data=lambda: tiny.Frames(60), steps=12)
"""


class Host:
    """`fullframe train` on one of two hosts, as a user starts it."""

    def __init__(self, net: Network, host: int, folder: Path, *options: object):
        words = [
            sys.executable,
            "-m",
            "fullframe",
            "train",
            folder / "job.py",
            "--run-dir",
            folder / "run",
            "--nodes",
            2,
        ]
        words += ["--node-rank", host, "--rendezvous", f"{ADDRESSES[0]}:29400", "--node-timeout", 6]
        words += ["--checkpoint-every", 2, "--auto-resume", *options]
        with open(folder / f"host{host}.txt", "a") as out:
            self.process = subprocess.Popen(
                [*net.on(host), *map(str, words)],
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/src", "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._out = folder / f"host{host}.txt"

    def kill(self) -> None:
        """SIGKILL, as a machine that loses its power."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def freeze(self, frozen: bool) -> None:
        """SIGSTOP to all its processes, as a virtual machine that is moved, or SIGCONT."""
        for process in (self.process, *psutil.Process(self.process.pid).children(recursive=True)):
            os.kill(process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def end(self) -> int:
        """The exit code."""
        return self.process.wait(150)

    @property
    def said(self) -> str:
        """All that was printed on this host."""
        return self._out.read_text()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Starts `fullframe train` on one of two hosts; `hosts.net` is the network between them."""
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "job.py").write_text(RECIPE)
    started: list[Host] = []
    with network() as net:

        def start(host: int, *options: object) -> Host:
            started.append(Host(net, host, tmp_path, *options))
            return started[-1]

        start.net = net  # type: ignore[attr-defined]
        yield start
        for host in started:
            host.kill()
            host.process.wait()


def steps(folder: Path) -> list[int]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def calm(folder: Path, *options: object) -> list[float]:
    """The losses of a run in one process."""
    command = [sys.executable, "-m", "fullframe", "train", folder / "job.py", "--run-dir", folder / "calm", *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    subprocess.run(list(map(str, command)), env=environment, check=True, capture_output=True)
    return losses(folder / "calm")


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_cut_link_ends_both_hosts_and_the_run_goes_on_afterwards(tmp_path: Path, hosts: Callable[..., Host]) -> None:
    both = [hosts(host, "--rendezvous-timeout", 10) for host in (0, 1)]
    until(lambda: len(steps(tmp_path)) >= 4)
    hosts.net.forward(False)  # type: ignore[attr-defined]
    cut = time.monotonic()
    assert [host.end() for host in both] == [75, 75]
    assert time.monotonic() - cut < 120, "the timeouts are 6 and 10 s; a busy machine takes longer"
    assert "lost node 1 (10.213.2.1): no sign of life for 6 s" in both[0].said
    assert "node 1 lost the rendezvous at 10.213.1.1:29400" in both[1].said
    for host in (0, 1):
        assert f"node {host} waited 10 s for 2 nodes at 10.213.1.1:29400, in vain" in both[host].said
    hosts.net.forward(True)  # type: ignore[attr-defined]
    both = [hosts(host) for host in (0, 1)]
    assert [host.end() for host in both] == [0, 0], both[0].said
    assert "resumed after step" in both[0].said
    assert losses(tmp_path / "run") == pytest.approx(calm(tmp_path), rel=1e-9)


@pytest.mark.slow
def test_a_link_that_comes_back_in_time_needs_nobody(tmp_path: Path, hosts: Callable[..., Host]) -> None:
    both = [hosts(host) for host in (0, 1)]
    until(lambda: len(steps(tmp_path)) >= 4)
    hosts.net.forward(False)  # type: ignore[attr-defined]
    until(lambda: "lost node 1" in both[0].said and "lost the rendezvous" in both[1].said)
    hosts.net.forward(True)  # type: ignore[attr-defined]
    assert [host.end() for host in both] == [0, 0], both[0].said
    assert losses(tmp_path / "run") == pytest.approx(calm(tmp_path), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_host_that_is_killed_is_waited_for(tmp_path: Path, hosts: Callable[..., Host], killed: int) -> None:
    both = [hosts(host) for host in (0, 1)]
    until(lambda: len(steps(tmp_path)) >= 4)
    both[killed].kill()
    until(lambda: "all ranks start again" in both[1 - killed].said)
    done = len(steps(tmp_path))
    time.sleep(5)
    assert len(steps(tmp_path)) == done, "nobody goes on with half of the job"
    both[killed] = hosts(killed)
    assert [host.end() for host in both] == [0, 0], both[0].said
    assert losses(tmp_path / "run") == pytest.approx(calm(tmp_path), rel=1e-9)


@pytest.mark.slow
def test_the_other_host_goes_on_alone_where_it_may(tmp_path: Path, hosts: Callable[..., Host]) -> None:
    both = [hosts(host, "--min-nodes", 1) for host in (0, 1)]
    until(lambda: len(steps(tmp_path)) >= 4)
    both[1].kill()
    assert both[0].end() == 0, both[0].said
    assert "on 1 rank (data 1 x height 1 x width 1)" in both[0].said
    assert json.loads((tmp_path / "run" / "strategy.json").read_text())["microbatches"] == 2
    assert losses(tmp_path / "run") == pytest.approx(calm(tmp_path), rel=1e-9), "the same global batch"


@pytest.mark.slow
@pytest.mark.parametrize("back", [False, True])
def test_the_other_host_leads_where_node_0_is_killed(tmp_path: Path, hosts: Callable[..., Host], back: bool) -> None:
    options = ("--min-nodes", 1, "--steps", 30)
    both = [hosts(host, *options) for host in (0, 1)]
    until(lambda: len(steps(tmp_path)) >= 4)
    both[0].kill()
    both[0].process.wait()
    until(lambda: "node 1 leads now, at 10.213.2.1:29400" in both[1].said)
    if back:
        until(lambda: "on 1 rank (data 1 x height 1 x width 1)" in both[1].said)
        both[0] = hosts(0, *options)
        assert both[0].end() == 0, both[0].said
        assert "node 1 leads now, at 10.213.2.1:29400" in both[0].said, "it came as a guest"
        assert "1 more node came" in both[1].said
    assert both[1].end() == 0, both[1].said
    assert json.loads((tmp_path / "run" / "strategy.json").read_text())["data"] == 1 + back
    assert steps(tmp_path) == list(range(1, 31)), "nobody wrote a step that the other had done"
    assert losses(tmp_path / "run") == pytest.approx(calm(tmp_path, "--steps", 30), rel=1e-9), "the same global batch"


@pytest.mark.slow
def test_a_node_0_that_was_frozen_comes_back_as_a_guest(tmp_path: Path, hosts: Callable[..., Host]) -> None:
    # Nothing can tell a machine that was frozen that it was: it must find out before it writes.
    both = [hosts(host, "--min-nodes", 1, "--steps", 40) for host in (0, 1)]
    until(lambda: len(steps(tmp_path)) >= 4)
    both[0].freeze(True)
    until(lambda: "on 1 rank (data 1 x height 1 x width 1)" in both[1].said)
    until(lambda: len(steps(tmp_path)) >= 8)
    both[0].freeze(False)
    assert [host.end() for host in both] == [0, 0], both[0].said
    assert "node 1 leads now" in both[0].said and "1 more node came" in both[1].said
    assert steps(tmp_path) == list(range(1, 41))
    assert losses(tmp_path / "run") == pytest.approx(calm(tmp_path, "--steps", 40), rel=1e-9)


@pytest.mark.slow
def test_of_two_hosts_without_a_link_one_goes_on(tmp_path: Path, hosts: Callable[..., Host]) -> None:
    both = [hosts(host, "--min-nodes", 1, "--steps", 40, "--rendezvous-timeout", 25) for host in (0, 1)]
    until(lambda: len(steps(tmp_path)) >= 4)
    hosts.net.forward(False)  # type: ignore[attr-defined]
    assert [host.end() for host in both] == [0, 75], both[1].said
    assert "leads now" not in both[1].said, "the lease is renewed all the time"
    assert steps(tmp_path) == list(range(1, 41))
    assert losses(tmp_path / "run") == pytest.approx(calm(tmp_path, "--steps", 40), rel=1e-9)
