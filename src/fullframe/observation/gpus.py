"""Who holds memory on which GPU of this machine, what was left behind, and who is on a GPU that is not his.

NVML says it, the driver's own library, through nvidia-ml-py. Nothing is ended: the command that would is named.
"""

import contextlib
import functools
import getpass
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped, unused-ignore]

from fullframe.errors import DeviceError

_LAUNCHERS = ("python", "torchrun", "fullframe", "horovodrun", "mpirun", "accelerate", "slurmstepd", "srun")
_INITS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit")
_FORKED = 0x40  # PF_FORKNOEXEC of the kernel


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU; `bytes` is None where the driver does not say.

    trouble: "orphan" is what an earlier run left behind, "wrong gpu" a rank with a context on another rank's GPU
    remedy:  the command that would end an orphan; "" where nothing is to be ended
    """

    pid: int
    user: str
    command: str
    bytes: int | None
    rank: int | None = None
    trouble: Literal["", "orphan", "wrong gpu"] = ""
    text: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as its driver sees it; `percent` is how busy it was lately, None where the driver does not say."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    percent: float | None
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True, kw_only=True)
class Owner:
    """What the system knows of a process; `environment` is {} where this user may not read it."""

    user: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    parent: str  # the name of the process that would wait for it; "" where there is none
    parent_pid: int
    is_fork: bool  # of the process that started it, with the same program: a loader's worker, say


def owner_of(pid: int) -> Owner | None:
    """The process `pid` of this machine; None where it is not to be seen, as from a container."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            parent = process.parent()
            try:
                environment = process.environ()
            except (psutil.AccessDenied, OSError):
                environment = {}
            return Owner(
                user=process.username(),
                command=tuple(process.cmdline()) or (process.name(),),
                environment=environment,
                parent=parent.name() if parent is not None else "",
                parent_pid=parent.pid if parent is not None else 0,
                is_fork=_is_fork(pid),
            )
    except (psutil.Error, OSError):
        return None


def _is_fork(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may have brackets
        return bool(int(fields[6]) & _FORKED)
    except (OSError, ValueError, IndexError):
        return False


def gpus(nvml: Any = None, owner: Callable[[int], Owner | None] = owner_of) -> list[Gpu]:
    """The GPUs of this machine with their processes.

    `nvml` is the module pynvml, or what stands in for it. Raises DeviceError where there is no NVIDIA driver, a GPU
    does not answer it, or nvidia-ml-py is not installed.
    """
    if nvml is None:
        try:
            import pynvml  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise DeviceError("GPU processes need nvidia-ml-py; pip install 'fullframe[gpus]'") from error
        nvml = pynvml
    owner = functools.cache(owner)  # of a process, however many GPUs it is on
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise DeviceError(f"no NVIDIA driver on this machine answers ({error}); there are no GPUs to watch") from error
    try:
        found = [_gpu(nvml, index, owner) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:  # one that has fallen off the bus, say
        raise DeviceError(f"a GPU of this machine does not answer its driver ({error}); see nvidia-smi") from error
    finally:
        nvml.nvmlShutdown()
    return [replace(gpu, processes=tuple(_judged(gpu, found, owner))) for gpu in found]


def _gpu(nvml: Any, index: int, owner: Callable[[int], Owner | None]) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    percent = None
    with contextlib.suppress(nvml.NVMLError):
        percent = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    holders: dict[int, int | None] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        with contextlib.suppress(nvml.NVMLError):
            holders |= {process.pid: process.usedGpuMemory for process in ask(handle)}
    return Gpu(
        index=index,
        uuid=as_text(nvml.nvmlDeviceGetUUID(handle)),
        name=as_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=memory.total,
        used_bytes=memory.used,
        percent=percent,
        processes=tuple(_process(pid, size, owner(pid)) for pid, size in sorted(holders.items())),
    )


def _process(pid: int, size: int | None, owner: Owner | None) -> GpuProcess:
    if owner is None:
        return GpuProcess(pid=pid, user="?", command="(not to be seen from here)", bytes=size)
    rank = owner.environment.get("RANK", "")
    return GpuProcess(
        pid=pid,
        user=owner.user,
        command=shlex.join(owner.command),
        bytes=size,
        rank=int(rank) if rank.isdecimal() else None,
    )


def _judged(gpu: Gpu, all_gpus: Sequence[Gpu], owner: Callable[[int], Owner | None]) -> Iterator[GpuProcess]:
    for process in gpu.processes:
        found = owner(process.pid)
        if found is None:
            yield process
        elif is_orphan(found):
            text = f"{process.pid} was left behind by a run whose launcher is gone"
            yield replace(process, trouble="orphan", text=text, remedy=command_to_end(process.pid, found.user))
        else:
            own = own_gpu(found.environment, all_gpus)
            if own is None or own == gpu.index:
                yield process
            else:
                text = f"rank {found.environment.get('RANK', '?')} ({process.pid}) has a context on GPU {gpu.index}, "
                text += f"its own is GPU {own}; set the device before the first CUDA call (torch.cuda.set_device)"
                yield replace(process, trouble="wrong gpu", text=text)


def command_to_end(pid: int, user: str) -> str:
    """What this user would type to end a process of `user`."""
    return f"kill {pid}" if user == getpass.getuser() else f"sudo kill {pid}"


def is_orphan(owner: Owner) -> bool:
    """Whether a process of fullframe outlived who started it.

    A rank belongs to a launcher, which gives its job a name. What has none was started by hand, RANK set or not,
    perhaps with nohup by a shell or a script that is gone; unless it is a fork, as a loader's worker is, of a process
    that would wait for it.
    """
    ours = (word for word in owner.command if not word.startswith("from multiprocessing"))  # which names what it loads
    if not any("fullframe" in word for word in ours) and "FULLFRAME_RESTART_REASON" not in owner.environment:
        return False
    return has_lost_parent(owner) and ("TORCHELASTIC_RUN_ID" in owner.environment or owner.is_fork)


def has_lost_parent(owner: Owner) -> bool:
    """Whether it is left to the first process of the machine, or of a container where that is no launcher."""
    if owner.parent_pid > 1 and owner.parent not in _INITS:
        return False
    return not any(owner.parent.startswith(name) for name in _LAUNCHERS)


def own_gpu(environment: Mapping[str, str], all_gpus: Sequence[Gpu]) -> int | None:
    """NVML's number of the GPU that a local rank is to use; None where that cannot be known.

    CUDA counts the fastest first unless CUDA_DEVICE_ORDER says otherwise, NVML by the bus: with GPUs of several kinds
    their numbers may differ.
    """
    local = environment.get("LOCAL_RANK", "")
    if not local.isdecimal():
        return None
    is_same_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in all_gpus}) == 1
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu.index) for gpu in all_gpus] if visible is None else visible.split(",")
    if int(local) >= len(names):
        return None
    name = names[int(local)].strip()
    if name.isdecimal():
        return int(name) if is_same_order and int(name) < len(all_gpus) else None
    return next((gpu.index for gpu in all_gpus if name and gpu.uuid.startswith(name)), None)


def as_text(value: Any) -> str:
    """What NVML says in words; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
