"""The device of this rank: which one it is, whether it works, and what is asked of it beside tensors.

By `torch.accelerator`, so of whatever GPU torch was built for; by torch's module of the device (`torch.cuda`, also for
AMD) where there is no general call. Read in torch 2.13's source; it has run on no GPU yet.
"""

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.errors import DeviceError, FullframeError, MeshError
from fullframe.wording import first_line

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
_ON_THE_CPU = "CUDA_VISIBLE_DEVICES='' trains on the CPU"
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_OF_SLURM = "SLURM_GPUS_ON_NODE"
_SHORT_SHARE = 0.1  # of a device's memory: so little that a library may have got none


def accelerator() -> torch.device | None:
    """The kind of GPU that can be used, without a number; None where there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def count() -> int:
    """GPUs that this process sees."""
    return torch.accelerator.device_count()


def is_in_use() -> bool:
    """Whether this process has begun to use a GPU; does not begin."""
    kind = torch.accelerator.current_accelerator()
    started = None if kind is None else getattr(torch.get_device_module(kind), "is_initialized", None)
    return bool(started is not None and started())


def current(kind: str) -> torch.device:
    """This rank's device of the given kind: `cuda:1`, or `cpu`."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def backends() -> str:
    """What a process group of this rank is made of: gloo for host memory, and the GPU's own where there is one."""
    kind, own = accelerator(), own_backend()
    return "gloo" if kind is None or own is None else f"cpu:gloo,{kind.type}:{own}"


def own_backend() -> str | None:
    """Torch's backend for messages between GPUs of the kind it was built for: "nccl"; None where that is none."""
    kind = torch.accelerator.current_accelerator()
    found = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    return None if found == "gloo" else found


