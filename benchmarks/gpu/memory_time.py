"""Real training steps against their simulation: bytes, and seconds of a step by the data sheet and by calibration."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff
from benchmarks.gpu.found import Found, device_of, wait_for
from benchmarks.networks import UNet, convnext_tiny
from benchmarks.planning import convnext_xl
from fullframe.ranks.mesh import init_mesh
from fullframe.simulation.devices.calibration import calibration_path
from fullframe.simulation.devices.table import name_of_gpu
from fullframe.simulation.simulate import simulate
from fullframe.training.session import assemble

_LARGE_BYTES = 60 * 2**30  # of a GPU that takes ConvNeXt-XL without recompute
_WARM, _TIMED = 2, 4
_BYTES_BOUND, _SECONDS_BOUND = 0.03, 0.15  # of the medians


class Frames(Dataset[dict[str, Tensor]]):
    """Noise."""

    def __init__(self, rows: int, columns: int, sample: Callable[[], dict[str, Tensor]] | None = None):
        self._image = {"image": torch.randn(3, rows, columns)} if sample is None else sample()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._image


def _features(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    out = model(batch["image"])
    if isinstance(out, Tensor):
        return out.float().square().mean()
    return out.last_hidden_state.float().square().mean() + out.pooler_output.float().tanh().mean()  # type: ignore[no-any-return]


def _recipe(model: Callable[[], nn.Module], rows: int, columns: int) -> ff.Recipe:
    return ff.Recipe(
        model=model,
        loss=_features,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
        data=lambda: Frames(rows, columns),
        batch_size=2,
    )


def cases(kind: str, memory_bytes: int) -> dict[str, tuple[ff.Recipe, ff.Strategy]]:
    """Recipes and strategies by name; on the CPU small ones."""
    small = kind == "cpu"
    unet = _recipe(lambda: UNet(8, 3), 64, 128) if small else _recipe(UNet, 768, 1536)
    convnext = _recipe(convnext_tiny, 64, 64) if small else _recipe(convnext_tiny, 768, 1536)
    found = {
        "UNet, fp32": (unet, ff.Strategy()),
        "UNet, bf16": (unet, ff.Strategy(precision="bf16")),
        "ConvNeXt-tiny, tf32": (convnext, ff.Strategy(precision="tf32")),
        "ConvNeXt-tiny, bf16": (convnext, ff.Strategy(precision="bf16")),
        "ConvNeXt-tiny, bf16, blocks": (convnext, ff.Strategy(precision="bf16", recompute="blocks")),
        "ConvNeXt-tiny, bf16, offload": (convnext, ff.Strategy(precision="bf16", offload=True)),
        "ConvNeXt-tiny, bf16, in backward": (convnext, ff.Strategy(precision="bf16", update_in_backward=True)),
    }
    if small:
        return dict(list(found.items())[:1])
    if memory_bytes > _LARGE_BYTES:  # 43.28 and 11.89 GiB by NVIDIA and NIO: docs of benchmarks/published
        frames = Frames(0, 0, convnext_xl.sample)
        large = dataclasses.replace(convnext_xl.recipe(), data=lambda: frames)
        found["ConvNeXt-XL, bf16"] = large, ff.Strategy(precision="bf16")
        found["ConvNeXt-XL, bf16, blocks"] = large, ff.Strategy(precision="bf16", recompute="blocks")
    # Last: torchao compiles it, for each shape of a parameter.
    found["ConvNeXt-tiny, bf16, adamw8bit"] = convnext, ff.Strategy(precision="bf16", optimizer="adamw8bit")
    return found


def memory_time(kind: str) -> Found:
    """Two steps by the simulator, in a process that sees no GPU; then real ones."""
    found, device = Found(), device_of(kind)
    memory = torch.cuda.get_device_properties(device).total_memory if kind != "cpu" else 0
    name = name_of_gpu(torch.cuda.get_device_name(device), memory) if kind != "cpu" else "cpu"
    predicted = _predicted(kind, name, memory)
    init_mesh()
    for case, (recipe, strategy) in cases(kind, memory).items():
        with found.trying(case):
            measured = _measured(recipe, strategy, device)
            row = {"case": case, **measured, **predicted[case]}
            for what in ("peak_bytes", "reserved_bytes"):
                if what in measured:
                    row[f"{what}_error"] = predicted[case][f"predicted_{what}"] / measured[what] - 1
            for what in ("seconds", "calibrated_seconds"):
                if f"predicted_{what}" in row:
                    row[f"{what}_error"] = row[f"predicted_{what}"] / measured["seconds"] - 1
            found.note(**row)
    for error, bound in (("peak_bytes_error", _BYTES_BOUND), ("calibrated_seconds_error", _SECONDS_BOUND)):
        errors = [abs(row[error]) for row in found.rows if error in row]
        if errors:
            found.note(case=f"median of |{error}|", value=median(errors))
            found.require(median(errors) <= bound, f"median of |{error}| is {median(errors):.3f}, more than {bound}")
    return found


def _measured(recipe: ff.Recipe, strategy: ff.Strategy, device: torch.device) -> dict[str, float]:
    is_cuda = device.type == "cuda"
    if is_cuda:
        gc.collect()  # the case before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    session, seconds = assemble(recipe, strategy, init_mesh()), []
    batches = iter(session.state.loader)
    for _ in range(_WARM + _TIMED):
        batch = next(batches)
        wait_for(device)
        started = time.perf_counter()
        session.step(batch)
        del batch
        wait_for(device)
        seconds.append(time.perf_counter() - started)
    row = {"seconds": median(seconds[_WARM:])}
    if is_cuda:
        free, total = torch.cuda.mem_get_info(device)
        row |= {
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "used_bytes": total - free,
        }
    return row


def _predicted(kind: str, device: str, memory_bytes: int) -> dict[str, dict[str, float]]:
    """By the data sheet, and, where `fullframe calibrate` was run before, by what it stored."""
    found: dict[str, dict[str, float]] = {}
    calibrated = calibration_path(device).is_file()
    with tempfile.TemporaryDirectory() as empty:
        for prefix, cache in (("", empty), ("calibrated_", os.environ.get("XDG_CACHE_HOME"))):
            if prefix and not calibrated:
                continue
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} | ({"XDG_CACHE_HOME": cache} if cache else {})
            words = [sys.executable, "-m", "benchmarks.gpu.memory_time", kind, device, str(memory_bytes)]
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the simulation failed: {done.stderr[-500:]}")
            for case, row in json.loads(done.stdout.splitlines()[-1]).items():
                kept = row if not prefix else {"seconds": row["seconds"]}
                found.setdefault(case, {}).update({f"predicted_{prefix}{what}": value for what, value in kept.items()})
    return found


def main(kind: str, device: str, memory_bytes: str) -> None:
    """Print what is predicted of every case."""
    rows = {}
    for case, (recipe, strategy) in cases(kind, int(memory_bytes)).items():
        predicted = simulate(recipe, strategy, device)
        rows[case] = {
            "peak_bytes": predicted.peak_bytes,
            "reserved_bytes": predicted.reserved_bytes,
            "seconds": predicted.step_seconds,
            "host_seconds": predicted.host_seconds,
        }
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
