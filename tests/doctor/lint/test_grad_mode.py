"""Where autograd is on."""

import pytest

from fullframe.doctor.lint.grad_mode import grad_within
from tests.doctor.lint.test_values import stored


@pytest.mark.parametrize(
    ("source", "grad"),
    [
        ("x = f()", True),
        ("with torch.no_grad():\n    x = f()", False),
        ("with torch.inference_mode():\n    x = f()", False),
        ("with torch.inference_mode(False):\n    x = f()", True),
        ("with torch.no_grad(), torch.autocast('cuda'):\n    x = f()", False),
        ("with torch.no_grad():\n    with torch.enable_grad():\n        x = f()", True),
        ("c = torch.no_grad()\nwith c:\n    x = f()", False),
        ("with torch.set_grad_enabled(False):\n    x = f()", False),
        ("with torch.set_grad_enabled(mode):\n    x = f()", None),
        ("with (torch.no_grad() if a else torch.enable_grad()):\n    x = f()", None),
        ("with anything():\n    x = f()", None),
        ("with open(p) as p:\n    x = f()", True),
        ("torch.set_grad_enabled(False)\nx = f()", False),
        ("@torch.no_grad()\ndef g():\n    x = f()\ng()", False),
        ("@torch.inference_mode\ndef g():\n    x = f()\ng()", False),
        ("def g():\n    x = f()\nwith torch.no_grad():\n    g()", False),
        ("with torch.no_grad():\n    y = f()\nx = f()", True),
    ],
)
def test_where_autograd_is_off(source: str, grad: bool | None) -> None:
    assert stored("import torch\n" + source, "x").grad is grad


def test_an_unknown_context_leaves_nothing_known() -> None:
    assert grad_within(stored("x = f()", "x"), True) is None
    assert grad_within(stored("import torch\nx = torch.profiler.profile()", "x"), False) is False
