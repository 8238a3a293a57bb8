"""What a GPU can hold and do, by name: data sheet figures with their sources, or what `fullframe calibrate` measured.

Rates are what the data sheet promises, dense; how much of them a training step reaches is said in `roofline`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import psutil  # type: ignore[import-untyped, unused-ignore]

from fullframe.errors import DeviceError
from fullframe.ranks import device as gpu
from fullframe.simulation.devices.calibration import Rates, calibrated, measured_now
from fullframe.simulation.devices.host_costs import USUAL_HOST, HostCosts
from fullframe.wording import GIB


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or one rank's share of this machine's CPU, as the simulation sees it.

    memory_bytes: what `torch.cuda.get_device_properties` calls total_memory; the context comes off it
    matmul_flops_per_second: by "fp64", "fp32", "tf32", "bf16", "fp16"; a dtype that is missing has no matrix units
        and runs at the rate of "fp32", which is that of the vector units
    launch_seconds: what it takes the host to issue one kernel from an eager op
    link, network, host: between two GPUs of a node, between GPUs of two nodes, between a GPU and its host's memory;
        bytes a second in one direction
    host: what Python takes of a step on the processor beside the device
    measured: what `fullframe calibrate` found on this machine; where it is there, it is used and the peaks are not
    source: for each figure where it is from
    """

    name: str
    memory_bytes: int
    matmul_flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    launch_seconds: float
    link_bytes_per_second: float
    link_latency_seconds: float
    network_bytes_per_second: float
    network_latency_seconds: float
    host_bytes_per_second: float
    context_bytes: int
    has_bf16: bool
    host: HostCosts = field(default_factory=HostCosts)
    measured: Rates | None = None
    source: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        """Whether CUDA's context, workspaces, caching allocator and asynchronous queue are to be counted."""
        return self.name != "cpu"

    def rate(self, dtype: str) -> float:
        """Operations a second of a dtype; without matrix units for it those of fp32, and a 32nd of that for fp64."""
        rates = self.matmul_flops_per_second
        return rates.get(dtype) or rates["fp32"] / (32 if dtype == "fp64" else 1)

    def lack_of(self, precision: str) -> str:
        """That the device has nothing for a strategy's precision, and what to take; "" where it has."""
        if precision == "bf16" and not self.has_bf16:
            return f"{self.name} has no bf16; use fp16, which scales the loss"
        if precision == "tf32" and "tf32" not in self.matmul_flops_per_second:
            return f"{self.name} has no tf32; use fp32, which is the same there"
        return ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices; ranks fill a node before the next one."""

    nodes: int
    devices_per_node: int
    device: Device

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @property
    def name(self) -> str:
        """As `parse_cluster` reads it."""
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.devices_per_node}x{self.device.name}"


_NCCL = "assumed, of the order of NCCL's own tuning table; `fullframe calibrate` measures it where there are two ranks"
_MESSAGES = "what PyTorch's out-of-memory messages on this card"
_V100 = {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}
_PCIE = {3: 15.75, 4: 31.5, 5: 63.0}  # 1e9 bytes a second of 16 lanes, one direction, before packet headers
_ETHERNET = 3.125  # 25 Gb/s


def _since_ampere(fp32: float, tf32: float, half: float, **fp64: float) -> dict[str, float]:
    """1e12 operations a second; both 16-bit dtypes at one rate."""
    return {**fp64, "fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half}


def _geforce(fp32: float, half: float) -> dict[str, float]:
    """As the white papers have it, which count with a clock that the cards exceed by some 15 % at work."""
    return _since_ampere(*(rate * 1.15 for rate in (fp32, fp32, half)))


_A100 = _since_ampere(19.5, 156.0, 312.0, fp64=19.5)
_H100 = _since_ampere(67.0, 494.0, 989.0, fp64=67.0)


def _gpu(
    name: str,
    *,
    gib: float,
    context_mib: int,
    tera: Mapping[str, float],
    giga_bytes: float,
    pcie: int,
    sheet: str = "",
    nvlink: float | None = None,
    network: float = _ETHERNET,
) -> Device:
    """A card in its data sheet's units: 1e12 operations and 1e9 bytes a second, links in one direction."""
    sheet = sheet or f"NVIDIA {name} data sheet"
    host = _PCIE[pcie] * 1e9
    wire = "half of NVLink's figure, which is of both ways"
    if name.startswith("V100"):
        wire = "2 of the 6 NVLinks, as between neighbours in a DGX-1; only a DGX-2 switches all 6"
    bus = f"PCIe {pcie}.0 x16, one direction"
    return Device(
        name=name,
        memory_bytes=int(gib * GIB),
        matmul_flops_per_second={dtype: rate * 1e12 for dtype, rate in tera.items()},
        memory_bytes_per_second=giga_bytes * 1e9,
        launch_seconds=7e-6,
        link_bytes_per_second=nvlink * 1e9 if nvlink else host,
        link_latency_seconds=10e-6 if nvlink else 15e-6,
        network_bytes_per_second=network * 1e9,
        network_latency_seconds=25e-6,
        host_bytes_per_second=host,
        context_bytes=context_mib * 2**20,
        has_bf16="bf16" in tera,
        host=USUAL_HOST,
        source={
            "memory_bytes": f"{_MESSAGES} call its total capacity; the smallest seen",
            "matmul_flops_per_second": f"{sheet}; without sparsity, 16-bit with fp32 accumulation",
            "memory_bytes_per_second": sheet,
            "launch_seconds": "assumed; `fullframe calibrate` measures it",
            "host": USUAL_HOST.source,
            "link_bytes_per_second": f"{sheet}: {wire}" if nvlink else bus,
            "link_latency_seconds": _NCCL,
            "network_bytes_per_second": "NVIDIA DGX data sheet of the generation: the ports' rate over the GPUs"
            if nvlink
            else "assumed: 25 Gb/s of Ethernet for each card",
            "network_latency_seconds": _NCCL,
            "host_bytes_per_second": bus,
            "context_bytes": f"{_MESSAGES}, or its siblings, say of the process beyond what PyTorch had reserved",
        },
    )


