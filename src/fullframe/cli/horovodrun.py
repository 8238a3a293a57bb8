"""`fullframe horovodrun`: run a Horovod script as `horovodrun` does, on this machine or on several."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, get_type_hints

from tyro.conf import Positional, arg

from fullframe.cli.words import Count, option, require_counts
from fullframe.errors import MeshError

_SHORT = {"-np": "--np", "-H": "--hosts", "-hostfile": "--hostfile", "-p": "--ssh-port", "-cb": "--check-build"}
_OLD = {"--num-proc": "--np", "--min-num-proc": "--min-np", "--max-num-proc": "--max-np", "--slots-per-host": "--slots"}


@dataclass(frozen=True, kw_only=True)
class Horovodrun:
    """Run a Horovod script or command unmodified, as -np workers: its `import horovod.torch` finds fullframe.horovod.

    Options come before the command: fullframe horovodrun -np 4 -H localhost:4 python train.py --epochs 3
    """

    command: Annotated[Positional[tuple[str, ...]], arg(metavar="COMMAND ...")] = ()
    """What each worker runs, with its arguments."""
    np: Count = None
    """-np: workers to start; with --host-discovery-script the number to begin with."""
    hosts: Annotated[str | None, arg(metavar="HOST:SLOTS,...")] = None
    """-H: hosts, and how many workers fit each: this machine unless given. Others are reached through ssh."""
    hostfile: Annotated[Path | None, arg(metavar="FILE")] = None
    """The same in a file, with lines "host slots=4"."""
    min_np: Count = None
    """Elastic, also on hosts that do not change: wait for hosts below so many workers; -np unless given."""
    max_np: Count = None
    """Elastic: never more workers than so many; -np unless given."""
    host_discovery_script: Annotated[str | None, arg(metavar="PATH")] = None
    """Elastic: a program that prints the hosts there are, one "host:slots" a line; asked every second."""
    slots: Count = None
    """Elastic: slots of a host whose line does not say."""
    reset_limit: Count = None
    """Elastic: give up after so many changes of workers; without end unless given."""
    elastic_timeout: Annotated[float, arg(metavar="SECONDS")] = 600.0
    """Elastic: how long workers wait for one another after a change, and the job for enough slots."""
    start_timeout: Annotated[float, arg(metavar="SECONDS")] = 600.0
    """How long workers wait for one another at the start."""
    ssh_port: Count = None
    """-p: the port of ssh on the other hosts: as ssh is configured unless given."""
    network_interface: Annotated[str | None, arg(metavar="NAME")] = None
    """Through which the workers connect, as eth0."""
    output_filename: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Write each worker's output into FOLDER/rank.N/stdout and stderr in place of the terminal."""
    fusion_threshold_mb: Count = None
    """Size of the buffers in which small tensors travel together: 64 unless given; 0: each by itself."""
    cycle_time_ms: Annotated[float | None, arg(metavar="MS")] = None
    """Time between two looks at what the ranks ask for: 1 unless given."""
    timeline_filename: Annotated[str | None, arg(metavar="FILE")] = None
    """Write a Chrome trace of what the ranks do."""
    timeline_mark_cycles: bool = False
    """Mark the rounds in it."""
    no_stall_check: bool = False
    """Do not warn of ranks that wait for more than a minute."""
    check_build: bool = False
    """-cb: say what is there, and end."""
    json: bool = False
    """Print one JSON object at the end; the workers' output goes to stderr."""

    def run(self) -> int:
        """Run the job; the exit code of the worker that failed first, 0 if none did."""
        if self.check_build:
            print(_build())
            return 0
        if not self.command:
            raise MeshError("which command? fullframe horovodrun -np 4 python train.py")
        require_counts(self, ("np", "min_np", "max_np", "slots"))
        given = [name for name in ("hosts", "hostfile", "host_discovery_script") if getattr(self, name) is not None]
        if len(given) > 1:
            raise MeshError(f"{' and '.join(map(option, given))} say which hosts there are; leave all but one out")
        code, resets = self._run()
        if self.json:
            print(json.dumps({"exit_code": code, "np": self.np, "resets": resets, "command": list(self.command)}))
        return code

    def _run(self) -> tuple[int, int]:
        from fullframe.horovod.launcher.hosts import discover, parse_hosts, read_hostfile
        from fullframe.horovod.launcher.jobs import ElasticJob, Job, run_fixed

        output = sys.stderr if self.json else sys.stdout
        job = Job(
            command=self.command,
            environment=self._environment(),
            ssh_port=self.ssh_port,
            output=self.output_filename,
            stdout=output,
        )
        if self.hosts or self.hostfile:
            hosts = parse_hosts(self.hosts) if self.hosts else read_hostfile(self.hostfile or Path())
        else:
            hosts = {"localhost": self.np or 1}
        script = self.host_discovery_script
        if script is None and self.min_np is None and self.max_np is None:
            return run_fixed(job, hosts, self.np or sum(hosts.values())), 0
        first = self.np or self.min_np or 1
        least, most = self.min_np or first, self.max_np or first
        if not least <= first <= most:
            raise MeshError(f"--min-np {least} <= -np {first} <= --max-np {most} does not hold")
        elastic = ElasticJob(
            job,
            (lambda: hosts) if script is None else lambda: discover(script, self.slots),
            first=first,
            least=least,
            most=most,
            resets=self.reset_limit,
            start_seconds=self.elastic_timeout,
        )
        return elastic.run(), elastic.changes

    def _environment(self) -> dict[str, str]:
        given = {
            "HOROVOD_START_TIMEOUT": self.start_timeout,
            "HOROVOD_ELASTIC_TIMEOUT": self.elastic_timeout,
            "HOROVOD_TIMELINE": self.timeline_filename,
            "HOROVOD_CYCLE_TIME": self.cycle_time_ms,
            "GLOO_SOCKET_IFNAME": self.network_interface,
            "NCCL_SOCKET_IFNAME": self.network_interface,
        }
        if self.fusion_threshold_mb is not None:
            given["HOROVOD_FUSION_THRESHOLD"] = self.fusion_threshold_mb << 20
        found = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in given.items()
                 if value is not None}  # fmt: skip
        found |= {"HOROVOD_TIMELINE_MARK_CYCLES": "1"} if self.timeline_mark_cycles else {}
        return found | ({"HOROVOD_STALL_CHECK_DISABLE": "1"} if self.no_stall_check else {})


