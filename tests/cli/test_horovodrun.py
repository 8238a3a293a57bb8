"""Horovod's way to write a command line, in the words of ours."""

import pytest

from fullframe.cli.application import run
from fullframe.cli.horovodrun import separated


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("-np 4 python train.py -np 3", "--np 4 -- python train.py -np 3"),
        ("-np 4 -H a:2,b:2 --check-build x --np 1", "--np 4 --hosts a:2,b:2 --check-build -- x --np 1"),
        ("--num-proc 2 --min-num-proc=1 ./run.sh", "--np 2 --min-np 1 -- ./run.sh"),
        ("-np 2 -- python -c pass", "--np 2 -- python -c pass"),
        ("--no-stall-check -np 2 x -v", "--no-stall-check --np 2 -- x -v"),
        ("--help", "--help"),
    ],
)
def test_options_end_where_the_command_begins(given: str, meant: str) -> None:
    assert " ".join(separated(given.split())) == meant


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-np 2", "which command?"),
        ("-np 0 python x", "--np must be at least 1"),
        ("-np 3 -H localhost:2 python x", "3 processes need 3 slots, localhost:2 have 2"),
        ("-np 2 --hostfile none python x", "there is no host file none"),
        ("-np 2 --min-np 3 python x", "--min-np 3 <= -np 2 <= --max-np 2 does not hold"),
        ("-np 2 --host-discovery-script ./none python x", "the host discovery script failed"),
        ("-np 2 -H a:1 -hostfile hosts python x", "--hosts and --hostfile say which hosts there are"),
        ("-np 2 not-there x", "not-there cannot be started: No such file or directory"),
    ],
)
def test_wrong_use_names_the_remedy(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["horovodrun", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_check_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["horovodrun", "--check-build"]) == 0
    out = capsys.readouterr().out
    assert "[X] PyTorch" in out and "[ ] TensorFlow" in out and "[X] Gloo" in out