_DEVICES = {
    device.name: device
    for device in (
        _gpu("V100-16GB", gib=15.77, context_mib=385, tera=_V100, giga_bytes=900, pcie=3, nvlink=50, network=6.25,
             sheet="NVIDIA V100 data sheet, SXM2"),
        _gpu("V100-32GB", gib=31.73, context_mib=385, tera=_V100, giga_bytes=900, pcie=3, nvlink=50, network=6.25,
             sheet="NVIDIA V100 data sheet, SXM2"),
        _gpu("T4", gib=14.56, context_mib=140, tera={"fp32": 8.1, "fp16": 65.0}, giga_bytes=320, pcie=3),
        _gpu("A10", gib=21.98, context_mib=280, tera=_since_ampere(31.2, 62.5, 125.0), giga_bytes=600, pcie=4),
        _gpu("A30", gib=23.53, context_mib=350, tera=_since_ampere(10.3, 82.0, 165.0, fp64=10.3), giga_bytes=933,
             pcie=4),
        _gpu("A40", gib=44.34, context_mib=350, tera=_since_ampere(37.4, 74.8, 149.7), giga_bytes=696, pcie=4),
        _gpu("A100-40GB", gib=39.38, context_mib=540, tera=_A100, giga_bytes=1555, pcie=4, nvlink=300, network=25,
             sheet="NVIDIA A100 data sheet, SXM4"),
        _gpu("A100-80GB", gib=79.14, context_mib=540, tera=_A100, giga_bytes=2039, pcie=4, nvlink=300, network=25,
             sheet="NVIDIA A100 data sheet, SXM4"),
        _gpu("L4", gib=21.95, context_mib=250, tera=_since_ampere(30.3, 60.0, 121.0), giga_bytes=300, pcie=4),
        _gpu("L40S", gib=44.34, context_mib=525, tera=_since_ampere(91.6, 183.0, 362.0), giga_bytes=864, pcie=4),
        _gpu("RTX3090", gib=23.53, context_mib=320, tera=_geforce(35.6, 71.0), giga_bytes=936, pcie=4,
             sheet="NVIDIA GA102 white paper"),
        _gpu("RTX4090", gib=23.51, context_mib=470, tera=_geforce(82.6, 165.2), giga_bytes=1008, pcie=4,
             sheet="NVIDIA Ada GPU architecture white paper"),
        _gpu("RTX5090", gib=31.34, context_mib=620, tera=_geforce(104.8, 209.5), giga_bytes=1792, pcie=5,
             sheet="NVIDIA RTX Blackwell GPU architecture white paper"),
        _gpu("H100", gib=79.1, context_mib=700, tera=_H100, giga_bytes=3350, pcie=5, nvlink=450, network=50,
             sheet="NVIDIA H100 data sheet, SXM5"),
        _gpu("H200", gib=139.72, context_mib=670, tera=_H100, giga_bytes=4800, pcie=5, nvlink=450, network=50,
             sheet="NVIDIA H200 data sheet, SXM5"),
        _gpu("B200", gib=178.35, context_mib=710, tera=_since_ampere(80.0, 1100.0, 2250.0, fp64=40.0), giga_bytes=8000,
             pcie=5, nvlink=900, network=50, sheet="NVIDIA Blackwell architecture brief, HGX B200"),
    )
}  # fmt: skip
_OTHER_NAMES = {
    "A100": "A100-40GB",
    "V100": "V100-16GB",
    "H100-80GB": "H100",
    "H200-141GB": "H200",
    "B200-180GB": "B200",
}