def separated(arguments: Sequence[str]) -> list[str]:
    """The words of a command line with Horovod's short options in ours, and `--` before the command to run."""
    kinds = get_type_hints(Horovodrun)
    flags = {option(field.name) for field in dataclasses.fields(Horovodrun) if kinds[field.name] is bool}
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        name = _OLD.get(_SHORT.get(name, name), _SHORT.get(name, name))
        if not word.startswith("-") or word == "--":
            return [*found, "--", *([] if word == "--" else [word]), *words]
        found += [name, value] if equals else [name]
        if not equals and name not in flags | {"--help", "-h"}:
            found += islice(words, 1)
    return found


def _build() -> str:
    import torch

    from fullframe.horovod import gloo_built, nccl_built

    marks = {True: "X", False: " "}
    lines = ["Available Frameworks:", "    [ ] TensorFlow", f"    [X] PyTorch {torch.__version__}", "    [ ] MXNet", ""]
    lines += ["Available Controllers:", "    [ ] MPI", f"    [{marks[gloo_built()]}] Gloo", ""]
    lines += ["Available Tensor Operations:", f"    [{marks[bool(nccl_built())]}] NCCL", "    [ ] DDL", "    [ ] CCL"]
    return "\n".join([*lines, "    [ ] MPI", f"    [{marks[gloo_built()]}] Gloo"])
