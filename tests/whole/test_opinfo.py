"""Torch's op database on two ranks: a twentieth in `make test`, a third in `make slow`.

`python -m tests.whole.opinfo` runs all of it on four meshes.
"""

import time
import zlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rank_group import rank_group
from tests.whole import opinfo, verdicts
from tests.whole.opinfo import FAULTS, Result, every_name, run
from tests.whole.report import summary
from tests.whole.verdicts import run_chunk

SAMPLES = 1
EXACT_SHARE = 0.65  # of the ops with an image-like sample; docs/ops.md says what that is


@pytest.mark.timeout(600)
@pytest.mark.parametrize("parts", [20, pytest.param(3, marks=pytest.mark.further)])
def test_ops_and_modules_are_exact_or_refused(parts: int) -> None:
    results = run([name for name in every_name() if zlib.crc32(name.encode()) % parts == 0], (1, 2), SAMPLES)
    faults = [result for result in results if result.verdict in FAULTS]
    # A rank died once in a case that has always passed; thousands of torch's kernels had run in it. Fresh ranks decide.
    died = {fault.entry for fault in faults if fault.verdict == "hang"}
    again = run(sorted(died), (1, 2), SAMPLES) if died else []
    faults = [fault for fault in faults if fault.verdict != "hang"] + [r for r in again if r.verdict in FAULTS]
    assert not faults, "\n".join(f"{r.verdict}: {r.text} {r.case}: {r.detail}" for r in faults)
    assert all(rank_group(2).run(_sets_a_flag)), "the ranks are as other tests find them"
    kinds = summary(results)["kinds"]
    assert kinds["exact"] >= EXACT_SHARE * sum(kinds.values()), kinds


def _sets_a_flag() -> bool:
    torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic
    return True


def _sabotaged(*chunk: Any) -> None:
    """A chunk where some functions have rules of the kinds of fault that the suite is there to see."""
    import fullframe.spatial.rules.catalog  # noqa: F401  which fills the registry
    from fullframe.spatial.rules.registry import QUICK, RULES, Unsupported
    from fullframe.spatial.tensor import wrap

    rank = torch.distributed.get_rank()
    rules = {
        torch.neg: lambda func, x: wrap(func(x.local) * (1 + 1e-8), x.spec),
        torch.sin: lambda func, x: wrap(func(x.local.detach()), x.spec),
        torch.tan: lambda func, x: _raise(ValueError("of one rank") if rank else Unsupported("of the other")),
        torch.cos: lambda func, x: _raise(AttributeError("of all ranks")),
        torch.exp: lambda func, x: wrap(func(x.local.zero_()), x.spec),
        torch.erf: lambda func, x: time.sleep(1000) if rank else x,
        torch.abs: lambda func, x: wrap(func(x.local).float(), x.spec),
    }
    kept, limit = {function: RULES[function] for function in rules}, verdicts.STALLED_SECONDS
    quick = {function: QUICK.pop(function) for function in rules if function in QUICK}
    RULES.update(rules)
    verdicts.STALLED_SECONDS = 5.0
    try:
        run_chunk(*chunk)
    finally:
        RULES.update(kept)
        QUICK.update(quick)
        verdicts.STALLED_SECONDS = limit


def _raise(error: BaseException) -> Tensor:
    raise error


@pytest.mark.further
@pytest.mark.timeout(600)
def test_the_suite_sees_every_kind_of_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opinfo, "MOST_HANGS", 1)
    wanted = {"neg": "wrong", "sin": "wrong", "tan": "disagree", "cos": "foreign", "exp": "wrong", "erf": "hang",
              "abs": "wrong", "sqrt": "exact"}  # fmt: skip
    results = run([*wanted], (1, 2), 1, work=_sabotaged)
    for name, verdict in wanted.items():
        functions = [r for r in results if r.entry == name and _is_plain(r)]
        assert Counter(r.verdict for r in functions)[verdict] == len(functions) > 0, functions


def _is_plain(result: Result) -> bool:
    case = result.case
    return (case["call"], case["dtype"], case["values"], case["gather"]) == ("function", "float64", "given", False)