def device_named(name: str) -> Device:
    """The device of that name, with the rates that `fullframe calibrate` stored for it on this machine, if any.

    "cpu" is this machine's, measured now unless it was calibrated. Raises DeviceError naming what there is.
    """
    if name.lower() == "cpu":
        return cpu_device()
    known = {_folded(other): other for other in (*_DEVICES, *_OTHER_NAMES)}
    found = known.get(_folded(name))
    if found is None:
        rates = calibrated(_folded(name))
        if rates is not None:
            return with_rates(_measured_only(rates), rates)
        close = difflib.get_close_matches(_folded(name), known, n=3, cutoff=0.5)
        guess = f"; did you mean {' or '.join(known[other] for other in close)}?" if close else ""
        raise DeviceError(
            f"no device {name!r}; there are {', '.join(device_names())}{guess}"
            f"; on a machine that has it, fullframe calibrate makes it known"
        )
    device = _DEVICES[_OTHER_NAMES.get(found, found)]
    rates = calibrated(device.name)
    return device if rates is None else with_rates(device, rates)


def name_of_gpu(cuda_name: str, memory_bytes: int) -> str:
    """Our name for what the driver calls its GPU; its own, folded, where we have none."""
    words = [_folded(word) for word in re.split(r"[^A-Za-z0-9]+", cuda_name)]
    words += [first + second for first, second in pairwise(words)]  # RTX 4090
    cards = {_folded(other.partition("-")[0]): name.partition("-")[0] for other, name in _OTHER_NAMES.items()}
    cards |= {_folded(name.partition("-")[0]): name.partition("-")[0] for name in _DEVICES}
    named = {cards[word] for word in words if word in cards}
    fitting = [name for name in _DEVICES if name.partition("-")[0] in named]
    nearest = min(fitting, key=lambda name: abs(_DEVICES[name].memory_bytes - memory_bytes), default=None)
    return nearest or _folded(cuda_name)


def cluster_here(ranks: int) -> str:
    """The name of the devices that a job of so many ranks, of which this is one or its launcher, runs on."""
    nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    name = "cpu" if gpu.accelerator() is None else name_of_gpu(*gpu.properties())
    return f"{nodes}x{ranks // nodes}x{name}" if nodes > 1 else f"{ranks}x{name}"


