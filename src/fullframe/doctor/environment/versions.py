"""Versions that are installed: pairs that are known not to work together, and what torch was built for."""

from collections.abc import Iterator, Mapping

from fullframe.doctor.environment import kinds
from fullframe.doctor.finding import Finding

# The first driver for Linux that runs a major version of CUDA (NVIDIA's "CUDA Compatibility", minor versions).
_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
_VISION_BEHIND = 15  # torchvision 0.(n + 15) belongs to torch 2.n

NAMES = ("torch", "torchvision", "torchaudio", "numpy", "fullframe")


def judged_versions(
    versions: Mapping[str, str], *, cuda: str | None, driver: str | None, gpu_is_there: bool
) -> Iterator[Finding]:
    """Findings about versions by name; `cuda` is what torch was built for, `driver` the driver's version."""
    torch, numpy = _numbers(versions.get("torch")), _numbers(versions.get("numpy"))
    vision, audio = _numbers(versions.get("torchvision")), _numbers(versions.get("torchaudio"))
    if torch and vision and torch[0] == 2 and vision[0] == 0 and vision[1] != torch[1] + _VISION_BEHIND:
        yield kinds.VERSIONS.found(
            f"torchvision {versions['torchvision']} beside torch {versions['torch']}: its operators are not found",
            fix=f"torchvision 0.{torch[1] + _VISION_BEHIND} belongs to torch 2.{torch[1]}",
        )
    if torch and audio and torch[0] == audio[0] == 2 and torch[1] <= 8 and audio[1] != torch[1]:
        yield kinds.VERSIONS.found(f"torchaudio {versions['torchaudio']} beside torch {versions['torch']}")
    if torch and numpy and numpy[0] >= 2 and torch < (2, 3):
        yield kinds.VERSIONS.found(
            f"numpy {versions['numpy']} beside torch {versions['torch']}, which was built against numpy 1",
            fix="numpy below 2, or torch 2.3 and later",
        )
    if gpu_is_there and cuda is None:
        yield kinds.NO_GPU_BUILD.found(f"torch {versions.get('torch')} was built without CUDA, and there is a GPU")
    least = _DRIVERS.get((_numbers(cuda) or (0,))[0])
    have = _numbers(driver)
    if least and have and have < least:
        yield kinds.OLD_DRIVER.found(
            f"driver {driver} is older than {'.'.join(map(str, least))}, the first that runs CUDA {cuda}"
        )


def _numbers(version: str | None) -> tuple[int, ...] | None:
    """(2, 13) of '2.13.0+cpu'."""
    if not version:
        return None
    parts = version.split("+")[0].split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else None
