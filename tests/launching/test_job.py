"""Sweeps as words, and what is remembered of a launch."""

from pathlib import Path

import pytest

from fullframe.errors import LaunchError
from fullframe.launching.job import Job, RunOfJob, read_launch, runs_of, slug, write_launch


def test_a_sweep_is_every_combination() -> None:
    runs = runs_of(["lr=1e-3,3e-4", "size=(1,2),'a,b'"])
    assert [run.values for run in runs] == [
        ("lr=1e-3", "size=(1,2)"),
        ("lr=1e-3", "size='a,b'"),
        ("lr=3e-4", "size=(1,2)"),
        ("lr=3e-4", "size='a,b'"),
    ]
    assert [run.place for run in runs[:2]] == ["0000-lr=1e-3,size=_1,2_", "0001-lr=1e-3,size=_a,b_"]
    assert [run.place for run in runs_of([])] == ["."]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr"], "no sweep"),
        (["l-r=1,2"], "no sweep"),
        (["lr="], "empty value"),
        (["lr=1,,2"], "empty value"),
        (["lr=1", "lr=2"], "lr twice"),
        (["lr=1,1"], "a value twice"),
    ],
)
def test_what_is_no_sweep_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        runs_of(words)


def test_a_slug_is_a_file_name_on_any_system() -> None:
    assert slug("a/b c;$(x)") == "a_b_c_x_"
    assert slug("") == "_"
    assert len(slug("x" * 300)) == 80


def test_a_launch_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_launch(tmp_path) == {}
    others = '{"runs": 3}', '{"runs": ["x"]}', '{"runs": [{"place": "x"}]}'
    for text in ("[]", "{", "", *others):
        (tmp_path / "launch.json").write_text(text)
        assert read_launch(tmp_path) == {}


def test_a_launch_is_remembered(tmp_path: Path) -> None:
    runs = RunOfJob(place="0-a", values=("lr=1",)), RunOfJob(place="1-b", values=())
    machines = {"nodes": 2, "gpus_per_node": None, "cpus_per_node": None, "python": "python"}
    job = Job(name="a", folder=tmp_path, directory=Path("/there"), options=("r.py",), runs=runs, **machines)
    write_launch(job, {"on": "slurm", "job_id": "7"})
    known = {"name": "a", "options": ["r.py"], "directory": "/there", "nodes": 2, "on": "slurm", "job_id": "7"}
    assert read_launch(tmp_path) == {
        **known,
        "runs": [{"place": "0-a", "values": ["lr=1"]}, {"place": "1-b", "values": []}],
    }
