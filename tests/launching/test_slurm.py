"""The batch script: as people will read it (golden files), and run by bash with whatever names users think of."""

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullframe.errors import LaunchError
from fullframe.launching.job import Job, RunOfJob, runs_of
from fullframe.launching.slurm import SlurmOptions, _seconds, ids_of, script_of, submit

JOB = Job(
    name="depth",
    folder=Path("/data/runs/depth"),
    directory=Path("/home/me"),
    options=("recipe.py", "--width", "2"),
    runs=(RunOfJob(place=".", values=()),),
    nodes=2,
    gpus_per_node=4,
    cpus_per_node=None,
    python="/usr/bin/python3",
)

# Stands in for srun: keeps its words, each ended by a zero byte, which no word can have.
SRUN = '#!/bin/bash\nprintf "%s\\0" "$PWD" "$@" >> "$KEPT"\nexit "${CODE:-0}"\n'
SCONTROL = '#!/bin/bash\necho "$@" >> "$ASKED"\n[ "$1" = show ] && echo "   JobState=$STATE Reason=None"\nexit 0\n'


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with programs in place of Slurm's."""
    folder = tmp_path_factory.mktemp("tools")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sleep", "#!/bin/bash\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def ran(script: str, tools: Path, folder: Path, **environment: str) -> tuple[int, list[str], list[str]]:
    """The exit code of the script in bash, what srun was given after where it ran, and what scontrol was asked."""
    kept, asked = folder / "kept", folder / "asked"
    kept.unlink(missing_ok=True)
    asked.unlink(missing_ok=True)
    own = {"PATH": f"{tools}:{os.environ['PATH']}", "KEPT": str(kept), "ASKED": str(asked), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=script.encode(), env=own | environment, cwd=folder, capture_output=True)
    words = os.fsdecode(kept.read_bytes()).split("\0")[:-1] if kept.exists() else []
    return done.returncode, words, asked.read_text().splitlines() if asked.exists() else []


NASTY = ["$(touch pwned)", "`touch pwned`", "; touch pwned", "' ; touch pwned '", '"; touch pwned; "', "&& touch pwned",
         "\n touch pwned \n", "#", "$HOME", "${PATH}", "*", "~", "!!", "\\", "\t", "-", "--", "|", ">pwned", "%j", "é",
         "\x1b[0m",          "a b", "$'\\n'", "\r", "esac", ";;", "EOF"]  # fmt: skip
ODD = st.lists(st.sampled_from(NASTY) | st.text(st.characters(codec="utf-8", exclude_characters="\0/")), min_size=1)
WORD = ODD.map("".join)


@settings(max_examples=150)
@given(words=st.lists(WORD, max_size=4), values=st.lists(WORD, min_size=2, max_size=3, unique=True), place=WORD)
def test_nothing_that_a_user_names_is_code(
    tools: Path, tmp_path_factory: pytest.TempPathFactory, words: list[str], values: list[str], place: str
) -> None:
    top = tmp_path_factory.getbasetemp() / "odd"
    directory = top / f"d{place}"[:60]
    directory.mkdir(parents=True, exist_ok=True)
    runs = tuple(RunOfJob(place=f"{i}{value}", values=(f"v={value}", value)) for i, value in enumerate(values))
    job = replace(
        JOB, directory=directory, folder=top / f"f{place}", options=("r;.py", *words), runs=runs, python=f"p{place}"
    )
    script = script_of(job, SlurmOptions())
    for task, run in enumerate(runs):
        code, got, _ = ran(script, tools, top, SLURM_ARRAY_TASK_ID=str(task))
        expected = ["--kill-on-bad-exit=0", job.python, "-m", "fullframe.cli", "train", "r;.py", *words, "--nodes", "2"]
        expected += ["--run-dir", f"{job.folder}/{run.place}", "--auto-resume", "--stopped-code", "85"]
        assert (code, got) == (0, [str(directory), *expected, "--set", *run.values])
    assert not list(top.rglob("pwned"))


@pytest.mark.parametrize("name", ["name", "time", "partition", "account", "qos", "after", "extra", "extra mem="])
@pytest.mark.parametrize("value", ["a b", "a\n#SBATCH --uid=0", "x;y", "`id`", "$(id)", "'a'"])
def test_what_slurm_would_read_wrongly_is_refused(name: str, value: str) -> None:
    job = replace(JOB, name=value) if name == "name" else JOB
    name, _, option = name.partition(" ")
    given = {} if name == "name" else {name: (option + value,) if name in ("after", "extra") else value}
    with pytest.raises(LaunchError, match=r"characters|no option of sbatch"):
        script_of(job, SlurmOptions(**given))


