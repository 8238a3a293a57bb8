"""GPUs as their driver sees them: who holds them, whether they are slowed down, alike, sound and in reach."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fullframe.doctor.environment import kinds
from fullframe.doctor.finding import Finding
from fullframe.observation.gpus import Gpu
from fullframe.wording import GIB, some

# NVML's bits of "clocks event reasons" that mean harm, and what they say.
_THROTTLES = {
    0x08: "a hardware slowdown",
    0x20: "its temperature, by the driver",
    0x40: "its temperature, by the hardware",
    0x80: "the power supply",
}
_PEER_READ = 0  # NVML_P2P_CAPS_INDEX_READ


@dataclass(frozen=True, kw_only=True)
class State:
    """What NVML says of one GPU beside its memory; None where the driver does not say."""

    index: int
    throttled_by: tuple[str, ...] = ()
    sm_mhz: int | None = None
    most_sm_mhz: int | None = None
    uncorrected_errors: int | None = None
    unreachable: tuple[int, ...] = ()  # GPUs that it cannot read from


def states(nvml: Any) -> list[State]:
    """Of every GPU; read only. `nvml` is nvidia-ml-py's module, initialized."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC  # since the machine was started
    return [
        State(
            index=number,
            throttled_by=_throttles(nvml, handle),
            sm_mhz=_asked(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            most_sm_mhz=_asked(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            uncorrected_errors=_asked(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
            unreachable=tuple(n for n, peer in enumerate(handles) if n != number and not _reaches(nvml, handle, peer)),
        )
        for number, handle in enumerate(handles)
    ]


def _throttles(nvml: Any, handle: Any) -> tuple[str, ...]:
    bits = _asked(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    return tuple(text for bit, text in _THROTTLES.items() if bits & bit)


def _reaches(nvml: Any, handle: Any, peer: Any) -> bool:
    status = _asked(nvml, nvml.nvmlDeviceGetP2PStatus, handle, peer, _PEER_READ)
    return status is None or status == nvml.NVML_P2P_STATUS_OK


def _asked(nvml: Any, question: Any, *arguments: Any) -> int | None:
    try:
        return int(question(*arguments))
    except nvml.NVMLError:
        return None


def judged_gpus(gpus: Sequence[Gpu], found: Sequence[State]) -> Iterator[Finding]:
    """Findings about the GPUs of this machine."""
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        yield kinds.MIXED_GPUS.found(f"this machine has {some(names)}")
    for gpu in gpus:
        for process in gpu.processes:
            held = "" if process.bytes is None else f" and holds {process.bytes / GIB:.3g} GiB"
            text = f"process {process.pid} of {process.user} ({process.command[:60]}) uses GPU {gpu.index}{held}"
            if process.trouble == "orphan":
                yield kinds.ORPHANS.found(f"{text}; nothing waits for it", fix=process.remedy)
            else:
                yield kinds.GPU_IN_USE.found(text)
    for state in found:
        if state.throttled_by:
            clock = f", at {state.sm_mhz} of {state.most_sm_mhz} MHz" if state.sm_mhz and state.most_sm_mhz else ""
            yield kinds.THROTTLED.found(f"GPU {state.index} is held back by {some(state.throttled_by)}{clock}")
        if state.uncorrected_errors:
            yield kinds.MEMORY_ERRORS.found(f"GPU {state.index} has {state.uncorrected_errors} uncorrected errors")
    apart = [f"{state.index} and {other}" for state in found for other in state.unreachable if other > state.index]
    if apart:
        yield kinds.NO_PEER.found(f"no peer-to-peer between GPUs {some(apart)}")
