"""The order of what is done with a GradScaler."""

from typing import Any

import torch
from torch import nn

from fullframe.doctor.probes.scaling import ScalerProbe


def order(enabled: bool) -> list[str]:
    said: list[str] = []
    probe = ScalerProbe(lambda action, scale, optimizer: said.append(action))
    weight = nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([weight], lr=0.1)
    with probe.attached():
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
    return said


def test_each_call_is_told_once_and_what_step_does_itself_is_not() -> None:
    assert order(enabled=True) == ["scale", "unscale", "clip", "step", "update"]


def test_a_scaler_that_is_off_says_nothing() -> None:
    assert order(enabled=False) == ["clip"]


def test_afterwards_torch_is_as_before() -> None:
    before = torch.amp.GradScaler.step, nn.utils.clip_grad_norm_
    order(enabled=True)
    assert (torch.amp.GradScaler.step, nn.utils.clip_grad_norm_) == before
