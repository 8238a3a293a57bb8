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
from tests.processes.test_rank_processes import runs

START = """
import json, os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = sys.argv[1]
def say(text, code, **extra):
    details = {"py_callstack": text, "seconds": time.time(), **extra}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": text, "extraInfo": details}}, file)
    os._exit(code)
def wait_for(*names):
    while not all(os.path.exists(f"{folder}/{name}") for name in names):
        time.sleep(0.01)
open(f"{folder}/{attempt}-{rank}", "w").write(os.environ["FULLFRAME_RESTART_REASON"])
first, here = rank - int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
wait_for(*(f"{attempt}-{first + other}" for other in range(here)))  # who has not begun when another ends leaves nothing
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that does not wait long for what ranks that sleep might say."""
    monkeypatch.setattr("fullframe.processes.launch.CONSEQUENCE_SECONDS", 0.3)


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


@pytest.mark.usefixtures("impatient")
def test_a_killed_rank_starts_all_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Who waits for the rank that sleeps waits longer than a test may take.
    script = "os.kill(os.getpid(), signal.SIGKILL) if (rank, attempt) == (1, 0) else time.sleep(1000 * (attempt == 0))"
    between: list[tuple[bool, list[str]]] = []
    looks = {"before_restart": lambda is_asked_to_stop: between.append((is_asked_to_stop(), attempts(tmp_path)))}
    assert run(tmp_path, script, restarts=3, progress=lambda: 7, **looks) == 0
    assert between == [(False, ["0-0", "0-1"])], "once, when the ranks have ended"
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


def test_a_rank_that_just_leaves_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = """
if rank == 1:
    os._exit(0)
time.sleep(0.3)
say("lost the connection to rank 1", 75, consequence=True)
"""
    assert run(tmp_path, script, restarts=3) == 1
    assert attempts(tmp_path) == ["0-0", "0-1"], "another attempt would meet it again"
    said = capsys.readouterr().err
    assert said.startswith("error: rank 1 ended by itself, with exit code 0, while the others went on")


def test_attempts_without_progress_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [0, 5, 5, 9, 4, 9]  # before the first attempt, and when each of them fails
    assert run(tmp_path, "say('the machine failed', 75)", ranks=1, restarts=1, progress=lambda: steps.pop(0)) == 75
    assert attempts(tmp_path) == ["0-0", "1-0", "2-0", "3-0", "4-0"]
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "the machine failed",
        "error: 2 attempts in a row got no further than step 9; giving up",
    ]
    (tmp_path / "killed").mkdir()
    assert run(tmp_path / "killed", "os.kill(os.getpid(), signal.SIGKILL)", ranks=1, restarts=1) == 75, "alike"


def test_an_end_that_changes_something_is_not_in_vain(tmp_path: Path) -> None:
    script = "say('cut finer', 75, changed=True) if attempt < 3 else None"
    assert run(tmp_path, script, ranks=1, restarts=1) == 0
    assert len(attempts(tmp_path)) == 4


@pytest.mark.usefixtures("impatient")
def test_whoever_keeps_the_run_is_told_why_it_ended(tmp_path: Path) -> None:
    told: list[str] = []
    kill = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(1000)"
    for name, script, options in (
        ("killed", kill, {}),
        ("in vain", kill, {"restarts": 1}),
        ("error", "say('trouble', 2, summary='trouble')", {}),
        ("done", "pass", {}),
    ):
        (tmp_path / name).mkdir()
        run(tmp_path / name, script, on_failure=told.append, **options)  # type: ignore[arg-type]
    assert told[:2] == ["rank 1 died (SIGKILL)"] * 2
    assert len(told) == 3 and told[2] in ("rank 0: trouble", "rank 1: trouble")


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
    script = """
if rank:
    say("IndexError: of the recipe", 1)
while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].replace("rank-0", "rank-1")):
    time.sleep(0.01)
os.abort()
"""
    assert run(tmp_path / "led to", script, restarts=3) == 1
    assert attempts(tmp_path / "led to") == ["0-0", "0-1"]
    assert capsys.readouterr().err == "IndexError: of the recipe\n"
    # The launcher counts an abort from when it sees it: until then there is a process of that number.
    script = """
if (rank, attempt) == (0, 0):
    open(f"{folder}/pid.partial", "w").write(str(os.getpid()))
    os.rename(f"{folder}/pid.partial", f"{folder}/pid")
    os.abort()
if attempt == 0:
    wait_for("pid")
    while os.path.exists("/proc/" + open(f"{folder}/pid").read()):
        time.sleep(0.01)
    time.sleep(0.3)
    say("broken pipe", 1)
"""
    assert run(tmp_path / "came first", script, restarts=3) == 0
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
    child = subprocess.Popen(["sleep", "1000"])
    open(f"{folder}/child", "w").write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(tmp_path, script) == 1
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 60
    while runs(child):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)


def signalled(tmp_path: Path, script: str, *numbers: int, patience_seconds: float = 60.0) -> int:
    """The exit code of a launch that gets these signals, each once its rank has made a file for it: 1, 2, ..."""
    ended = threading.Event()

    def send() -> None:
        for count, number in enumerate(numbers, 1):
            while not (tmp_path / str(count)).exists():
                if ended.wait(0.01):
                    return
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        return run(tmp_path, script, ranks=1, restarts=3, patience_seconds=patience_seconds)
    finally:
        ended.set()
        thread.join()


def on_signal(name: str, action: str) -> str:
    """A script that does this; it takes many short naps, as a signal just before a long one waits for its end."""
    return (
        f"signal.signal(signal.{name}, lambda *_: {action})"
        + """
open(f"{folder}/1", "w")
while True:
    time.sleep(0.05)
"""
    )


DEAF = "open(f'{folder}/2', 'w')"


@pytest.mark.parametrize(("name", "seen", "code"), [("SIGUSR1", "SIGUSR1", 0), ("SIGHUP", "SIGTERM", 0)])
def test_a_request_to_stop_is_handed_on(tmp_path: Path, name: str, seen: str, code: int) -> None:
    assert signalled(tmp_path, on_signal(seen, f"os._exit({code})"), signal.Signals[name]) == code
    assert attempts(tmp_path) == ["0-0", "1"], "a job that was asked to stop does not start again"


def test_ctrl_c_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "once").mkdir()
    (tmp_path / "twice").mkdir()
    assert signalled(tmp_path / "once", on_signal("SIGINT", "os._exit(130)"), signal.SIGINT) == 130
    assert capsys.readouterr().err == ""
    assert (
        signalled(tmp_path / "twice", on_signal("SIGINT", DEAF), signal.SIGINT, signal.SIGINT, patience_seconds=1000.0)
        == 130
    )
    assert capsys.readouterr().err == "stopped at once, without writing a checkpoint\n"


def test_patience_ends(tmp_path: Path) -> None:
    deaf = on_signal("SIGTERM", DEAF)
    assert signalled(tmp_path, deaf, signal.SIGTERM, patience_seconds=1.0) == 128 + signal.SIGTERM


@pytest.mark.parametrize("asks", ["before", "after"])
def test_ranks_die_with_a_launcher_that_is_killed(asks: str, tmp_path: Path) -> None:
    """Also where it is killed while they still load what asks the kernel for that."""
    ready = 'open(f"{folder}/ready-{rank}", "w")'
    loading = f"{ready}\nwhile os.getppid() == launcher: time.sleep(0.05)" if asks == "after" else ""
    rank = f"""
launcher = os.getppid()
from fullframe.processes.orphans import die_with_launcher
{loading}
die_with_launcher()
{ready}
time.sleep(1000)
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
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
