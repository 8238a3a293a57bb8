"""RANK and WORLD_SIZE, as launchers set them and as they are left over."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest
import torch

from fullframe.errors import MeshError
from fullframe.processes.place import is_cpu_build, launched_place, require_alone


@pytest.mark.parametrize(
    ("rank", "world", "place"), [(None, None, None), ("1", None, None), (None, "2", None), ("1", "2", (1, 2))]
)
def test_a_place_is_both_numbers(monkeypatch, rank, world, place):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert launched_place() == place


@pytest.mark.parametrize(("rank", "world"), [("x", "2"), ("", ""), ("5", "2"), ("-1", "2"), ("0", "0")])
def test_what_is_no_place_is_named(monkeypatch, rank, world):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(MeshError, match=f"RANK={rank!r} and WORLD_SIZE={world!r}, which is no rank of a job; unset"):
        launched_place()


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_one_of_several_without_a_rank_is_refused(name):
    require_alone({})
    require_alone({name: "1"})
    with pytest.raises(MeshError, match=rf"one of 2 processes \({name}\), and RANK is not set.* unset {name}"):
        require_alone({name: "2"})


@pytest.mark.parametrize(
    ("version", "none"),
    [
        ("cuda = None\nhip = None\nxpu = None\n", True),
        ("cuda = '12.8'\nhip = None\nxpu = None\n", False),
        ("cuda = None\nhip = '6.4'\nxpu = None\n", False),
        ("cuda = None\n", False),  # of others it does not say
    ],
)
def test_a_build_without_gpus_is_told_by_its_version_file(tmp_path, monkeypatch, version, none):
    (tmp_path / "version.py").write_text(version)
    found = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert is_cpu_build() == none


def test_no_gpu_is_seen_where_the_build_that_is_installed_has_none():
    assert is_cpu_build() == (torch.version.cuda is torch.version.hip is torch.version.xpu is None)
    assert not (is_cpu_build() and torch.accelerator.is_available())
