"""Options of a job over several machines, and what Slurm or Kubernetes says where they are not given."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from fullframe.cli.words import option
from fullframe.errors import MeshError
from fullframe.launching.allocation import rendezvous_of
from fullframe.processes.rendezvous import Nodes
from fullframe.strategy import Strategy

_PORT = 29400  # torchrun's, where none is given
# Which machine this is, as srun, a TrainJob's runtime and an indexed Job of Kubernetes say it.
_RANKS = ("SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """A job over several machines: the same command on each, but for --node-rank."""

    nodes: Annotated[int | None, arg(metavar="N")] = None
    """Machines of the job, each of which starts --processes ranks."""
    node_rank: Annotated[int | None, arg(metavar="K")] = None
    """Which of them this is, 0 to N-1; known under srun and on Kubernetes."""
    rendezvous: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Where node 0 is reached by the others, and listens; known under srun and in a TrainJob."""
    min_nodes: Annotated[int | None, arg(metavar="N")] = None
    """Machines with which the run goes on when others are lost, with fewer data replicas: all unless given."""
    node_timeout: Annotated[float, arg(metavar="SECONDS")] = 30.0
    """Time without a sign of life after which a machine is taken for lost."""
    rendezvous_timeout: Annotated[float, arg(metavar="SECONDS")] = 600.0
    """How long to wait for the other machines, at the start and after one was lost."""


NodeWords = Annotated[NodeOptions, OmitArgPrefixes, arg(name="several machines")]


def nodes_of(options: NodeOptions, processes: int, environment: Mapping[str, str] = os.environ) -> Nodes:
    """What the options, or else the allocation this is started in, say of the job's machines.

    Raises MeshError when they do not say enough, or contradict themselves.
    """
    assert options.nodes is not None
    rank, address = options.node_rank, options.rendezvous
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))  # none in a batch script itself
    if rank is None and "SLURM_JOB_ID" in environment and tasks != options.nodes:
        raise MeshError(
            f"--nodes {options.nodes} is one process on each machine, and Slurm has started {tasks}: start it by "
            f"srun --nodes={options.nodes} --ntasks-per-node=1, and say by --processes how many ranks a machine has"
        )
    if rank is None:
        rank = next((int(environment[name]) for name in _RANKS if environment.get(name, "").isdigit()), None)
    if rank is None:
        raise MeshError(f"--nodes {options.nodes} needs --node-rank, 0 to {options.nodes - 1}, of this machine")
    if not 0 <= rank < options.nodes:
        raise MeshError(f"--node-rank must be 0 to {options.nodes - 1}, got {rank}")
    least = options.nodes if options.min_nodes is None else options.min_nodes
    if not 1 <= least <= options.nodes:
        raise MeshError(f"--min-nodes must be 1 to {options.nodes}, the --nodes, got {least}")
    for name in ("node_timeout", "rendezvous_timeout"):
        if not getattr(options, name) > 0:
            raise MeshError(f"{option(name)} must be greater than 0, got {getattr(options, name)}")
    if address is None and environment.get("PET_MASTER_ADDR"):
        address = f"{environment['PET_MASTER_ADDR']}:{environment.get('PET_MASTER_PORT', _PORT)}"
    if address is None and "SLURM_JOB_ID" in environment:
        address = rendezvous_of(environment)
    if address is None:
        raise MeshError(f"--nodes {options.nodes} needs --rendezvous HOST:PORT, where node 0 is reached")
    host, port = _parsed(address)
    return Nodes(
        count=options.nodes,
        least=least,
        rank=rank,
        host=host,
        port=port,
        processes=processes,
        silence_seconds=options.node_timeout,
        patience_seconds=options.rendezvous_timeout,
    )


def options_of(words: Sequence[str]) -> dict[str, str]:
    """The words behind each option of a command line; those before the first are left out."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        name, text = (word, "") if word.startswith("--") else (name, word)
        if name:
            found[name] = f"{found.get(name, '')} {text}".strip()
    return found


def require_whole_replicas(nodes: Nodes, strategy: Strategy) -> None:
    """Raises MeshError unless every number of machines with which the job may go on holds whole replicas."""
    for count in range(nodes.least, nodes.count):
        if count * nodes.processes % strategy.parts:
            whole = [n for n in range(1, nodes.count + 1) if not n * nodes.processes % strategy.parts]
            raise MeshError(
                f"{count} machines of {nodes.processes} ranks hold no whole number of replicas, of {strategy.parts} "
                f"ranks each; only {', '.join(map(str, whole))} do: leave out --min-nodes, or split less"
            )


def _parsed(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):  # no port, after a name or a bare IPv6 address
        host, port = address, str(_PORT)
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise MeshError(f"--rendezvous must be HOST:PORT, as in 10.0.0.1:{_PORT}, got {address!r}")
    return host, int(port)
