"""The CUDA-like device: what it must notice, and that its numbers are the CPU's."""

import threading
from typing import Any

import torch
import torch.nn.functional as F

from tests.cuda_like.device import NAME, Counts, counted, to_device, to_host
from tests.cuda_like.ranks import device_ranks


def _on_one(question: Any) -> Any:
    return device_ranks().run(question)[0]


def _trained() -> tuple[bool, bool, dict[str, int]]:
    torch.manual_seed(0)
    image, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
    here = to_device(weight)
    F.conv2d(image, weight).relu().square().mean().backward()
    with torch.autograd.set_multithreading_enabled(True), counted() as counts:
        F.conv2d(to_device(image), here).relu().square().mean().backward()
    assert weight.grad is not None and here.grad is not None
    elsewhere = bool(counts.threads - {threading.get_ident()})
    return torch.equal(weight.grad, to_host(here.grad)), elsewhere, dict(counts.kernels)


def test_backward_runs_in_a_thread_of_the_device_and_gives_the_cpus_numbers() -> None:
    equal, elsewhere, kernels = _on_one(_trained)
    assert equal and elsewhere
    assert kernels["convolution"] == kernels["convolution_backward"] == kernels["relu"] == 1


def _waits() -> list[tuple[str, int]]:
    x = to_device(torch.arange(4.0))
    found = []
    for wait in (
        lambda: x.sum().item(), lambda: x.tolist(), lambda: x.cpu(), lambda: torch.tensor([1.0], device=NAME),
        lambda: torch.as_tensor(3, device=NAME), lambda: torch.ones(2).to(NAME), lambda: x[x > 1], lambda: x.nonzero(),
        lambda: x[torch.tensor([1, 2])], lambda: bool(x.isfinite().all()), lambda: x.copy_(torch.ones(4)),
        lambda: torch.empty(4).copy_(x), lambda: torch.full((), 3, device=NAME), lambda: x[1:] * 2 + x.new_zeros(3),
        lambda: x.view(2, 2).t().contiguous().sum(0), lambda: x[x.argsort()], lambda: torch.equal(x, x),
    ):  # fmt: skip
        with counted() as counts:
            wait()
        found.append(("".join(why for why, _ in counts.waits), counts.waits.total()))
    return found


def test_waits_of_the_host_are_counted() -> None:
    assert _on_one(_waits) == [
        ("_local_scalar_dense", 1), ("tolist", 1), ("copy to the host", 1), ("copy to the device", 1),
        ("copy to the device", 1), ("copy to the device", 1), ("a mask as an index", 1), ("nonzero", 1),
        ("copy to the device", 1), ("_local_scalar_dense", 1), ("copy to the device", 1),
        ("copy to the host", 1), ("", 0), ("", 0),
        ("", 0), ("", 0), ("equal", 1),
    ]  # fmt: skip


def _line() -> tuple[str, str, bool]:
    with counted() as counts:
        to_device(torch.ones(1)).item()
    ((_, line),) = counts.waits
    return line.path.rpartition("/")[2], line.function, line.ours


def test_a_wait_has_its_line() -> None:
    assert _on_one(_line) == ("test_device.py", "_line", False)


def _faults() -> list[int]:
    x, here = to_device(torch.ones(3)), torch.ones(3)
    found = []
    for meeting in (lambda: x + here, lambda: x @ here, lambda: torch.cat([x, here]), lambda: x * torch.tensor(2.0),
                    lambda: x[torch.tensor([0])], lambda: torch.index_select(x, 0, torch.tensor([0]))):  # fmt: skip
        with counted() as counts:
            meeting()
        found.append(len(counts.faults))
    return found


def test_tensors_of_two_devices_do_not_meet() -> None:
    assert _on_one(_faults) == [1, 1, 1, 0, 0, 1]


def _kernels() -> list[int]:
    x = to_device(torch.ones(4, 4))
    ops = (
        lambda: x.view(16), lambda: x.t()[1:], lambda: x.new_empty(3), lambda: x + 1, lambda: x.mm(x),
        lambda: torch.zeros(3, device=NAME), lambda: x.t().contiguous(), lambda: torch.arange(3, device=NAME),
        lambda: x.t_().add_(1),
    )  # fmt: skip
    return [_count(op).kernels.total() for op in ops]


def _count(op: Any) -> Counts:
    with counted() as counts:
        op()
    return counts


def test_kernels_are_counted_and_views_are_not() -> None:
    assert _on_one(_kernels) == [0, 0, 0, 1, 1, 1, 1, 1, 1]