def device_names() -> tuple[str, ...]:
    """What `device_named` knows, "cpu" last."""
    return (*_DEVICES, "cpu")


def parse_cluster(text: str) -> Cluster:
    """Nodes and devices: "2x8xA100-80GB" is 2 nodes of 8, "4xV100-16GB" one node of 4, "A100-80GB" one device.

    Ranks on the CPU share its cores and its memory. Raises DeviceError on anything else.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z].*)", text.strip())
    counts = [int(count) for count in match.groups()[:2] if count] if match else []
    if match is None or 0 in counts:
        raise DeviceError(
            f"cannot read the devices {text!r}; write 4xV100-16GB for 4 GPUs of one node, "
            "2x8xA100-80GB for 2 nodes of 8"
        )
    nodes, each = counts if len(counts) == 2 else (1, counts[0] if counts else 1)
    name = match.group(3)
    device = cpu_device(each) if name.lower() == "cpu" else device_named(name)
    return Cluster(nodes=nodes, devices_per_node=each, device=device)


def cpu_device(ranks: int = 1) -> Device:
    """One of `ranks` equal shares of this machine's CPU: threads as `fullframe train` starts them."""
    threads = max(len(os.sched_getaffinity(0)) // ranks, 1)
    name = f"cpu-{ranks}-ranks"
    rates = calibrated(name) or measured_now(name, threads)
    blank = Device(
        name="cpu",
        memory_bytes=psutil.virtual_memory().total // ranks,
        matmul_flops_per_second={},
        memory_bytes_per_second=0.0,
        launch_seconds=0.0,
        link_bytes_per_second=1e9,
        link_latency_seconds=200e-6,
        network_bytes_per_second=1e9,
        network_latency_seconds=500e-6,
        host_bytes_per_second=rates.copy[-1][1],  # to offload is to copy
        context_bytes=0,
        has_bf16=True,
        host=USUAL_HOST,
        source={
            "memory_bytes": f"this machine's memory, shared by {ranks} ranks",
            "link_bytes_per_second": "assumed: gloo over loopback; `fullframe calibrate --processes 2` measures it",
            "network_bytes_per_second": "assumed: 10 Gb/s Ethernet",
            "host": USUAL_HOST.source,
        },
    )
    return with_rates(blank, rates)


def _measured_only(rates: Rates) -> Device:
    """A GPU of which no data sheet is known here; what was not measured is taken from the slowest card that is."""
    like = _DEVICES["T4"]
    guessed = {name: f"that of a {like.name}: not measured" for name in like.source}
    return replace(
        like,
        name=rates.device,
        memory_bytes=rates.memory_bytes,
        matmul_flops_per_second={},
        has_bf16="bf16" in rates.matmul,
        source={**guessed, "memory_bytes": f"measured on {rates.measured_on}"},
    )


def with_rates(device: Device, rates: Rates) -> Device:
    """`device` with the figures that were measured in the place of the data sheet's."""
    best = {dtype: max(rate for _, rate in points) for dtype, points in rates.matmul.items()}
    changed: dict[str, object] = {
        "matmul_flops_per_second": {**device.matmul_flops_per_second, **best},
        "memory_bytes_per_second": rates.copy[-1][1],  # beyond any cache
        "launch_seconds": rates.launch_seconds,
        "host_bytes_per_second": rates.host_bytes_per_second,
        "link_bytes_per_second": rates.link[-1][1] if rates.link else None,
        "link_latency_seconds": rates.link[0][0] / rates.link[0][1] if rates.link else None,
        "context_bytes": rates.context_bytes,
        "host": rates.host,
    }
    changed = {name: value for name, value in changed.items() if value is not None}
    said = f"measured on {rates.measured_on}, {rates.date}"
    return replace(device, measured=rates, source={**device.source, **dict.fromkeys(changed, said)}, **changed)  # type: ignore[arg-type]


def _folded(name: str) -> str:
    name = re.sub(r"\b(nvidia|tesla|geforce)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", name)
