"""Versions that were installed together."""

import pytest

from fullframe.doctor.environment.versions import judged_versions


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.13.0+cpu", "numpy": "2.4.6"}, []),
        ({"torch": "2.6.0", "torchvision": "0.21.0", "torchaudio": "2.6.0"}, []),
        ({"torch": "2.6.0", "torchvision": "0.20.1"}, ["FF201"]),
        ({"torch": "2.6.0", "torchaudio": "2.5.1"}, ["FF201"]),
        ({"torch": "2.2.2", "numpy": "2.0.0"}, ["FF201"]),
        ({}, []),
    ],
)
def test_pairs(versions: dict[str, str], expected: list[str]) -> None:
    assert [f.code for f in judged_versions(versions, cuda=None, driver=None, gpu_is_there=False)] == expected


@pytest.mark.parametrize(
    ("cuda", "driver", "expected"),
    [
        ("12.6", "560.35.03", []),
        ("12.6", "525.60.13", []),
        ("12.6", "470.82.01", ["FF203"]),
        ("13.0", "570.10", ["FF203"]),
        (None, "560.35.03", ["FF202"]),
        ("14.0", "560.35", []),  # not known
    ],
)
def test_drivers(cuda: str | None, driver: str, expected: list[str]) -> None:
    found = judged_versions({"torch": "2.13.0"}, cuda=cuda, driver=driver, gpu_is_there=True)
    assert [finding.code for finding in found] == expected
