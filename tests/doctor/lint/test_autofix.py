"""What is mended, and that nothing else is touched."""

import sys

import pytest

from fullframe.doctor.lint.autofix import FIXES, mended
from fullframe.doctor.lint.catalog import RULES
from fullframe.doctor.lint.check import check_source
from fullframe.errors import LintError
from tests.doctor.lint.samples import training

IMPORTS = "import torch, torch.nn as nn\nimport torch.nn.functional as F  # kept  as it is\n"
CHECKPOINT = "from torch.utils.checkpoint import checkpoint\n"

CASES = [
    ("FF101", training("total += loss  # a comment", "total = 0\n"), "total += loss.detach()  # a comment"),
    (
        "FF101",
        training("s.total += out.loss", "class S:\n    total = 0\n\n\ns = S()\n"),
        "s.total += out.loss.detach()",
    ),
    ("FF102", training("losses.append(loss)", "losses = []\n"), "losses.append(loss.detach())"),
    ("FF102", training("'größe'; losses.append(loss)", "losses = []\n"), "'größe'; losses.append(loss.detach())"),
    ("FF151", CHECKPOINT + "y = checkpoint(f, x)\n", "checkpoint(f, x, use_reentrant=False)"),
    ("FF151", CHECKPOINT + "y = checkpoint(\n    f,\n    x,\n)\n", "use_reentrant=False"),
    ("FF151", CHECKPOINT + "y = checkpoint(f, x).sum()\n", "y = checkpoint(f, x, use_reentrant=False).sum()"),
    ("FF156", "def f(o):\n    o(1).zero_grad(set_to_none=False)\n", "o(1).zero_grad()"),
    ("FF156", "def f(o):\n    o.zero_grad(False)\n", "o.zero_grad()"),
    ("FF156", "def f(o):\n    o.step()\n    o.zero_grad(set_to_none = False)\n", "o.zero_grad()"),
    ("FF194", "nn.utils.clip_grad_norm(ps, 1.0)\n", "nn.utils.clip_grad_norm_(ps, 1.0)"),
    ("FF194", "n = nn.utils.clip_grad_norm(ps, 1.0).item()\n", "n = nn.utils.clip_grad_norm_(ps, 1.0).item()"),
]

UNSURE = [
    ("FF101", training("total += loss * 2", "total = 0\n")),
    ("FF101", training("total = total + loss", "total = 0\n")),
    ("FF102", training("log.append({'loss': loss})", "log = []\n")),
    ("FF194", "from torch.nn.utils import clip_grad_norm\nclip_grad_norm(ps, 1.0)\n"),
    ("FF194", "F.upsample(x, scale_factor=2)\n"),
    ("FF131", training().replace("    optimizer.zero_grad()\n", "")),
]


def findings(source: str, code: str) -> list:
    return check_source(source, "a.py", [RULES[code]])


@pytest.mark.parametrize(("code", "source", "expected"), CASES)
def test_a_remedy_is_applied_and_nothing_is_found_afterwards(code: str, source: str, expected: str) -> None:
    source = IMPORTS + source
    found = findings(source, code)
    assert found
    new, done = mended(source, found)
    assert expected in new and done == found and findings(new, code) == []
    assert len(set(new.splitlines()) - set(source.splitlines())) == 1, "one line is another one"


@pytest.mark.parametrize(("code", "source"), UNSURE)
def test_what_is_not_sure_is_left(code: str, source: str) -> None:
    source = IMPORTS + source
    found = findings(source, code)
    assert found and mended(source, found) == (source, [])


def test_every_remedy_is_tested() -> None:
    assert {code for code, *_ in CASES} == set(FIXES)


def test_without_libcst_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    with pytest.raises(LintError, match=r"fullframe\[autofix\]"):
        mended("", [])
