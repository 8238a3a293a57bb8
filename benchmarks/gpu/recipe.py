"""A small recipe that goes wrong as FAULT in the environment says: what `fullframe train` makes of that is measured."""

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff

_FAULT = os.environ.get("FAULT", "")
_ROWS, _COLUMNS, _CLASSES = 64, 128, 4


class Frames(Dataset[dict[str, Tensor]]):
    """Noise with a class a pixel; with FAULT=label one class too many in the fourth sample."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        target = torch.randint(0, _CLASSES, (_ROWS, _COLUMNS), generator=generator)
        if _FAULT == "label":
            target[0, 0] = _CLASSES
        return {"image": torch.randn(3, _ROWS, _COLUMNS, generator=generator), "target": target}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if _FAULT == "slow":
        time.sleep(0.2)
    return F.cross_entropy(model(batch["image"]).float(), batch["target"])


def _model() -> nn.Module:
    if _FAULT == "memory" and torch.cuda.is_available():
        wanted = float(os.environ["FAULT_BYTES"])
        torch.cuda.set_per_process_memory_fraction(wanted / torch.cuda.get_device_properties(0).total_memory)
    wide = int(os.environ.get("FAULT_CHANNELS", "8"))
    return nn.Sequential(nn.Conv2d(3, wide, 3, padding=1), nn.GELU(), nn.Conv2d(wide, _CLASSES, 3, padding=1))


def recipe() -> ff.Recipe:
    """What `fullframe train` asks for."""
    return ff.Recipe(
        model=_model,
        loss=_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        data=Frames,
        batch_size=8,
        steps=6,
    )
