"""Scripts of users on real ranks, started as torchrun would."""

import time
from pathlib import Path

import pytest

from fullframe.doctor.judgement.judge import judge
from fullframe.doctor.rehearsal.job import Outcome, rehearsal
from fullframe.doctor.rehearsal.rank import Request

HEAD = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEP = "    model(torch.randn(3, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
SCRIPTS = {
    "sound": (HEAD + "while True:\n" + STEP, []),
    "ends by itself": (HEAD + "for _ in range(2):\n" + STEP + "sys.exit(0)\n", []),
    "fails on one rank": (HEAD + "for n in range(4):\n" + STEP + "    if n == rank == 1: int('x')\n", ["FF336"]),
    "fails in torch": (HEAD + "model(torch.randn(3, 5))\n", ["FF336"]),
    "waits on one rank": (HEAD + "for n in range(4):\n" + STEP + "    if n == rank == 1: dist.barrier()\n", ["FF335"]),
    "is killed": (HEAD + "for n in range(4):\n" + STEP + "    if n == rank == 1: os.kill(os.getpid(), 9)\n", ["FF336"]),
    "has fewer batches": (HEAD + "for n in range(3 - rank):\n" + STEP, ["FF334"]),
}


def outcome(script: str, folder: Path, patience_seconds: float = 60.0) -> Outcome:
    program = folder / "script.py"
    program.write_text(script)
    (folder / "notes").mkdir()
    request = Request(program=str(program), folder=str(folder / "notes"), ranks=2, steps=4)
    (folder / "request.json").write_text(request.to_json())
    arguments = ["-m", "fullframe.cli.doctor.rank", str(folder / "request.json")]
    return rehearsal(request, arguments, patience_seconds=patience_seconds)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_run_until_enough_was_seen(name: str, tmp_path: Path) -> None:
    script, expected = SCRIPTS[name]
    found = outcome(script, tmp_path, patience_seconds=20.0 if "waits" in name else 60.0)
    findings = judge(found.whole, found.stacks, at_full_size=False)
    assert [finding.code for finding in findings] == expected
    if name == "fails on one rank":
        assert "ValueError on rank 1: invalid literal" in findings[0].message
        assert findings[0].path == str(tmp_path / "script.py") and findings[0].line == 12
    if name == "fails in torch":
        assert (findings[0].path, findings[0].line) == (str(tmp_path / "script.py"), 10)
        assert "model(torch.randn(3, 5))" in findings[0].evidence and "site-packages" not in findings[0].evidence
    if name == "waits on one rank":
        assert "script.py" in findings[0].evidence
    if name == "is killed":
        assert "SIGKILL" in findings[0].message


def test_a_clock_that_is_put_forward_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: hours)
    found = outcome(SCRIPTS["ends by itself"][0], tmp_path)
    assert not found.stacks and judge(found.whole, found.stacks, at_full_size=False) == []


@pytest.mark.slow  # cli/doctor/test_run.py has another fault in a script of one's own
def test_a_script_of_ones_own_with_a_fault(tmp_path: Path) -> None:
    script = HEAD.replace("DistributedDataParallel(nn.Linear(4, 2))", "nn.Linear(4, 2)") + (
        "torch.manual_seed(rank)\nwhile True:\n" + STEP
    )
    found = outcome(script, tmp_path)
    (finding,) = judge(found.whole, found.stacks, at_full_size=False)
    assert finding.code == "FF301" and "only Linear" in finding.evidence
