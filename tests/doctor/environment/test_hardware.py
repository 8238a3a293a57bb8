"""Planted GPUs."""

from types import SimpleNamespace
from typing import Any

from fullframe.doctor.environment.hardware import State, judged_gpus, states
from fullframe.observation.gpus import Gpu, GpuProcess

CARD = Gpu(index=0, uuid="GPU-1", name="H100", total_bytes=80 << 30, used_bytes=0, percent=0.0, processes=())


class NvmlError(Exception):
    """As NVML raises."""


def refuses(*arguments: Any) -> int:
    raise NvmlError


def driver(reasons: int, **functions: Any) -> Any:
    plain: dict[str, Any] = {
        "NVMLError": NvmlError,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: reasons if handle else 1,  # 1: idle
        "nvmlDeviceGetClockInfo": lambda handle, kind: 600,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetTotalEccErrors": refuses,
        "nvmlDeviceGetP2PStatus": lambda first, second, kind: 0,
        "NVML_CLOCK_SM": 1,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "NVML_P2P_STATUS_OK": 0,
    }
    return SimpleNamespace(**plain | functions)


def codes(cards: list[Gpu], found: list[State]) -> list[str]:
    return [finding.code for finding in judged_gpus(cards, found)]


def test_an_idle_gpu_is_not_held_back_and_a_hot_one_is() -> None:
    idle, hot = states(driver(0x40 | 0x4))
    assert idle.throttled_by == () and hot.throttled_by == ("its temperature, by the hardware",)
    assert hot.uncorrected_errors is None  # a card without ECC
    (finding,) = judged_gpus([CARD], [idle, hot])
    assert finding.message == "GPU 1 is held back by its temperature, by the hardware, at 600 of 1980 MHz"


def test_errors_peers_and_mixtures() -> None:
    from dataclasses import replace

    apart = states(driver(0, nvmlDeviceGetP2PStatus=lambda *pair: 4, nvmlDeviceGetTotalEccErrors=lambda *of: 3))
    assert codes([CARD, replace(CARD, index=1, name="A100")], apart) == ["FF223", "FF226", "FF226", "FF224"]
    assert codes([CARD], [State(index=0)]) == []


def test_who_else_is_on_a_gpu() -> None:
    from dataclasses import replace

    other = GpuProcess(pid=7, user="ann", command="python train.py", bytes=2 << 30)
    left = replace(other, trouble="orphan", remedy="kill 7")
    (found,) = judged_gpus([replace(CARD, processes=(other,))], [])
    assert found.code == "FF221" and "process 7 of ann" in found.message and "2 GiB" in found.message
    (found,) = judged_gpus([replace(CARD, processes=(left,))], [])
    assert (found.code, found.fix) == ("FF220", "kill 7")
