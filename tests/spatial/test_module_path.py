"""Which module runs, read off the stack."""

import sys
import threading

import torch
from torch import Tensor, nn

from fullframe.spatial.module_path import module_path


class Says(nn.Module):
    def __init__(self, said: list[str]):
        super().__init__()
        self.said = said

    def forward(self, x: Tensor) -> Tensor:
        self.said.append(module_path())
        return x


class Outer(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_the_innermost_module_by_its_path_from_the_outermost() -> None:
    said: list[str] = []
    Outer(nn.ReLU(), Says(said))(torch.ones(1))
    Says(said)(torch.ones(1))
    assert said == ["blocks.1 (Says)", "Says"]
    assert module_path() == ""


def test_another_thread_s_module() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            go_on.wait(60)
            return x

    thread = threading.Thread(target=Outer(Waits()), args=(torch.ones(1),))
    thread.start()
    inside.wait(60)
    assert module_path(sys._current_frames()[thread.ident or 0]) == "blocks.0 (Waits)"
    go_on.set()
    thread.join()