def test_a_limit_is_read_as_slurm_reads_it() -> None:
    day = 24 * 3600
    for limit, wanted in {"30": 1800, "30:15": 1815, "1:00:05": 3605, "2-3": 2 * day + 3 * 3600}.items():
        assert _seconds(limit) == wanted, limit
    assert (_seconds("2-03:04"), _seconds("2-03:04:05")) == (2 * day + 11040, 2 * day + 11045)
    assert _seconds("UNLIMITED") is _seconds("1:2:3:4") is _seconds("") is None


@pytest.mark.parametrize(("code", "state", "restarts", "again"), [
    (0, "RUNNING", 0, False),
    (1, "RUNNING", 0, False),
    (2, "RUNNING", 0, False),
    (75, "RUNNING", 3, True),
    (85, "RUNNING", 0, True),
    (143, "RUNNING", 0, True),
    (85, "COMPLETING", 0, False),
    (85, "RUNNING", 100, False),
])  # fmt: skip
def test_what_can_go_on_is_queued_again(
    tools: Path, tmp_path: Path, code: int, state: str, restarts: int, again: bool
) -> None:
    script = script_of(replace(JOB, directory=tmp_path), SlurmOptions())
    ended, _, asked = ran(script, tools, tmp_path, CODE=str(code), STATE=state, SLURM_RESTART_COUNT=str(restarts))
    assert ended == code
    assert ("requeue 7" in asked) is again


def test_failures_that_gain_no_step_are_not_queued_again_for_ever(tools: Path, tmp_path: Path) -> None:
    def again(step: int, after: int, code: int = 75) -> bool:
        """Whether it is queued again after a start that finds `step` done, and ends after another."""
        (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1}}\n' for n in range(1, step + 1)))
        more = "".join(f'{{"step": {n}, "loss": 1}}\\n' for n in range(step + 1, after + 1))
        own = script.replace("code=$?", f"code=$?; printf '{more}' >> \"$run/metrics.jsonl\"")
        return "requeue 7" in ran(own, tools, tmp_path, CODE=str(code), STATE="RUNNING")[2]

    script = script_of(replace(JOB, folder=tmp_path, directory=tmp_path), SlurmOptions())
    assert [again(0, 0), again(0, 0), again(0, 5), again(5, 5), again(5, 5), again(5, 5)] == [True] * 5 + [False]
    assert [again(5, 5), again(5, 5), again(5, 5, code=85), again(5, 5)] == [True] * 3 + [False]


def test_a_run_that_is_none_of_the_sweep_ends(tools: Path, tmp_path: Path) -> None:
    script = script_of(replace(JOB, directory=tmp_path, runs=runs_of(["lr=1,2"])), SlurmOptions())
    assert ran(script, tools, tmp_path, SLURM_ARRAY_TASK_ID="2")[:2] == (1, [])


@pytest.mark.parametrize(
    ("queued", "found"),
    [
        ("12|12|N/A|PENDING|None|{folder}", "12"),
        ("14|12|3|RUNNING|None|{folder}", "12"),
        ("11|11|N/A|CANCELLED|None|{folder}", ""),  # of an earlier launch into the folder
        ("12|12|N/A|PENDING|None|/elsewhere", ""),
    ],
)
def test_a_job_that_was_taken_without_an_answer_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queued: str, found: str
) -> None:
    for name, text in (
        ("sbatch", "echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller' >&2; exit 1"),
        ("squeue", f"echo '{queued.format(folder=tmp_path)}'"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = replace(JOB, folder=tmp_path)
    if found:
        assert submit(job) == found
        return
    with pytest.raises(LaunchError, match=r"Slurm took no job: .*Unable to contact"):
        submit(job)


def test_jobs_to_wait_for(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text('{"job_id": "17"}')
    assert ids_of(["12", "13_4", str(tmp_path)]) == ("12", "13_4", "17")
    script = script_of(JOB, SlurmOptions(after=("12", "17")))
    assert "#SBATCH --dependency=afterok:12:17\n" in script
    with pytest.raises(LaunchError, match="neither the id of a job nor a folder"):
        ids_of([str(tmp_path / "none")])
