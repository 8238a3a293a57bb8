"""Names, figures and sources of devices, and what was measured of one."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fullframe.errors import DeviceError
from fullframe.simulation.devices.calibration import (
    Rates,
    calibrated,
    calibration_path,
    load_rates,
    measure,
    rate_at,
    store_rates,
)
from fullframe.simulation.devices.table import (
    Device,
    cpu_device,
    device_named,
    device_names,
    name_of_gpu,
    parse_cluster,
    with_rates,
)

RATES = Rates(
    device="T4",
    measured_on="a card, torch 9",
    date="2026-01-02",
    memory_bytes=15 * 10**9,
    matmul={"fp32": ((1e6, 1e12), (1e9, 4e12))},
    convolution={},
    depthwise={},
    copy=((1e4, 9e11), (1e8, 2.5e11)),
    launch_seconds=4e-6,
    context_bytes=3 * 10**8,
    link=((1e3, 1e7), (1e6, 1e10)),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "nodes", "each", "name"),
    [
        ("2x8xA100-80GB", 2, 8, "A100-80GB"),
        ("4xV100-16GB", 1, 4, "V100-16GB"),
        ("1xT4", 1, 1, "T4"),
        ("A100-80GB", 1, 1, "A100-80GB"),
        ("8xh100", 1, 8, "H100"),
        ("2xRTX 4090", 1, 2, "RTX4090"),
        ("4xNVIDIA a100 80gb", 1, 4, "A100-80GB"),
        ("V100", 1, 1, "V100-16GB"),
    ],
)
def test_a_cluster_is_read(text: str, nodes: int, each: int, name: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.name) == (nodes, each, name)
    assert cluster.ranks == nodes * each
    assert parse_cluster(cluster.name) == cluster


@pytest.mark.parametrize("text", ["", "4", "0xT4", "2x0xT4", "-1xT4", "1x2x3xT4"])
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(DeviceError):
        parse_cluster(text)


def test_an_unknown_device_names_the_known_and_the_close() -> None:
    with pytest.raises(DeviceError, match=r"there are V100-16GB.*cpu; did you mean A100-80GB"):
        device_named("A1000-80GB")


@pytest.mark.parametrize("name", [name for name in device_names() if name != "cpu"])
def test_every_figure_has_a_source_and_is_of_its_order(name: str) -> None:
    device = device_named(name)
    figures = {field.name for field in dataclasses.fields(Device)} - {"name", "has_bf16", "measured", "source"}
    assert set(device.source) == figures and all(device.source.values())
    assert 14 * 2**30 < device.memory_bytes < 192e9
    assert (
        device.has_bf16 == (name not in ("T4", "V100-16GB", "V100-32GB")) == ("tf32" in device.matmul_flops_per_second)
    )
    # Matrix units beat vector units, memory beats links, a link within a node beats the network.
    assert device.rate("fp16") > 1.9 * device.rate("fp32")
    assert device.memory_bytes_per_second > device.link_bytes_per_second >= device.host_bytes_per_second
    assert device.link_bytes_per_second > device.network_bytes_per_second


def test_a_dtype_without_matrix_units_runs_on_the_vector_units() -> None:
    v100, t4 = device_named("V100-16GB"), device_named("T4")
    assert v100.rate("bf16") == v100.rate("tf32") == v100.rate("fp32") == 15.7e12
    assert t4.rate("fp64") == t4.rate("fp32") / 32
    assert v100.lack_of("tf32") == "V100-16GB has no tf32; use fp32, which is the same there"
    assert t4.lack_of("bf16") and not t4.lack_of("fp16") and not device_named("A100-40GB").lack_of("bf16")


@pytest.mark.parametrize(
    ("cuda", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A10G", 22.0, "a10g"),  # half the matrix units of an A10
        ("NVIDIA A10", 22.0, "A10"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX4090"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA L4", 22.0, "L4"),
        ("Quadro P400", 2.0, "quadrop400"),
    ],
)
def test_the_driver_s_name_is_matched_to_ours(cuda: str, gib: float, name: str) -> None:
    assert name_of_gpu(cuda, int(gib * 2**30)) == name


def test_stored_rates_take_the_place_of_the_data_sheet_s() -> None:
    before = device_named("T4")
    assert before.measured is None
    path = store_rates(RATES)
    assert path == calibration_path("T4") and calibrated("T4") == RATES
    after = device_named("t4")
    assert after.matmul_flops_per_second == {"fp32": 4e12, "fp16": 65e12}
    assert after.memory_bytes_per_second == 2.5e11  # of the largest copy: smaller ones are in a cache
    assert (after.launch_seconds, after.link_bytes_per_second) == (4e-6, 1e10)
    assert after.link_latency_seconds == pytest.approx(1e-4)
    assert after.host_bytes_per_second == before.host_bytes_per_second  # was not measured
    assert after.context_bytes == 3 * 10**8
    assert after.source["launch_seconds"] == "measured on a card, torch 9, 2026-01-02"
    assert after.source["host_bytes_per_second"] == before.source["host_bytes_per_second"]


def test_a_device_that_only_was_measured_is_known_by_its_name() -> None:
    store_rates(dataclasses.replace(RATES, device="quadrop400", memory_bytes=2 * 2**30))
    device = parse_cluster("2xQuadro-P400").device
    assert device.memory_bytes == 2 * 2**30 and device.rate("fp32") == 4e12
    assert device.source["link_latency_seconds"].startswith("measured")


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"device": "T4", "matmul": 3})])
def test_a_broken_file_of_rates_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(DeviceError, match=r"rates\.json: .*measure again"):
        load_rates(path)


def test_rates_between_two_sizes() -> None:
    #  rate  1 |  *            at 10^2 .. 10^4 the rate goes from 1 to 100, so at 10^3 it is 10
    #      100 |     *
    points = ((1e2, 1.0), (1e4, 100.0))
    assert [rate_at(points, size) for size in (1, 1e2, 1e3, 1e4, 1e9)] == pytest.approx([1, 1, 10, 100, 100])


def test_the_cpu_is_measured_on_the_spot_and_shared_by_the_ranks() -> None:
    alone, half = parse_cluster("cpu").device, parse_cluster("2xcpu").device
    assert half.memory_bytes == alone.memory_bytes // 2
    assert 1e8 < half.rate("fp32") < 1e14 and 1e8 < half.memory_bytes_per_second < 1e13
    assert 1e-7 < half.launch_seconds < 1e-3
    assert half.measured is not None and "torch" in half.source["launch_seconds"]
    assert "assumed" in half.source["link_bytes_per_second"]
    assert not half.is_cuda and half.has_bf16
    assert 10**8 < half.context_bytes < 4 * 10**9  # Python and torch
    assert cpu_device(2) == half  # measured once a process


def test_a_calibration_of_this_cpu_survives_its_file() -> None:
    rates = measure("cpu-2-ranks", torch.device("cpu"), quick=True)
    assert set(rates.matmul) == {"fp32", "bf16", "fp64"}
    assert Rates.from_json(rates.to_json()) == rates
    store_rates(rates)
    assert cpu_device(2).measured == rates
    assert with_rates(cpu_device(1), rates).launch_seconds == rates.launch_seconds
