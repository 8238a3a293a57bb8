"""Slurm on this machine: one controller and four simulated nodes of eight fake GPUs, with their own keys and folders.

Nothing of an installed Slurm's configuration is used or changed. Everything is stopped by its pid file.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
_START_SECONDS = 120.0
_FAKE_GPUS = 8

_CONFIGURATION = """
ClusterName=simulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
MessageTimeout=30
UnkillableStepTimeout=150
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed
AccountingStorageType=accounting_storage/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=60
KillWait=20
SchedulerParameters=sched_interval=1,bf_interval=5,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n[1-4] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """Why no cluster can be started here; "" where one can."""
    missing = [program for program in _PROGRAMS if _found(program) is None]
    if missing:
        return f"no {', '.join(missing)} (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "only root may start slurmd"
    return ""


def _found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Cluster:
    """A running cluster; `environment` makes Slurm's programs talk to it."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str, check: bool = True) -> str:
        """The output of one of Slurm's programs."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=120)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def restart_controller(self) -> None:
        """End slurmctld and start it again from the state that it has saved."""
        _stop(self.folder / "slurmctld.pid")
        self._daemon("slurmctld")

    def start(self) -> None:
        """Start all daemons and wait until the four nodes are idle."""
        self._daemon("slurmctld")
        for number in range(1, 5):
            self._daemon("slurmd", "-N", f"n{number}")
        deadline = time.monotonic() + _START_SECONDS
        while self.run("sinfo", "-h", "-N", "-o", "%T", "-p", "low", check=False).split() != ["idle"] * 4:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes are not up: {self.run('sinfo', check=False)}{self.log()}")
            time.sleep(0.2)

    def until_idle(self, seconds: float) -> None:
        """Wait until no job is queued or runs."""
        deadline = time.monotonic() + seconds
        while self.run("squeue", "--noheader").strip():
            if time.monotonic() > deadline:
                raise TimeoutError(f"jobs after {seconds:g} s: {self.run('squeue')}{self.log()}")
            time.sleep(0.2)

    def log(self) -> str:
        """The end of what the daemons wrote."""
        logs = sorted(self.folder.glob("slurm*.log"))
        return "\n".join(f"{path.name}:\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in logs)

    def _daemon(self, program: str, *words: str) -> None:
        path = _found(program)
        assert path is not None
        subprocess.run([path, *words], env=self.environment, check=True, capture_output=True, timeout=120)


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster inside `with`; all its jobs and daemons are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="fullframe-slurm-"))
    folder.chmod(0o755)
    made = Cluster(folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")})
    try:
        _configure(folder)
        _start_munge(folder)
        made.start()
        yield made
    finally:
        with contextlib.suppress(Exception):
            made.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            made.run("scancel", "--user=root", check=False)
            made.until_idle(10)
        for pid_file in (*folder.glob("slurmd.*.pid"), folder / "slurmctld.pid", folder / "munged.pid"):
            _stop(pid_file, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports(5)
    nodes = "\n".join(
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs=8 RealMemory=4000 "
        f"Gres=gpu:fake:{_FAKE_GPUS} State=UNKNOWN"
        for number in range(1, 5)
    )
    text = _CONFIGURATION.format(host=host, port=ports[0], folder=folder, nodes=nodes)
    (folder / "slurm.conf").write_text(text)
    for number in range(_FAKE_GPUS):
        os.mknod(folder / f"fakegpu{number}", 0o20666, os.makedev(1, 3))
    gres = f"NodeName=n[1-4] Name=gpu Type=fake File={folder}/fakegpu[0-{_FAKE_GPUS - 1}]\n"
    (folder / "gres.conf").write_text(gres)
    for name in ("state", *(f"spool.n{number}" for number in range(1, 5))):
        (folder / name).mkdir()


def _start_munge(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    program = _found("munged")
    assert program is not None
    words = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    subprocess.run(
        [program, "--force", f"--socket={folder}/munge.socket", f"--key-file={key}", *words],
        check=True,
        capture_output=True,
        timeout=120,
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [found.getsockname()[1] for found in sockets]


def _stop(pid_file: Path, number: int = signal.SIGTERM) -> None:
    """End the process that wrote its number there, and wait for its end."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, number)
    except (OSError, ValueError):
        return
    deadline = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
