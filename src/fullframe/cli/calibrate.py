"""`fullframe calibrate`: measure this machine's device once, so that plans count with what it really does."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from fullframe.cli.display import require_writable, said_of_failure, writing
from fullframe.cli.words import words
from fullframe.errors import DeviceError
from fullframe.processes.place import launched_place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fullframe.simulation.devices.calibration import Rates


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this machine's GPU, or its CPU: matrix products, convolutions, copies, launches, the host, the link.

    They are kept in ~/.cache/fullframe/devices, from where `plan` and `simulate` take them for that device.
    """

    processes: Annotated[int, arg(metavar="N")] = 1
    """Ranks that measure at the same time; with 2 the link between them is measured too."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write the rates to this file in place of the cache."""
    json: bool = False
    """Print the rates as one JSON object on stdout."""

    def run(self) -> int:
        """Measure here as one rank, or start the ranks and wait for them."""
        if not 1 <= self.processes <= 2:
            raise DeviceError(f"--processes must be 1, or 2 for the link between two ranks, got {self.processes}")
        if place := launched_place():
            return self._measure(place.world)
        self._require_place()
        if self.processes == 1:
            return self._measure(1)
        from fullframe.processes.launch import launch

        words_of_rank = ["-m", "fullframe.cli", "calibrate", *words(self)]
        return launch(self.processes, words_of_rank, on_failure=said_of_failure(self.json))

    def _require_place(self) -> None:
        """Raises RunError, before the time is spent, where the rates could not be written."""
        from fullframe.simulation.devices.calibration import calibration_path

        path = self.out or calibration_path("any")
        with writing(path, "--out"):
            path.parent.mkdir(parents=True, exist_ok=True)
        require_writable(path, "--out")

    def _measure(self, ranks: int) -> int:
        import torch
        import torch.distributed as dist

        from fullframe.ranks.mesh import init_mesh
        from fullframe.simulation.clock.measured_host import measured_host
        from fullframe.simulation.devices.calibration import calibration_path, measure, store_rates
        from fullframe.simulation.devices.link import with_link
        from fullframe.simulation.devices.table import name_of_gpu

        mesh = init_mesh(width=ranks)
        name, device = f"cpu-{ranks}-ranks", torch.device(mesh.device_type)
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            name = name_of_gpu(properties.name, properties.total_memory)
        _train_a_little(mesh)
        dist.barrier()  # so that the ranks share what they share in a run
        rates = measure(name, device)
        rates = with_link(rates, mesh) if ranks == 2 else rates
        rates = dataclasses.replace(rates, host=measured_host(f"measured on {rates.measured_on}, {rates.date}"))
        first = dist.get_rank() == 0
        dist.destroy_process_group()
        if first:
            with writing(self.out or calibration_path(name), "--out"):
                path = store_rates(rates, self.out)
            if self.json:
                print(rates.to_json())
            print("\n".join([*_lines(rates), f"wrote {path}"]), file=sys.stderr if self.json else sys.stdout)
        return 0


def _train_a_little(mesh: "DeviceMesh") -> None:
    """One small step: what it loads, a training process holds beside its tensors."""
    import torch
    from torch import nn

    from fullframe.model.parallelize import parallelize
    from fullframe.spatial.shard import shard
    from fullframe.strategy import Strategy
    from fullframe.training import loop  # noqa: F401
    from fullframe.training.loading.delivery import mesh_device
    from fullframe.training.step import TrainStep

    device = mesh_device(mesh)
    model = parallelize(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)).to(device), mesh)
    step = TrainStep(
        model,
        lambda model, frames: model(frames).square().mean(),
        torch.optim.AdamW(model.parameters()),
        Strategy(width=mesh.size()),
    )
    step(shard(torch.ones(2, 3, 32, 32, device=device), mesh))


def _lines(rates: "Rates") -> list[str]:
    lines = [f"{rates.device}: {rates.measured_on}"]
    for what in ("matmul", "convolution", "depthwise"):
        for dtype, points in getattr(rates, what).items():
            figures = ", ".join(f"{rate / 1e9:.3g}" for _, rate in points)
            lines.append(f"{what} {dtype}: {figures} x 1e9 operations a second, small to large")
    lines.append(f"copy: {', '.join(f'{rate / 1e9:.3g}' for _, rate in rates.copy)} x 1e9 bytes a second")
    lines.append(f"launch: {rates.launch_seconds * 1e6:.1f} microseconds")
    if rates.host is not None:
        names = ("function", "exchange", "reduction")
        figures = ", ".join(f"{name} {getattr(rates.host, f'{name}_seconds') * 1e6:.0f}" for name in names)
        lines.append(f"of the host beside its ops, on split tensors, microseconds: {figures}")
    for what, points in (("link", rates.link), ("all-reduce", rates.all_reduce)):
        if points:
            figures = ", ".join(f"{size / rate * 1e6:.0f} us for {size / 1024:.0f} KiB" for size, rate in points)
            lines.append(f"{what}: {figures}")
    return lines