def sends_between_devices(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the group's messages go from GPU to GPU, by NCCL or its like; otherwise by gloo, from host memory."""
    parts = {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")}
    return own_backend() in parts


def place_of_numbers(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where a few numbers lie that a group sends and the host reads: host memory, where the group has gloo for it."""
    kind = torch.accelerator.current_accelerator()
    on_device = kind is not None and sends_between_devices(group) and "gloo" not in dist.get_backend_config(group)
    return kind if kind is not None and on_device else torch.device("cpu")


def kind_of_job() -> str:
    """The kind of device on which the ranks of this job compute: "cuda", "cpu"."""
    kind = accelerator()
    return kind.type if kind is not None and sends_between_devices() else "cpu"


def name() -> str:
    """What this rank's device will be called: "NVIDIA H100 80GB HBM3", or "the CPU" and why.

    Raises DeviceError or MeshError as `take` does.
    """
    require_usable()
    kind = accelerator()
    if kind is None:
        built = torch.accelerator.current_accelerator() is not None
        return "the CPU" if built or not _there() else f"the CPU: torch {torch.__version__} was built without GPUs"
    return str(_module().get_device_name(index_of_rank()))


def index_of_rank() -> int:
    """Which of the GPUs that this process sees is this rank's.

    Raises MeshError where there are fewer than ranks on this machine, or nothing tells the ranks of a machine apart.
    """
    found = next((os.environ[variable] for variable in _LOCAL_RANKS if variable in os.environ), None)
    gpus, ranks = count(), int(os.environ.get("WORLD_SIZE", "1"))
    if gpus == 1:  # where each process sees its own alone
        return 0
    if ranks == 1:
        return torch.accelerator.current_device_index() if found is None else int(found) % gpus
    if found is None:
        raise MeshError(
            f"RANK is set and LOCAL_RANK is not, so the {gpus} GPUs of this machine cannot be given out; "
            "set LOCAL_RANK to the rank's number on its machine, as torchrun does"
        )
    require_enough(int(os.environ.get("LOCAL_WORLD_SIZE", int(found) + 1)))
    return int(found)


def require_enough(ranks: int) -> None:
    """Raises MeshError where this machine has GPUs, but fewer than the `ranks` that are to run on it."""
    gpus = count()
    if 0 < gpus < ranks:
        raise MeshError(
            f"{ranks} ranks on this machine need {ranks} GPUs, it has {gpus}; start {gpus}, or all on the CPU: "
            f"{_ON_THE_CPU}"
        )


def require_usable() -> None:
    """Raises DeviceError where there is a GPU that torch cannot use, or Slurm gave some, unless they are hidden."""
    hidden = any(os.environ.get(variable) in ("", "-1") for variable in _HIDING)
    if accelerator() is not None or hidden:
        return
    is_built = torch.accelerator.current_accelerator() is not None
    given = os.environ.get(_OF_SLURM, "0")
    if is_built and _there():
        raise DeviceError(
            f"this machine has a GPU that torch {torch.__version__} cannot use: {_refusal()}. Install a newer driver, "
            f"or a torch for the driver that is there; {_ON_THE_CPU}"
        )
    if given != "0":
        raise DeviceError(
            f"Slurm gave this job GPUs here ({_OF_SLURM}={given}), and torch {torch.__version__} "
            f"{'finds none' if is_built else 'was built without GPUs'}. Install a torch for them; {_ON_THE_CPU}"
        )


def _refusal() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "torch finds none"


def _there() -> bool:
    """Whether a driver shows a GPU, whatever torch makes of it."""
    # AMD's shows every processor with graphics too, so it counts only for a torch that was built for it.
    return any(Path("/dev").glob("kfd" if torch.version.hip else "nvidia[0-9]*"))


def take(store: dist.Store, rank: int, ranks: int) -> None:
    """Make this rank's device the current one and try it; all ranks of the job call it, before any other message.

    Raises MeshError on all ranks, naming one, when a rank's device cannot be used, two ranks have the same one, or
    some ranks have one and others do not.
    """
    problem, mine = "", ("", "")
    try:
        mine = _taken()
    except FullframeError as error:
        if ranks == 1:
            raise
        problem = str(error)
    if ranks == 1:
        return
    store.set(f"device/{rank}", json.dumps([problem, *mine]))
    if rank == 0:
        found = [json.loads(store.get(f"device/{other}")) for other in range(ranks)]
        store.set("device", _verdict(found))
    text = store.get("device").decode()
    if text:
        raise MeshError(text)


def _taken() -> tuple[str, str]:
    """The kind of this rank's device, and what tells it from any other; ("cpu", "") for none."""
    require_usable()
    kind = accelerator()
    if kind is None:
        return "cpu", ""
    index = index_of_rank()
    torch.accelerator.set_device_index(index)
    device = torch.device(kind.type, index)
    try:
        torch.ones((), device=device).add_(1).item()
    except RuntimeError as error:
        if "no kernel image" not in str(error) and "invalid device function" not in str(error):
            raise
        raise DeviceError(_no_kernels(device)) from error
    properties = _module().get_device_properties(index)
    return kind.type, f"{socket.gethostname()} {getattr(properties, 'uuid', index)}"


def _no_kernels(device: torch.device) -> str:
    module: Any = torch.get_device_module(device)
    properties = module.get_device_properties(device)
    kind = f", sm_{properties.major}{properties.minor}" if hasattr(properties, "major") else ""
    return (
        f"torch {torch.__version__} has no kernels for this GPU ({module.get_device_name(device)}{kind}), only for "
        f"{', '.join(module.get_arch_list())}; "
        f"install a torch that has (https://pytorch.org/get-started/previous-versions). {_ON_THE_CPU}"
    )


def _verdict(found: list[list[str]]) -> str:
    """What is wrong with the devices of all ranks, each (problem, kind, which); "" for nothing."""
    for rank, (problem, _, _) in enumerate(found):
        if problem:
            return f"rank {rank}: {problem}"
    kinds = [kind for _, kind, _ in found]
    odd = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        return f"rank 0 is on {kinds[0]} and rank {odd} on {kinds[odd]}; give every rank a GPU, or none: {_ON_THE_CPU}"
    first: dict[str, int] = {}
    for rank, (_, kind, which) in enumerate(found):
        if kind != "cpu" and first.setdefault(which, rank) != rank:
            return (
                f"ranks {first[which]} and {rank} have the same GPU ({which}), over which they cannot talk; start as "
                f"many ranks as there are GPUs, or all on the CPU: {_ON_THE_CPU}"
            )
    return ""


def repeat_kernels() -> None:
    """From now on take kernels whose results repeat to the bit; torch raises RuntimeError where an op has none.

    To be called before the first op on a GPU.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as cuBLAS asks for
    torch.backends.cudnn.benchmark = False  # which times kernels, and takes another one in another run
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads it
    torch.use_deterministic_algorithms(True)


def begin() -> None:
    """Start to use the GPU where there is one, so that its random state is there."""
    if accelerator() is not None and hasattr(_module(), "init"):
        _module().init()


def random_state() -> Tensor | None:
    """The state of this rank's GPU's generator; None where it is not in use, or has none."""
    return _module().get_rng_state() if is_in_use() and hasattr(_module(), "get_rng_state") else None


def set_random_state(state: Tensor | None) -> None:
    """Put back what `random_state` returned, where there is a GPU."""
    if state is not None and accelerator() is not None:
        _module().set_rng_state(state)


def _module() -> Any:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.get_device_module(kind)


def is_short_of_memory() -> bool:
    """Whether so little of this rank's GPU's memory is left that a library's work space may not have fitted."""
    if not is_in_use():
        return False
    free, total = torch.accelerator.get_memory_info()
    unused = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()  # torch's, for the next tensor
    return free + unused < _SHORT_SHARE * total


def properties() -> tuple[str, int]:
    """The name of this rank's GPU, as its maker gives it, and its memory in bytes."""
    found = _module().get_device_properties(torch.accelerator.current_device_index())
    return found.name, found.total_memory


def uuid() -> str:
    """What tells this rank's GPU from all others; "" where torch does not know it."""
    return str(getattr(_module().get_device_properties(torch.accelerator.current_device_index()), "uuid", ""))


def peak_bytes() -> tuple[int, int]:
    """The most that torch has allocated at once on this rank's GPU, and the most that it has taken from the driver."""
    return torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()


def wait() -> None:
    """Wait until this rank's GPU has done all that it was given."""
    if is_in_use():
        torch.accelerator.synchronize()


def release_memory() -> None:
    """Give back to the device what torch keeps for later tensors; waits for the device."""
    if is_in_use():
        torch.accelerator.empty_cache()


def is_through(seconds: float) -> bool:
    """Whether this rank's GPU gets through all it was given within so many seconds; True where none is in use.

    It does not when it waits for a message of a rank that sends no more.
    """
    if not is_in_use():
        return True
    # A daemon, which may wait for ever: a process that has to end does not wait for it. The current device is a
    # thread's own.
    own = torch.accelerator.current_device_index()
    waiting = threading.Thread(target=torch.accelerator.synchronize, args=(own,), name="GPU", daemon=True)
    waiting.start()
    waiting.join(seconds)
    return not waiting.is_alive()
