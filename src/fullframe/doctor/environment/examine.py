"""The whole machine: facts are gathered, judged, and what could not be checked is said."""

import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

from fullframe.doctor.environment import kinds
from fullframe.doctor.environment.hardware import State, judged_gpus, states
from fullframe.doctor.environment.limits import Limits, cgroup_limits, judged_limits
from fullframe.doctor.environment.numbers import judged_numbers, narrow_convolution_error
from fullframe.doctor.environment.variables import judged_variables
from fullframe.doctor.environment.versions import NAMES, judged_versions
from fullframe.doctor.finding import Finding
from fullframe.errors import DeviceError
from fullframe.observation.gpus import Gpu, Owner, as_text, command_to_end, gpus, has_lost_parent, is_orphan, owner_of
from fullframe.wording import GIB


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found, what was seen, in sentences, and what could not be checked here."""

    findings: tuple[Finding, ...]
    seen: tuple[str, ...]
    unchecked: tuple[str, ...]


def examine(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Examined:
    """This machine, without its links; read only. `root` is where proc and sys lie."""
    import torch

    unchecked: list[str] = []
    cards, found, driver = _gpus(unchecked)
    installed = installed_versions()
    cuda: str | None = torch.version.cuda
    limits = _limits(root)
    interfaces = _interfaces(root)
    findings = [
        *judged_versions(installed, cuda=cuda, driver=driver, gpu_is_there=bool(cards)),
        *judged_limits(limits, environment),
        *judged_variables(
            environment, gpus=len(cards), processors=limits.processors_seen, interfaces=interfaces, resolves=_resolves
        ),
        *judged_gpus(cards, found),
        *judged_numbers(narrow_convolution_error(), gpu_is_there=bool(cards)),
        *judged_processes(_owners(), cards),
    ]
    seen = tuple(_seen(installed, cuda, driver, limits, cards))
    return Examined(findings=tuple(findings), seen=seen, unchecked=tuple(unchecked))


def judged_processes(owners: Mapping[int, Owner], cards: Sequence[Gpu] = ()) -> Iterator[Finding]:
    """A finding for ranks that outlived who started them, of fullframe's or torchrun's, unless `judged_gpus` tells."""
    named = {process.pid for card in cards for process in card.processes if process.trouble == "orphan"}
    for pid, owner in owners.items():
        is_python = bool(owner.command) and "python" in owner.command[0]
        if pid in named or not is_python or not (is_orphan(owner) or _is_left_by_torchrun(owner)):
            continue
        text = " ".join(owner.command)[:80]
        said = f"process {pid} of {owner.user} ({text}) has no parent any more"
        yield kinds.ORPHANS.found(said, fix=command_to_end(pid, owner.user))


def _is_left_by_torchrun(owner: Owner) -> bool:
    ranks = {"RANK", "TORCHELASTIC_RUN_ID"} <= set(owner.environment)
    return ranks and has_lost_parent(owner) and "fullframe" not in " ".join(owner.command)


def installed_versions() -> dict[str, str]:
    """By name, of those packages that are there, and Python's."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus(unchecked: list[str]) -> tuple[list[Gpu], list[State], str | None]:
    try:
        cards = gpus()
    except DeviceError as error:
        unchecked.append(
            f"GPUs ({error}): driver, NCCL, peer-to-peer, clocks and throttling, memory errors, who else computes, "
            "the bandwidth between GPUs"
        )
        return [], [], None
    nvml = import_module("pynvml")
    nvml.nvmlInit()
    try:
        return cards, states(nvml), as_text(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def _limits(root: Path) -> Limits:
    memory, used, given = cgroup_limits(root)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shared = root / "dev/shm"
    infiniband = root / "sys/class/infiniband"
    return Limits(
        shared_memory_bytes=shutil.disk_usage(shared).total if shared.exists() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        memory_limit_bytes=memory,
        memory_used_bytes=used,
        processors_seen=len(os.sched_getaffinity(0)),
        processors_given=given,
        infiniband=tuple(sorted(entry.name for entry in infiniband.iterdir())) if infiniband.exists() else (),
    )


def _interfaces(root: Path) -> list[str] | None:
    folder = root / "sys/class/net"
    return [entry.name for entry in folder.iterdir()] if folder.exists() else None


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _owners() -> dict[int, Owner]:
    own = os.getpid()
    return {pid: owner for pid in psutil.pids() if pid != own and (owner := owner_of(pid)) is not None}


def _seen(
    installed: Mapping[str, str], cuda: str | None, driver: str | None, limits: Limits, cards: list[Gpu]
) -> Iterator[str]:
    yield ", ".join(f"{name} {version}" for name, version in installed.items())
    yield f"torch for CUDA {cuda}, driver {driver or 'none'}" if cuda else "torch without CUDA: ranks talk by gloo"
    yield from (f"GPU {card.index}: {card.name}, {card.total_bytes / GIB:.3g} GiB" for card in cards)
    memory = limits.memory_limit_bytes
    yield (
        f"{limits.processors_given or limits.processors_seen:g} processors, "
        f"{(memory or psutil.virtual_memory().total) / GIB:.3g} GiB memory{' (container)' if memory else ''}, "
        f"/dev/shm {(limits.shared_memory_bytes or 0) / GIB:.3g} GiB, {limits.open_files} open files"
    )
    yield f"host {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"
