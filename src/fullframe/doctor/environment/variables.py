"""Variables of launchers and libraries that are incomplete, contradict each other, or do harm."""

from collections.abc import Callable, Collection, Iterator, Mapping

from fullframe.doctor.environment import kinds
from fullframe.doctor.finding import Finding
from fullframe.wording import some

_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every message is checked by another"),
    "NCCL_P2P_DISABLE": ("1", "messages between GPUs of a machine go through host memory"),
    "NCCL_SHM_DISABLE": ("1", "messages within a machine go through the network"),
    "NCCL_IB_DISABLE": ("1", "messages between machines go through sockets"),
}
_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}


def judged_variables(
    environment: Mapping[str, str],
    *,
    gpus: int,
    processors: int,
    interfaces: Collection[str] | None,
    resolves: Callable[[str], bool],
) -> Iterator[Finding]:
    """Findings about the variables that are set; `interfaces` is None where they cannot be listed."""
    yield from _launch(environment)
    yield from _numbers(environment)
    yield from _slurm(environment)
    yield from _address(environment, resolves)
    yield from _devices(environment, gpus)
    yield from _libraries(environment, interfaces, processors)


def _launch(environment: Mapping[str, str]) -> Iterator[Finding]:
    there = [name for name in _LAUNCH if environment.get(name)]
    missing = [name for name in _LAUNCH if name not in there]
    if {"RANK", "WORLD_SIZE"} & set(there) and missing:
        yield kinds.INCOMPLETE_LAUNCH.found(f"{some(there, 4)} set, {some(missing, 4)} not")


def _numbers(environment: Mapping[str, str]) -> Iterator[Finding]:
    for smaller, larger in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK", "WORLD_SIZE")):
        first, second = _number(environment, smaller), _number(environment, larger)
        if first is not None and second is not None and first >= second:
            yield kinds.CONTRADICTING_RANKS.found(f"{smaller}={first} is not below {larger}={second}")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if environment.get(name) and _number(environment, name) is None:
            yield kinds.CONTRADICTING_RANKS.found(f"{name}={environment[name]!r} is no number")


def _slurm(environment: Mapping[str, str]) -> Iterator[Finding]:
    if "SLURM_PROCID" not in environment or "TORCHELASTIC_RUN_ID" in environment:
        return  # torchrun under srun gives ranks of its own
    for own, slurms in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
        first, second = _number(environment, own), _number(environment, slurms)
        if first is not None and second is not None and first != second:
            yield kinds.CONTRADICTING_RANKS.found(f"{own}={first}, but {slurms}={second}")


def _address(environment: Mapping[str, str], resolves: Callable[[str], bool]) -> Iterator[Finding]:
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    world, local = _number(environment, "WORLD_SIZE"), _number(environment, "LOCAL_WORLD_SIZE")
    several = (_number(environment, "SLURM_JOB_NUM_NODES") or 1) > 1
    several = several or (world is not None and local is not None and world > local)
    if address in _HERE and several:
        yield kinds.LOCAL_MASTER.found(f"MASTER_ADDR={address}, and the job has ranks on several machines")
    elif address and address not in _HERE and not resolves(address):
        yield kinds.UNKNOWN_NAME.found(f"MASTER_ADDR={address} cannot be looked up")
    if port and not (port.isdigit() and 1024 <= int(port) <= 65535):
        yield kinds.BAD_PORT.found(f"MASTER_PORT={port}")


def _devices(environment: Mapping[str, str], gpus: int) -> Iterator[Finding]:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return
    listed = [item.strip() for item in visible.split(",") if item.strip()]
    if gpus and (not listed or listed[0] == "-1"):
        yield kinds.VISIBLE_DEVICES.found(f"CUDA_VISIBLE_DEVICES={visible!r} hides all {gpus} GPUs")
    twice = sorted({item for item in listed if listed.count(item) > 1})
    if twice:
        yield kinds.VISIBLE_DEVICES.found(f"CUDA_VISIBLE_DEVICES={visible} lists {some(twice)} more than once")
    beyond = [item for item in listed if item.isdigit() and gpus and int(item) >= gpus]
    if beyond:
        yield kinds.VISIBLE_DEVICES.found(
            f"CUDA_VISIBLE_DEVICES={visible}: there is no GPU {some(beyond)}, only {gpus}"
        )
    local = _number(environment, "LOCAL_WORLD_SIZE")
    if listed and listed[0] != "-1" and local is not None and 1 < len(listed) < local:
        yield kinds.VISIBLE_DEVICES.found(f"{local} ranks on this machine, CUDA_VISIBLE_DEVICES lists {len(listed)}")


def _libraries(
    environment: Mapping[str, str], interfaces: Collection[str] | None, processors: int
) -> Iterator[Finding]:
    for name in _INTERFACES:
        wanted = environment.get(name, "")
        if wanted and interfaces is not None and not wanted.startswith("^"):
            asked = [item for item in wanted.removeprefix("=").split(",") if item]
            if wanted.startswith("="):
                is_there = any(item in interfaces for item in asked)
            else:
                is_there = any(there.startswith(item) for item in asked for there in interfaces)
            if not is_there:
                yield kinds.NO_INTERFACE.found(f"{name}={wanted}; there are {some(sorted(interfaces), 6)}")
    for name, (value, cost) in _SLOW.items():
        if environment.get(name, "").upper() == value:
            yield kinds.SLOWED_BY_VARIABLE.found(f"{name}={value}: {cost}")
    for old, new in _RENAMED.items():
        if old in environment:
            yield kinds.OLD_VARIABLE.found(f"{old} is set; it is {new} today")
    threads, local = _number(environment, "OMP_NUM_THREADS"), _number(environment, "LOCAL_WORLD_SIZE") or 1
    if threads is not None and threads * local > processors:
        yield kinds.CPU_QUOTA.found(
            f"OMP_NUM_THREADS={threads} for {local} ranks on {processors} processors",
            fix=f"OMP_NUM_THREADS={max(processors // local, 1)}",
        )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else None
