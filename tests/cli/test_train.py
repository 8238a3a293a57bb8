"""The command as a user runs it: ranks start by themselves, errors are one line, an end is clean."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fullframe.cli.application import run
from fullframe.ranks import device

ROOT = Path(__file__).parents[2]
RECIPE = """
import os, signal, sys, time
import torch
import fullframe as ff
from tests.training.tiny import recipe as job

def loss(model, batch):
    import tests.training.tiny as tiny
    {trouble}
    return tiny.loss(model, batch)

def recipe():
    return job(loss=loss, {changes})
"""


def written(folder: Path, trouble: str = "", changes: str = "") -> Path:
    path = folder / "job.py"
    path.write_text(RECIPE.format(trouble=trouble or "pass", changes=changes))
    return path


def environment() -> dict[str, str]:
    # Ranks must find `tests`; a run must not believe that it was started by torchrun.
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}


def fullframe(*arguments: object, python: tuple[str, ...] = ("-m", "fullframe.cli")) -> subprocess.CompletedProcess:
    command = [sys.executable, *python, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=250)


def steps_in(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_package_is_the_command():
    printed = fullframe("--version", python=("-m", "fullframe"))
    assert printed.returncode == 0 and printed.stdout.startswith("fullframe ")


def test_two_ranks_then_resume_under_torchrun(tmp_path):
    """With kernels that repeat themselves, on all ranks."""
    deterministic = "assert torch.are_deterministic_algorithms_enabled() and 'CUBLAS_WORKSPACE_CONFIG' in os.environ"
    recipe, run_dir = written(tmp_path, deterministic, changes="workers=1"), tmp_path / "run"
    options = ("--width", 2, "--deterministic", "--run-dir", run_dir)
    first = fullframe("train", recipe, *options, "--steps", 4, "--json")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert (result["step"], result["ranks"], result["run_dir"]) == (4, 2, str(run_dir))
    assert "4 steps on 2 ranks (data 1 x height 1 x width 2)" in first.stderr
    assert json.loads((run_dir / "strategy.json").read_text())["width"] == 2

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fullframe.cli")
    second = fullframe("train", recipe, *options, "--steps", 6, "--resume", python=torchrun)
    assert second.returncode == 0, second.stderr
    lines = second.stdout.splitlines()
    assert lines.count("resumed after step 4") == 1, "one rank speaks"
    assert re.fullmatch(r"step 6/6  loss \S+  \S+ s/step", lines[-3]), lines
    for done in (first.stderr, second.stdout):
        assert done.splitlines()[-1] == f"report: {run_dir}/report.html", "the last line, once"
        assert done.count("report.html") == 1
    assert steps_in(run_dir) == [1, 2, 3, 4, 5, 6]


def test_one_process_prints_plain_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", str(written(tmp_path)), "--processes", "1", "--steps", "2", "--log", "tensorboard"]
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"job-\d{8}-\d{6}", run_dir.name)
    assert lines[0].endswith(
        f"2 steps on 1 rank (data 1 x height 1 x width 1), on the CPU, writing runs/{run_dir.name}"
    )
    assert lines[-2:] == [
        f"wrote runs/{run_dir.name}/checkpoints/step-00000002",
        f"report: runs/{run_dir.name}/report.html",
    ]
    assert "2 steps" in (run_dir / "report.html").read_text()
    assert len(list((run_dir / "tensorboard").iterdir())) == 1
    assert not any("\x1b" in line for line in lines)
    assert run([*words, "--run-dir", str(run_dir)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "already holds a run" in said.err, "nothing is said to be written before"


MEASURED = """evaluate=lambda model, batch: {"score": (2.0, 1)}, best="score", evaluate_every=1,
               evaluation_data=lambda: __import__("tests.training.tiny").training.tiny.Frames(1)"""


def test_a_run_that_finds_nothing_better_ends(tmp_path, capsys):
    words = ["train", str(written(tmp_path, changes=MEASURED)), "--run-dir", str(tmp_path / "run"), "--processes", "1"]
    assert run([*words, "--steps", "9", "--patience", "2"]) == 0
    why = "2 evaluations in a row gave no better score than 2 (step 1)"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"stopped early after step 3: {why}",
        f"report: {tmp_path}/run/report.html",
    ]
    assert f"the run finished after step 3: stopped early: {why}" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "1", "--patience", "0"], "--patience must be at least 1, got 0"),
        (["--processes", "3", "--width", "2"], "3 processes are no multiple of height 1 x width 2 = 2; use 2 or 4"),
        (
            ["--processes", "1", "--height", "2"],
            "1 processes are no multiple of height 2 x width 1 = 2; use 2 processes",
        ),
        (["--processes", "4", "--data", "4", "--width", "2"], "= 8 is not the number of processes, 4"),
        (
            ["--processes", "3", "--depth", "2"],
            "3 processes are no multiple of depth 2 x height 1 x width 1 = 2; use 2 or 4",
        ),
        (["--width", "0"], "--width must be at least 1, got 0"),
        (["--depth", "0"], "--depth must be at least 1, got 0"),
        (["--stopped-code", "300"], "--stopped-code must be from 0 to 255, as all exit codes are, got 300"),
        (["--max-restarts", "-1"], "--max-restarts must be at least 0, got -1"),
        (["--processes", "2", "--resume"], "--resume needs --run-dir"),
        (["--processes", "2", "--auto-resume"], "--auto-resume needs --run-dir"),
        (["--processes", "2", "--resume", "--run-dir", "nothing"], "nothing holds no run to resume"),
        (["--processes", "2", "--resume", "--auto-resume", "--run-dir", "nothing"], "nothing holds no run to resume"),
    ],
)
def test_wrong_use_is_refused_before_any_rank_starts(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fullframe.processes.launch.launch", lambda *_: pytest.fail("ranks were started"))
    assert run(["train", str(written(tmp_path)), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1


def test_what_another_launcher_has_left_in_the_shell_is_told(tmp_path, capsys, monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert run(["train", str(written(tmp_path)), "--processes", "2", "--run-dir", str(tmp_path / "run")]) == 2
    said = "this is a rank already (RANK=3 and WORLD_SIZE=4 are set), and --processes is 2; unset both"
    assert said in capsys.readouterr().err


def test_tasks_of_srun_that_would_each_train_alone_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr("fullframe.processes.launch.launch", lambda *_: pytest.fail("ranks were started"))
    assert run(["train", str(written(tmp_path)), "--width", "2", "--run-dir", str(tmp_path / "run")]) == 2
    assert "error: this is one of 2 processes (SLURM_STEP_NUM_TASKS)" in capsys.readouterr().err


def test_a_step_that_never_comes_cannot_be_traced(tmp_path, capsys):
    words = ["train", str(written(tmp_path)), "--processes", "1", "--run-dir", str(tmp_path / "run")]
    assert run([*words, "--steps", "3", "--trace-step", "4"]) == 2
    said = "error: --trace-step 4 comes after the last step, 3; name one before\n"
    assert capsys.readouterr().err == said and not (tmp_path / "run").exists()


def test_ranks_are_started_with_depth(tmp_path, capsys, monkeypatch):
    started = []

    def launch(ranks, command, **_):
        started.append((ranks, " ".join(command)))
        return 0

    monkeypatch.setattr("fullframe.processes.launch.launch", launch)
    for options, mesh in (
        (["--depth", "2", "--width", "2"], "--data 1 --depth 2 --height 1 --width 2"),
        (["--depth", "2", "--processes", "4"], "--data 2 --depth 2 --height 1 --width 1"),
    ):
        assert run(["train", str(written(tmp_path)), "--run-dir", str(tmp_path / "run"), *options]) == 0
        ranks, words = started.pop()
        assert ranks == 4 and mesh in words, words


@pytest.mark.parametrize(("link", "name"), [("one.py", "one"), ("there/recipe.py", "there")])
def test_a_run_of_a_linked_recipe_is_named_as_the_link(tmp_path, capsys, monkeypatch, link, name):
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fullframe.processes.launch.launch", lambda ranks, words, **_: started.append(words) or 0)
    Path(link).parent.mkdir(exist_ok=True)
    Path(link).symlink_to(written(tmp_path))
    assert run(["train", link, "--width", "2"]) == 0
    assert started[0][started[0].index("--run-dir") + 1].startswith(f"runs/{name}-")
    assert run(["launch", link, "--on", "slurm", "--gpus-per-node", "2", "--width", "2", "--dry-run"]) == 0
    assert f"job-name={name}" in capsys.readouterr().out


def test_too_few_gpus_are_told_before_any_rank_starts(tmp_path, capsys, monkeypatch):
    words = ["train", str(written(tmp_path)), "--width", "2", "--run-dir", str(tmp_path / "run")]
    started = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("fullframe.processes.launch.launch", lambda ranks, *_, **__: started.append(ranks) or 0)
    monkeypatch.setattr(device, "count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"]))
    assert run(words) == 2 and not started
    text = "error: 2 ranks on this machine need 2 GPUs, it has 1; start 1, or all on the CPU"
    assert capsys.readouterr().err.startswith(text)
    assert run([*words, "--on-cpu"]) == 0 and started == [2]


def test_no_such_recipe(capsys):
    assert run(["train", "missing.py"]) == 2
    assert capsys.readouterr().err == "error: there is no recipe file missing.py; check the path\n"


def test_an_unknown_option_is_refused(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        run(["train", str(written(tmp_path)), "--wdith", "2"])
    assert stopped.value.code == 2


def test_help_and_version_load_no_torch():
    code = """
