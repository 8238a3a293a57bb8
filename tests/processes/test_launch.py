"""What the launcher does when ranks end: it tells a failing machine from a failing job. The ranks are tiny scripts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fullframe.processes.launch import launch

START = """
import json, os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = sys.argv[1]
def say(text, code, **extra):
    details = {"py_callstack": text, "seconds": time.time(), **extra}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": text, "extraInfo": details}}, file)
    os._exit(code)
open(f"{folder}/{attempt}-{rank}", "w").write(os.environ["FULLFRAME_RESTART_REASON"])
"""


def run(folder: Path, script: str, ranks: int = 2, **options) -> int:
    """Launch ranks that run `script`; each leaves a file attempt-rank with the reason it was started for."""
    return launch(ranks, ["-c", START + script, str(folder)], **options)


def attempts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_ranks_get_what_torchrun_gives_them(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    script = f'open(f"{{folder}}/{{rank}}.json", "w").write(json.dumps([os.environ[name] for name in {names}]))'
    assert run(tmp_path, script, ranks=3) == 0
    for rank in range(3):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [str(rank), str(rank), "3", "3"]


def test_a_killed_rank_starts_all_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "os.kill(os.getpid(), signal.SIGKILL) if (rank, attempt) == (1, 0) else time.sleep(60 * (attempt == 0))"
    started = time.monotonic()
    assert run(tmp_path, script, restarts=3, progress=lambda: 7) == 0
    assert time.monotonic() - started < 20, "nobody waits for a rank that sleeps"
    assert attempts(tmp_path) == ["0-0", "0-1", "1-0", "1-1"]
    assert (tmp_path / "1-0").read_text() == "rank 1 died (SIGKILL)"
    assert capsys.readouterr().err == (
        "warning: rank 1 died (SIGKILL); all ranks start again from the last checkpoint (step 7 was done)\n"
    )


@pytest.mark.parametrize(("code", "shown"), [(2, "error: of the user"), (1, "KeyError")])
def test_an_error_of_the_job_is_final(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, shown: str
) -> None:
    script = f"""
if rank == 1:
    say({shown!r}, {code})
time.sleep(0.3)
say("lost the connection to rank 1", 75, consequence=True)
"""
    assert run(tmp_path, script, restarts=3) == code
    assert attempts(tmp_path) == ["0-0", "0-1"]
    assert capsys.readouterr().err == f"{shown}\n", "the cause is shown, not what it led to"


def test_attempts_without_progress_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [0, 5, 5, 9, 4, 9]  # before the first attempt, and when each of them fails
    assert run(tmp_path, "say('the machine failed', 75)", ranks=1, restarts=1, progress=lambda: steps.pop(0)) == 75
    assert attempts(tmp_path) == ["0-0", "1-0", "2-0", "3-0", "4-0"]
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "the machine failed",
        "error: 2 attempts in a row got no further than step 9; giving up",
    ]


def test_an_end_that_changes_something_is_not_in_vain(tmp_path: Path) -> None:
    script = "say('cut finer', 75, changed=True) if attempt < 3 else None"
    assert run(tmp_path, script, ranks=1, restarts=1) == 0
    assert len(attempts(tmp_path)) == 4


def test_without_restarts_a_dead_rank_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "print('out of memory, say', file=sys.stderr); os.abort()"
    assert run(tmp_path, f"if rank: {script}") == 1
    assert capsys.readouterr().err == "error: rank 1 died (SIGABRT)\nout of memory, say\n"
    assert attempts(tmp_path) == ["0-0", "0-1"]


def test_an_abort_is_what_came_of_an_error_that_was_there_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NCCL's thread aborts a rank that lost another."""
    (tmp_path / "led to").mkdir()
    (tmp_path / "came first").mkdir()
    script = "say('IndexError: of the recipe', 1) if rank else (time.sleep(0.8), os.abort())"
    assert run(tmp_path / "led to", script, restarts=3) == 1
    assert attempts(tmp_path / "led to") == ["0-0", "0-1"]
    assert capsys.readouterr().err == "IndexError: of the recipe\n"
    script = "(time.sleep(0.8), say('broken pipe', 1)) if rank else os.abort()"
    assert run(tmp_path / "came first", f"if attempt == 0: {script}", restarts=3) == 0
    assert (tmp_path / "came first" / "1-0").read_text() == "rank 0 died (SIGABRT)"


def test_an_abort_for_what_a_kernel_complains_of_is_final(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "terminate called: CUDA error: device-side assert triggered"
    assert run(tmp_path, f"if rank: print({said!r}, file=sys.stderr); os.abort()", restarts=3) == 1
    assert attempts(tmp_path) == ["0-0", "0-1"]
    assert capsys.readouterr().err == f"error: rank 1 died (SIGABRT)\n{said}\n"


def test_what_a_rank_leaves_running_is_killed(tmp_path: Path) -> None:
    script = """
import subprocess
if rank:
    child = subprocess.Popen(["sleep", "60"])
    open(f"{folder}/child", "w").write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(tmp_path, script) == 1
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)


def signalled(tmp_path: Path, script: str, *numbers: int, patience_seconds: float = 60.0) -> int:
    """The exit code of a launch that gets these signals, half a second apart, once its rank is there."""

    def send() -> None:
        while not attempts(tmp_path):
            time.sleep(0.01)
        for number in numbers:
            time.sleep(0.5)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        return run(tmp_path, script, ranks=1, restarts=3, patience_seconds=patience_seconds)
    finally:
        thread.join()


ENDS_WELL = "signal.signal(signal.{0}, lambda *_: os._exit({1})); time.sleep(60)"


@pytest.mark.parametrize(("name", "seen", "code"), [("SIGUSR1", "SIGUSR1", 0), ("SIGHUP", "SIGTERM", 0)])
def test_a_request_to_stop_is_handed_on(tmp_path: Path, name: str, seen: str, code: int) -> None:
    assert signalled(tmp_path, ENDS_WELL.format(seen, code), signal.Signals[name]) == code
    assert attempts(tmp_path) == ["0-0"], "a job that was asked to stop does not start again"


def test_ctrl_c_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "once").mkdir()
    (tmp_path / "twice").mkdir()
    assert signalled(tmp_path / "once", ENDS_WELL.format("SIGINT", 130), signal.SIGINT) == 130
    assert capsys.readouterr().err == ""
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    started = time.monotonic()
    assert signalled(tmp_path / "twice", deaf, signal.SIGINT, signal.SIGINT) == 130
    assert time.monotonic() - started < 20
    assert capsys.readouterr().err == "stopped at once; what was done since the last checkpoint is lost\n"


def test_patience_ends(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    started = time.monotonic()
    assert signalled(tmp_path, deaf, signal.SIGTERM, patience_seconds=1.0) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 20


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    rank = """
from fullframe.processes.orphans import die_with_launcher
die_with_launcher()
open(f"{folder}/ready-{rank}", "w")
time.sleep(60)
"""
    code = (
        f"from tests.processes.test_launch import run; from pathlib import Path; run(Path({str(tmp_path)!r}), {rank!r})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], env=environment)
    try:
        while not {"ready-0", "ready-1"} <= set(attempts(tmp_path)):
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        assert len(ranks) == 2
    finally:
        launcher.kill()
        launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