import sys
from fullframe.cli.application import run
assert run(["--version"]) == 0
for arguments in (["--help"], ["train", "--help"]):
    try:
        run(arguments)
    except SystemExit as stopped:
        assert stopped.code == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.match(r"fullframe \d+\.\d+\.\d+\n", done.stdout)
    survival = ("auto-resume", "check-every", "max-skipped", "hang-timeout", "max-restarts")
    for option in ("processes", "height", "width", "steps", "run-dir", "resume", "json", *survival):
        assert f"--{option}" in done.stdout


@pytest.fixture
def for_ranks(monkeypatch):
    """What ranks need that a launcher in this process starts."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def test_an_error_of_all_ranks_is_one_line(tmp_path, for_ranks, capfd):
    recipe = written(tmp_path, changes="batch_size=3")
    assert run(["train", str(recipe), "--data", "2", "--run-dir", str(tmp_path / "run")]) == 2
    text = "error: batch_size 3 (of the whole job) is no multiple of the 2 data replicas; use 2\n"
    assert capfd.readouterr().err == text


def test_an_exception_in_the_recipe_is_one_traceback(tmp_path, for_ranks, capfd):
    recipe = written(tmp_path, trouble='raise KeyError("no mask")')
    assert run(["train", str(recipe), "--width", "2", "--run-dir", str(tmp_path / "run")]) == 1
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyError: 'no mask'")
    assert f'File "{recipe}", line 9, in loss' in said


def test_what_is_refused_has_the_line_of_the_recipe_that_asked_for_it(tmp_path, capsys):
    recipe = written(tmp_path, trouble="ff.init_mesh(width=0)")
    assert run(["train", str(recipe), "--processes", "1", "--run-dir", str(tmp_path / "run")]) == 2
    error, where, line = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and "width" in error
    assert where == f'  File "{recipe}", line 9, in loss' and line == "    ff.init_mesh(width=0)"


def test_ctrl_c_ends_all_ranks_after_the_step(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "fullframe.cli", "train", written(tmp_path, "time.sleep(0.2)"), "--width", "2"]
    command += ["--steps", "1000", "--run-dir", run_dir]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        for line in process.stdout:
            if re.match(r"step +1/1000 ", line):
                break
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) == 2
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "")
    step = steps_in(run_dir)[-1]
    assert step < 1000
    assert output.splitlines()[-3:] == [
        f"wrote {run_dir}/checkpoints/step-{step:08d}",
        f"stopped after step {step} by SIGINT; go on with --resume",
        f"report: {run_dir}/report.html",
    ]
    assert not any(rank.is_running() for rank in ranks)


def test_what_the_recipe_prints_is_no_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path)
    path.write_text("print('hello')\n" + path.read_text())
    assert run(["train", str(path), "--processes", "1", "--steps", "1", "--json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["step"] == 1 and "hello" in found.err
